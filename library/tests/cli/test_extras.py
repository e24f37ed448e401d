"""Optional libraries: missing and old ones are refused with the extra that brings them, before anything is imported."""

import sys
import types

import pytest

from blockcache.errors import EngineError, FileError
from blockcache.extras import installed, installed_version, require


def test_what_is_there_is_taken_without_importing_it():
    sys.modules.pop("this", None)
    assert installed("this")
    require("this", "zen", "a poem", error=FileError)
    assert "this" not in sys.modules


def test_what_is_missing_is_refused_in_the_words_of_the_caller():
    assert not installed("surely_not_there")
    assert installed_version("surely_not_there") is None
    with pytest.raises(EngineError) as caught:
        require("surely_not_there", "extra", "an engine", error=EngineError)
    sentence = (
        'an engine needs surely_not_there, which is not installed; it comes with "blockcache[extra]", which docs/start.md '
        "says how to install from a clone or a wheel"
    )
    assert str(caught.value) == sentence


def test_a_library_goes_by_the_name_that_people_know(monkeypatch):
    monkeypatch.setattr("blockcache.extras.find_spec", lambda module: None)
    with pytest.raises(FileError, match="a picture needs Pillow"):
        require("PIL", "plots", "a picture", error=FileError)


@pytest.mark.parametrize(("found", "enough"), [("1.9", False), ("1.23", True), ("1.23.0rc1", True), ("2.0", True)])
def test_versions_are_compared_as_numbers(monkeypatch, found, enough):
    monkeypatch.setitem(sys.modules, "toy_library", types.SimpleNamespace(__version__=found))
    assert installed_version("toy_library") == found
    if enough:
        require("toy_library", "toy", "a game", error=FileError, minimum=(1, 23))
        return
    with pytest.raises(
        FileError, match=r"a newer toy_library than the installed 1.9; version 1.23 or newer comes with"
    ):
        require("toy_library", "toy", "a game", error=FileError, minimum=(1, 23))

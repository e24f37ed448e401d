"""docs/adding-a-family.md is a family that works: its blocks are one file, registered as it says, held to the contract."""

import importlib
import sys
from importlib.metadata import EntryPoint

import pytest

from blockcache.models.registry import port_of
from pages import PAGES, fenced

PAGE = "docs/adding-a-family.md"


@pytest.fixture
def family(tmp_path, monkeypatch):
    *blocks, used = fenced(PAGES[PAGE], "python")
    (tmp_path / "my_family.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    registered = "\n".join(fenced(PAGES[PAGE], "toml"))
    group, line = registered.strip().splitlines()
    assert group == '[project.entry-points."blockcache.families"]'
    name, place = (part.strip().strip('"') for part in line.split("="))
    point = EntryPoint(name, place, "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])
    yield importlib.import_module("my_family"), used
    sys.modules.pop("my_family", None)


@pytest.mark.usefixtures("exports_stay_here")
def test_the_family_keeps_the_contract(family):
    module, used = family
    contract = module.TestMyFamily()
    assert port_of(contract.policy()).adapter.family == "my-family"
    promises = [name for name in dir(contract) if name.startswith("test_")]
    assert len(promises) > 10
    for name in promises:
        getattr(contract, name)()
    names = dict(vars(module))
    exec(compile(used, PAGE, "exec"), names)
    assert names["fast"].engine == "onnx"
    assert tuple(names["action"].shape) == (8, 2, 2)

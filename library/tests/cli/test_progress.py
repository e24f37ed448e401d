"""Progress bars are for people: a terminal gets them; a pipe or a log file gets a line now and then, of long work only."""

import io
import sys
import time
from pathlib import Path

import pytest

import blockcache
from blockcache.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "disable", "drawn"), [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False)]
)
def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch, stream, disable, drawn):
    monkeypatch.setattr(sys, "stderr", stream())
    assert list(progress_bar(range(3), "counting", disable=disable, unit="step")) == [0, 1, 2]
    with progress_bar(desc="moving", total=2, disable=disable) as bar:
        bar.update()
    assert ("counting" in sys.stderr.getvalue()) is ("moving" in sys.stderr.getvalue()) is drawn


def test_long_work_in_a_pipe_writes_whole_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(blockcache.progress, "BETWEEN_LINES", 0.01)
    for _ in progress_bar(range(3), "outer"):
        for _ in progress_bar(range(2), "inner", leave=False):
            time.sleep(0.02)
    lines = sys.stderr.getvalue().splitlines()
    assert {line.split(":")[0] for line in lines} == {"outer", "inner"}
    assert "outer: 100%" in lines[-1]
    assert all(line.strip() == line and "\x1b" not in line for line in lines)


def test_every_bar_is_made_in_one_place():
    package = Path(blockcache.__file__).parent
    users = [path.name for path in package.rglob("*.py") if "import tqdm" in path.read_text()]
    assert users == ["progress.py"]


def test_a_verb_in_a_pipe_writes_no_bars(command, policy_directory, tmp_path):
    code, out, err = command("calibrate", policy_directory, "--generations", 3, "-o", tmp_path / "r.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith(str(tmp_path / "r.safetensors"))

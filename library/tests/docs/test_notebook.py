"""The notebook that people share: it runs top to bottom, and no output is kept in it."""

import json
import os
import subprocess
import sys

import pytest

from repository import ROOT

NOTEBOOK = ROOT / "examples/fast_policy.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_outputs_are_stripped():
    for cell in CELLS:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert cell["metadata"] == {}


def test_links_lead_somewhere():
    for cell in CELLS:
        for target in "".join(cell["source"]).split("](")[1:]:
            path, _, _ = target.partition(")")[0].partition("#")
            assert not path or (NOTEBOOK.parent / path).exists(), path


def test_it_runs_top_to_bottom(tmp_path):
    """All cells as one program: none has Jupyter's own syntax. Only the minutes of tuning are fewer."""
    for needed in ("gym_pusht", "matplotlib"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    program = "\n\n".join(CODE)
    assert program.count("MINUTES = 2 ") == 1
    (tmp_path / "notebook.py").write_text(program.replace("MINUTES = 2 ", "MINUTES = 1 "))
    settings = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "BLOCKCACHE_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, "-W", "ignore:FigureCanvasAgg is non-interactive", "notebook.py"]
    ran = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "times as fast" in ran.stdout
    assert "policy.onnx agrees with its policy: 16 observations" in ran.stdout
    assert "'ticks': 30" in ran.stdout

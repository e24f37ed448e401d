"""`blockcache report` works where torch, diffusers, onnx and onnxruntime cannot be imported."""

import subprocess
import sys

import pytest

from repository import ROOT

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "diffusers", "onnx", "onnxruntime"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
IMPORTED = """
import pkgutil
from importlib import import_module
import blockcache.report, blockcache.results

for package in (blockcache.report, blockcache.results):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        print(import_module(module.name).__name__)
"""
REPORT = "from blockcache.cli import main\nmain()"


def run(code, *words):
    return subprocess.run([sys.executable, "-c", WITHOUT + code, *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("library", ["torch", "diffusers", "onnx", "onnxruntime"])
def test_the_libraries_really_cannot_be_imported(library):
    found = run(f"import {library}")
    assert found.returncode == 1
    assert f"No module named '{library}'" in found.stderr


def test_every_module_of_the_page_and_of_the_results_is_imported():
    found = run(IMPORTED)
    assert found.returncode == 0, found.stderr
    names = found.stdout.split()
    assert "blockcache.report.overview.page" in names
    assert "blockcache.results.rollouts" in names


def test_the_page_of_the_shipped_records_is_written(tmp_path):
    records, performance = (next(ROOT.glob(f"docs/**/{name}")) for name in ("frontier-pusht", "performance.json"))
    found = run(REPORT, "report", str(records), "pusht", str(performance), "-o", str(tmp_path / "page.html"))
    assert found.returncode == 0, found.stderr
    assert "figures" in found.stdout
    page = (tmp_path / "page.html").read_text()
    for words in (
        "difference of the score to the full policy",
        "One chunk by engine",
        "Loss and distance against time",
    ):
        assert words in page

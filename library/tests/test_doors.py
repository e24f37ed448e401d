"""The doors: another package brings verbs, tasks, policies, sections, files and rows, and a broken one disturbs nothing.

Every command runs in a process of its own, in which the package lies on the path as pip would have put it there. The
package is the one that CONTRIBUTING.md shows. Needs both houses: what is said without the laboratory is tried for all that
it has.
"""

import os
import re
import subprocess
import sys
from configparser import ConfigParser

import numpy as np
import pytest

import blockcache as bc
from blockcache.results.bench import FORMAT
from blockcache_lab.cli import VERBS
from cli_inputs import SMALL
from file_formats import write_schedule
from laboratory_formats import write_analysis
from repository import ROOT

WITHOUT_THE_LABORATORY = """
import importlib.metadata as metadata
import sys

found = metadata.entry_points
metadata.entry_points = lambda **group: [
    point for point in found(**group) if not point.value.startswith("blockcache_lab")
]
sys.modules["blockcache_lab"] = None
"""
SHORT = """
import torch
from blockcache.measure import latency, machine

torch.nn.Module.compile = None  # which is said to be unavailable
machine.peak_gflops.__defaults__ = (64, 0.05)
latency.REST = 0.0
"""
RUN = "import sys; from blockcache.cli import main; main(sys.argv[1:])"


def run(place, *arguments, before=""):
    """Exit code, what is printed, and the complaints of `blockcache` with the packages that lie in `place`."""
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{RUN}", *map(str, arguments)],
        cwd=place,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def install(place, name, groups):
    """What pip writes for a package: its name and its entry points, by group."""
    info = place / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    with open(info / "entry_points.txt", "w") as file:
        points = ConfigParser(delimiters="=")
        points.read_dict(groups)
        points.write(file)


@pytest.fixture(scope="module")
def robot(tmp_path_factory, make_policy):
    """Where the package of CONTRIBUTING.md is installed, with a policy in it."""
    place = tmp_path_factory.mktemp("robot")
    section = re.search(r"^## Doors\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    project, *modules = re.findall(r"```(?:toml|python)\n(.*?)```", section, re.DOTALL)
    groups = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n((?:.+\n)+)', project)
    pairs = {group: dict(re.findall(r'([\w-]+) = "([^"]+)"', lines)) for group, lines in groups}
    install(place, re.search(r'^name = "(.+)"$', project, re.MULTILINE)[1], pairs)
    for module in modules:
        path = place / re.match(r"# ([\w/]+\.py)", module)[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(module)
    policy = make_policy(obs_dim=2, action_dim=2, task="my-reach")
    shipped = place / "my_robot" / "assets" / "policies"
    shipped.mkdir(parents=True)
    bc.save_policy(policy, shipped / "reach-policy")
    return place


def test_a_package_brings_a_verb_and_one_inside_a_group(robot):
    code, out, _ = run(robot, "--help")
    assert code == 0
    assert re.search(r"From my-robot:\n +greet +Greet the robot by its name\.", out)
    assert "weigh" not in out
    assert "weigh  Count the weights of a policy." in run(robot, "policy", "--help")[1]
    assert run(robot, "greet", "Ada") == (0, "Hello, Ada.\n", "")


def test_a_package_brings_a_policy(robot, make_policy):
    weights = sum(weight.numel() for weight in make_policy(obs_dim=2, action_dim=2).parameters())
    assert run(robot, "policy", "weigh", "reach-policy") == (0, f"{weights} weights\n", "")
    code, _, err = run(robot, "policy", "observe", "no-policy", "-o", "x.npz")
    assert code == 2
    assert "reach-policy" in err


def test_a_package_brings_a_task(robot):
    code, _, err = run(robot, "policy", "observe", "reach-policy", "--episodes", 2, "--count", 8, "-o", "seen.npz")
    assert code == 0, err
    seen = np.load(robot / "seen.npz")["obs"]
    assert seen.shape == (8, 2, 2)
    assert np.abs(seen).max() > 0.01


def test_a_package_brings_a_section_of_the_page(robot):
    path = write_schedule(robot)
    assert run(robot, "report", path, "-o", "out.html")[0] == 0
    page = (robot / "out.html").read_text()
    assert '<h2 id="my-robot">My robot</h2>' in page
    assert "It runs " in page


def test_a_package_brings_a_kind_of_file_for_its_section(robot):
    (robot / "battery.json").write_text('{"format": "my-robot-battery", "minutes": 40}')
    assert run(robot, "report", "battery.json", write_schedule(robot), "-o", "battery.html")[0] == 0
    page = (robot / "battery.html").read_text()
    assert "Its battery lasts 40 minutes." in page
    assert "my-robot measure" in page  # among the commands that made what it shows
    run(robot, "report", write_schedule(robot), "-o", "none.html")
    assert "battery" not in (robot / "none.html").read_text()


def bench(place):
    """A small benchmark without what takes its time: the rows by name, and what is unavailable."""
    assert run(place, "bench", *SMALL, "--repeats", 2, "--json", "bench.json", before=SHORT)[0] == 0
    found = FORMAT.load(place / "bench.json")
    return {row["name"]: row for row in found["rows"]}, found["unavailable"]


def test_a_package_brings_a_row_of_the_benchmark(robot):
    rows, unavailable = bench(robot)
    row = rows["my-robot, its network"]
    assert (row["engine"], row["gflop"], row["max_difference"]) == ("none", 0, None)
    assert row["p50_ms"] >= 2
    assert "eager, 1 thread" in rows
    assert not any(name.startswith("blockcache.bench") for name in unavailable)


# ---- what is broken


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A package whose every entry is broken, and another that is named by all groups and not there at all."""
    place = tmp_path_factory.mktemp("broken")
    (place / "rusty.py").write_text("VERBS = {'squeak': 3}\nraise_later = lambda sources: 1 / 0\n")
    install(
        place,
        "rusty-robot",
        {
            "blockcache.verbs": {"rusty-robot": "rusty:VERBS"},
            "blockcache.tasks": {"rust": "rusty:NOTHING"},
            "blockcache.policies": {"rusty-robot": "rusty"},
            "blockcache.sections": {"rust": "rusty:raise_later"},
            "blockcache.files": {"rusty.file": "rusty:raise_later"},
            "blockcache.bench": {"rust": "rusty:NOTHING"},
        },
    )
    install(
        place,
        "lost-robot",
        {
            "blockcache.verbs": {"lost-robot": "lost:VERBS"},
            "blockcache.policies": {"lost-robot": "lost"},
            "blockcache.sections": {"lost": "lost:sections"},
        },
    )
    return place


def test_broken_verbs_are_named_and_disturb_no_other(broken):
    code, out, _ = run(broken, "--help")
    assert code == 0
    assert "tune" in out
    assert "No module named 'lost'" in out
    for package in ("rusty-robot", "lost-robot"):
        code, _, err = run(broken, package)
        assert code == 2
        assert f"the verb '{package}' of {package} cannot be loaded" in err
    assert run(broken, "policy", "--help")[0] == 0


def test_broken_policies_are_named_where_one_is_not_found(broken):
    code, _, err = run(broken, "policy", "observe", "no-policy", "-o", "x.npz")
    assert code == 2
    assert "pusht" in err
    assert (
        "the policies 'lost-robot' of lost-robot cannot be loaded: ModuleNotFoundError: No module named 'lost'" in err
    )
    assert "the policies 'rusty-robot' of rusty-robot cannot be loaded" in err
    assert run(broken, "show", "no-file")[0] == 2


def test_a_broken_task_is_named(broken):
    code, _, err = run(broken, "policy", "observe", "pusht", "--task", "rust", "-o", "x.npz")
    assert code == 2
    assert "the task 'rust' of rusty-robot cannot be loaded" in err


def test_a_broken_section_is_named_on_the_page(broken):
    path = write_schedule(broken)
    assert run(broken, "report", path, "-o", "out.html")[0] == 0
    page = (broken / "out.html").read_text()
    assert "the section &#39;rust&#39; of rusty-robot cannot be loaded: ZeroDivisionError: division by zero." in page
    assert "the section &#39;lost&#39; of lost-robot cannot be loaded" in page
    assert "The commands that made it" in page


def test_a_broken_reader_is_named_and_other_files_are_read(broken):
    path = write_schedule(broken)
    (broken / "rust.json").write_text('{"format": "rusty.file", "version": 1}')
    code, _, err = run(broken, "report", "rust.json", "-o", "rust.html")
    assert code == 2
    assert "rust.json cannot be read: the reader 'rusty.file' of rusty-robot cannot be loaded: ZeroDivisionError" in err
    assert run(broken, "report", path, "-o", "out.html")[0] == 0


def test_broken_rows_are_named_and_the_others_measured(broken):
    rows, unavailable = bench(broken)
    assert "eager, 1 thread" in rows
    assert unavailable["blockcache.bench rust"] == "AttributeError: module 'rusty' has no attribute 'NOTHING'"


# ---- without the laboratory


def test_without_the_laboratory_an_analysis_says_who_reads_it(tmp_path):
    path = write_analysis(tmp_path)
    code, _, err = run(tmp_path, "report", path, "-o", "out.html", before=WITHOUT_THE_LABORATORY)
    assert code == 2
    assert "its format is 'blockcache.analysis', expected" in err
    assert "where blockcache-lab is installed, an analysis, distances or performance" in err


@pytest.mark.parametrize("verb", VERBS)
def test_without_the_laboratory_its_verbs_say_how_to_get_it(tmp_path, verb):
    code, _, err = run(tmp_path, *verb.split(), "pusht", before=WITHOUT_THE_LABORATORY)
    assert code == 2
    assert f"'blockcache {verb}' is in blockcache-lab, which is not installed" in err
    assert '"blockcache-lab", which docs/start.md says how to install' in err


def test_without_the_laboratory_the_others_are_there(tmp_path):
    code, out, _ = run(tmp_path, "--help", before=WITHOUT_THE_LABORATORY)
    assert code == 0
    assert "tune" in out
    assert "paper" not in out

"""The demo, on a toy: it ends well with and without a simulator, and the clock decides how many rollouts there are."""

import json
import re

import numpy as np
import pytest

from blockcache.cli import demo
from blockcache.compare import jobs
from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import one_by_one
from blockcache.compare.methods import parse_method
from blockcache.measure.statistics import Estimate
from blockcache.models.loading import load_policy, save_policy
from blockcache.models.registry import port_of
from blockcache.results import stored
from blockcache.results.rollouts import Results
from blockcache.results.stored import Stored, StoredMethod
from blockcache.samplers import DDPM, ChosenSampler
from toy_evaluation import OWN
from toy_task import Toy, observations


class Clock:
    """A job takes two seconds, whatever it is."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def backend(self, work, given):
        for place, outcome in one_by_one(work, given):
            self.now += 2
            yield place, outcome


@pytest.mark.parametrize(
    ("seconds", "rollouts"),
    # the first round: six jobs open loop and a group of three methods and the full policy, 20 s; the others 8 s each
    [(1, 5), (41.9, 5), (42, 15), (60, 25), (61, 30)],
)
def test_rollouts_grow_while_time_is_left(make_policy, tmp_path, seconds, rollouts):
    clock, names = Clock(), ["full", "ddim-10", "uniform:S=10", "bac:S=10,n=5"]
    evaluation = prepare(
        make_policy(sampler=OWN),
        "toy",
        [parse_method(name) for name in names[1:]],
        observations()[:4],
        state=tmp_path,
        rollouts=demo.MOST,
        group=demo.GROUP,
        generations=3,
        engine="loop",
        make=Toy,
        progress=False,
    )
    results = evaluation.run_for(seconds, clock.backend, clock=clock, progress=False)
    assert isinstance(results, Results)
    assert [method.name for method in results.methods] == names
    for name in names:
        assert list(results.of(name)) == [100_000 + seed for seed in range(rollouts)]
    assert clock.now <= max(seconds, 20)
    assert set(evaluation.speed(1, progress=False).seconds) == {"plain policy", *names}


@pytest.fixture
def shell(make_policy, tmp_path, monkeypatch, toy_by_name, command):
    """Runs `blockcache demo` on a policy for the toy task."""
    save_policy(make_policy(sampler=OWN, task="toy"), tmp_path / "policy")
    np.savez(tmp_path / "policy" / "observations.npz", obs=observations().numpy())
    monkeypatch.setattr(jobs, "local_workers", lambda: one_by_one)
    monkeypatch.setattr(stored, "shipped", lambda: None)
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fixed = ["policy", "--generations", "3", "--repeats", "1"]
    return lambda *arguments: command("demo", *fixed, *arguments)


def closed_loop(out):
    """The rows of the second table, by method."""
    _, _, after = out.partition("Now in the simulator")
    lines = [line for line in after.splitlines() if line.startswith(("full precision", "DDPM", "BAC", "tuned"))]
    return {line.split("  ")[0]: line for line in lines}


def test_the_demo_ends_with_a_closed_loop_table(shell, tmp_path, monkeypatch):
    code, out, _ = shell("--seconds", 1)
    assert code == 0
    assert "action error" in out
    monkeypatch.setattr(demo, "_open_loop", lambda *given: None)  # seen once is enough
    table = closed_loop(out)
    assert list(table) == ["full precision", "BAC S=10 n=5", "DDPM-16"]
    (count,) = re.findall(
        r"Mean score of (\d+) rollouts on toy", out
    )  # as many groups as this machine runs in the time
    assert int(count) % demo.GROUP == 0
    assert all(f", n = {count}" in table[name] and "[" in table[name] for name in list(table)[1:])
    assert "stored" not in out.lower()
    assert "Tuned:" not in out
    weights = port_of(load_policy("policy")).fingerprint.weights
    bac = StoredMethod("bac:S=10,n=5", 7, None, Estimate(0.8, 0.7, 0.9, 250), Estimate(-0.123, -0.2, -0.05, 250))
    for kept, fits in ((weights, True), ("another", False)):
        monkeypatch.setattr(stored, "shipped", lambda kept=kept: Stored("toy", kept, {"generations": 16}, (bac,)))
        code, out, _ = shell("--seconds", 1)
        assert code == 0
        assert ("-0.123 [-0.200, -0.050], n = 250" in closed_loop(out)["BAC S=10 n=5"]) == fits
        assert ("Stored: not measured now" in out) == fits


def test_what_was_tuned_for_the_policy_is_among_the_methods(shell, tmp_path, monkeypatch):
    few = DDPM(num_inference_steps=3)
    (tmp_path / "policy" / "tuned").mkdir()
    fingerprint = port_of(load_policy("policy")).fingerprint
    ChosenSampler(few, fingerprint).save(tmp_path / "policy" / "tuned" / "sampler.json")
    (tmp_path / "policy" / "tuned" / "tuning.json").write_text("{}")
    monkeypatch.setattr(demo, "_open_loop", lambda *given: None)
    code, out, _ = shell("--seconds", 1)
    assert code == 0
    assert "one page" not in out
    assert "tuned" in closed_loop(out)
    assert "Tuned: what" in out


def test_the_demo_ends_by_naming_its_page(shell, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_open_loop", lambda *given: None)
    code, out, _ = shell("--seconds", 1, "--report", "demo.html")
    assert code == 0
    assert out.endswith("All of it as one page, to be opened in a browser: demo.html\n")
    text = (tmp_path / "demo.html").read_text()
    for name in ("schedule-1", "front", "timings-1", "similarity"):
        assert f'id="figure-{name}"' in text
    assert "blockcache demo policy --generations 3 --repeats 1 --report demo.html --seconds 1" in text
    code, out, _ = shell("--seconds", 0, "--report", "demo.html")
    assert code == 0
    assert 'id="figure-front"' not in (tmp_path / "demo.html").read_text()  # no rollouts, and the old page is gone


def test_without_time_or_simulator_the_demo_still_ends_well(shell, tmp_path, monkeypatch):
    code, out, _ = shell("--seconds", 0)
    assert code == 0
    assert "action error" in out
    assert "simulator" not in out

    def missing(spec):
        raise ImportError("No module named 'gym_toy'")

    monkeypatch.setattr(demo, "_open_loop", lambda *given: None)
    monkeypatch.setattr("toy_task.Toy", missing)
    code, out, err = shell()
    assert code == 0
    assert "No rollouts here: the simulator of task 'toy' is not usable" in out
    assert '"blockcache[toy]"' in out
    assert "error" not in err
    config = tmp_path / "policy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"task": None}))
    code, out, _ = shell()
    assert code == 0
    assert "No rollouts here: the policy does not say which task" in out

"""Suite rdt: what is in it, few steps and schedules for an RDT policy, rollouts of one moment, what is saved exactly."""

import numpy as np
import pytest
import torch

from blockcache.compare.candidates import Calibrations
from blockcache.compare.evaluation import prepare
from blockcache.compare.methods import method_named, parse_method
from blockcache.errors import FileError, TaskError
from blockcache.models.loading import save_policy
from blockcache.models.rdt.policy import public_sampler
from blockcache.models.registry import port_of
from blockcache.report.markdown import render
from blockcache.results.rollouts import Results
from blockcache.samplers import table
from blockcache_lab.pages.rdt import page
from blockcache_lab.pages.rdt_findings import RdtSuite
from blockcache_lab.studies.equal_flops import engine_flops, equal_flops
from blockcache_lab.studies.open_loop import exact_of
from blockcache_lab.studies.suites import ALONE, KINDS, RDT, SUITES, suite_by_name, suite_of, with_tuned
from rdt_policies import rdt_observation, rdt_policy
from toy_rdt_task import ToyRDT, observations

BACS = [f"bac:S={updates},n=3" for updates in (1, 2, 3, 5)]


@pytest.fixture(scope="module")
def policy():
    return rdt_policy(sampler=public_sampler(20), task="toy-rdt")


@pytest.fixture(scope="module")
def calibrations(policy):
    return Calibrations(port_of(policy), observations(3), progress=False)


# ---- what is compared


def test_it_has_a_directory_seeds_and_many_rollouts_of_its_own():
    assert RDT in ALONE
    assert RDT not in SUITES
    assert KINDS[RDT].rollouts == 100
    found = suite_by_name(
        RDT, lambda kind, method: parse_method(f"{kind}:budget=0.2" if kind == "action" else f"{kind}-4")
    )
    assert {*BACS, "full", *(f"uniform:S={updates}" for updates in (1, 2, 3, 5))} <= set(found.methods)
    assert {f"dpmsolver++-{steps}" for steps in (10, 5, 4, 3, 2, 1)} <= set(found.methods)
    assert {method_named(name).kind for name in found.methods} == {
        "full precision",
        "BAC",
        "Uniform",
        "DPM-Solver++-N",
        "Action costs",
    }
    tuned = with_tuned(found, "there")
    assert tuned.methods[-1] == "tuned:there"
    assert not any(cell.main for cell in tuned.cells)  # all get the same number of rollouts


def test_fewer_steps_keep_what_the_policy_was_trained_for(calibrations):
    for steps in (10, 5, 3, 2, 1):
        found = calibrations.candidate(parse_method(f"dpmsolver++-{steps}")).sampler
        assert found == public_sampler(steps)  # the clean sample predicted, 1000 timesteps
        made = table(found)
        assert len(made.timesteps) == steps
        assert made.timesteps[0] == 999


def test_rivals_have_the_flops_of_bac(calibrations):
    equal, port = equal_flops(calibrations), calibrations.port

    def flops(method):
        return calibrations.candidate(method).flops(port, 0.0)

    one_step = flops(parse_method("dpmsolver++-2")) - flops(parse_method("dpmsolver++-1"))
    bacs = [parse_method(name) for name in BACS]
    for bac in bacs:
        assert abs(flops(equal("dpmsolver++", bac)) - flops(bac)) <= one_step / 2
    for bac in bacs[1:]:
        assert 0.9 * flops(bac) < flops(equal("action", bac)) <= 1.001 * flops(bac)


def test_with_one_update_there_is_one_schedule_only(calibrations):
    (bac, uniform) = (calibrations.candidate(parse_method(name)) for name in ("bac:S=1,n=3", "uniform:S=1"))
    assert bac.strategy.updates == uniform.strategy.updates
    assert set(bac.strategy.updates.values()) == {(0,)}


# ---- one moment


def test_an_axis_of_moments_is_dropped(policy):
    plain = rdt_observation(2)
    moments = {
        name: value if value.ndim == 3 and value.shape[1] == 1 else value[:, None] for name, value in plain.items()
    }
    moments["ctrl_freqs"] = plain["ctrl_freqs"][:, None, None]
    assert [moments[name].ndim for name in ("lang_tokens", "lang_attn_mask", "ctrl_freqs")] == [4, 3, 3]
    noise = policy.draw_noise(2, torch.Generator().manual_seed(0))
    answers = [policy.predict_action(obs, noise=noise)["action"] for obs in (plain, moments)]
    assert torch.equal(*answers)


def test_a_task_of_other_widths_is_refused(policy, tmp_path):
    inputs = {**ToyRDT().spec.inputs, "img_tokens": (11, 9)}

    def other():
        return ToyRDT(type(ToyRDT().spec)(**{**vars(ToyRDT().spec), "inputs": inputs}))

    with pytest.raises(TaskError, match=r"'img_tokens' inputs have \(10, 9\) numbers, the task's \(11, 9\)"):
        prepare(policy, "toy-rdt", [], observations(4), state=tmp_path, generations=2, make=other, progress=False)


# ---- running


@pytest.fixture
def shell(policy, tmp_path, monkeypatch, toy_by_name, command, exports_stay_here):
    """Runs verbs beside a policy directory with observations as rollouts show them."""
    save_policy(policy, tmp_path / "policy")
    np.savez(tmp_path / "policy" / "observations.npz", **observations(12))
    monkeypatch.chdir(tmp_path)
    return command


def test_the_quick_form_runs_from_rollouts_to_the_page(shell, tmp_path, policy):
    common = ["policy", "--engine", "loop", "-o", "deep"]
    code, out, err = shell("paper", "suite", RDT, *common, "--quick", "--workers", 1)
    assert code == 0, err
    assert "'blockcache paper rdt deep' makes the page" in out
    path = tmp_path / "deep" / "rdt.json"
    results = Results.load(path)
    suite = suite_of(results, path)
    assert suite.quick
    assert all(record.error is None for record in results.records)
    assert {record.seed for record in results.of("full").values()} == {150_000, 150_001}
    records = [results.of(name).values() for name in ("bac:S=1,n=3", "uniform:S=1")]
    assert [[record.score for record in found] for found in records] == [[r.score for r in records[0]]] * 2
    exact, port = exact_of(results, path), port_of(policy)
    assert 0 < exact.largest_difference < 1e-5
    full = next(method for method in results.methods if method.name == "full")
    sizes = port.sizes
    assert exact.flops["full"] == sizes.folded_once + 20 * (
        sizes.folded_every_step + sum(block.cost for block in sizes.folded_blocks)
    )
    assert exact.flops["full"] < full.flops
    timed = shell("paper", "timing", *common, "--suite", RDT, "--repeats", 1, "--generations", 4)
    assert timed[0] == 0, timed
    assert shell("paper", "rdt", "deep", "-o", "pages")[0] == 0
    text = (tmp_path / "pages" / "rdt.md").read_text()
    assert text == render(page([RdtSuite.load("deep")]))
    for wanted in (
        "**From a quick run",
        "`blockcache paper suite rdt policy -o deep --quick`",
        "`blockcache paper timing policy --suite rdt -o deep`",
        "actions the same within 1e-05",
        "12 blocks of width 32, 20 steps of dpmsolver++; engine loop",
    ):
        assert wanted in text
    assert (tmp_path / "pages" / "rdt-toy-rdt.png").read_bytes().startswith(b"\x89PNG")


def test_exact_savings_are_those_of_the_methods(results):
    assert exact_of(results, "x.json") is None
    names = [method.name for method in results.methods]
    for wrong in ({"largest_difference": 0.0}, {"largest_difference": 0.0, "flops": dict.fromkeys(names[1:], 3)}, 7):
        with pytest.raises(FileError, match=r"the results file x.json does not fit \(.*\); run the suite again"):
            exact_of(Results(**{**vars(results), "setting": {**results.setting, "exact": wrong}}), "x.json")


def test_an_engine_that_saves_nothing_exactly_computes_it_all(calibrations):
    port, patched = calibrations.port, calibrations.candidate(parse_method("full"), "patched")
    assert engine_flops(port, patched) == patched.flops(port, 0.0)

"""Suite frontier: what is in it, tuned directories as methods, distances beside rollouts, modes, and the page of it all."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from blockcache.compare import dealing
from blockcache.compare.candidates import Calibrations
from blockcache.compare.methods import method_named, parse_method
from blockcache.compare.parts import TunedFiles
from blockcache.errors import FileError, FitError, ObservationError
from blockcache.measure.statistics import rank_correlation
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.report.markdown import render
from blockcache.samplers import DDPM, ChosenSampler
from blockcache.schedule import Schedule
from blockcache_lab.pages.frontier import FrontierSuite, page, split_half
from blockcache_lab.studies import suites
from blockcache_lab.studies.equal_flops import equal_flops
from blockcache_lab.studies.frontier import fork, measure_distances, modes
from blockcache_lab.studies.suite_runs import RolloutCounts, SuiteSetting, without_failed_fits
from blockcache_lab.studies.suites import FRONTIER, SUITES, Cell, Suite, suite_by_name
from repository import ROOT
from toy_task import Toy, observations

OWN = DDPM(num_inference_steps=24)
LITTLE = RolloutCounts(rollouts=2, main_rollouts=4, group=2, generations=3)


@pytest.fixture(scope="module")
def policy(make_policy):
    return make_policy(sampler=OWN, n_layer=3)


def test_it_is_a_suite_of_its_own():
    assert FRONTIER not in SUITES
    found = suite_by_name(FRONTIER, lambda kind, method: parse_method(f"{kind}:budget=0.14"))
    kinds = {method_named(name).kind for name in found.methods}
    assert {"BAC", "Action costs", "DDPM-N", "DDIM-N", "placed DDPM-N", "fitted-N", "reuse on few steps"} <= kinds
    assert len(found.methods) > 15
    assert suites.with_tuned(found, "there").methods[-1] == "tuned:there"


def test_action_costs_get_the_flops_of_bac(policy):
    calibrations = Calibrations(port_of(policy), observations()[:3], progress=False)
    equal = equal_flops(calibrations)
    flops = [
        calibrations.candidate(method).flops(calibrations.port, 0.0)
        for bac in [parse_method("bac:S=10,n=5")]
        for method in (bac, equal("action", bac))
    ]
    assert 0.9 * flops[0] < flops[1] <= 1.001 * flops[0]


# ---- a tuned directory as a method


def test_a_tuned_directory_is_its_sampler_and_its_schedule(policy, tmp_path):
    port = port_of(policy)
    calibrations = Calibrations(port, observations()[:3], progress=False)
    method = parse_method(f"tuned:{tmp_path}")
    assert method.sampler == TunedFiles(str(tmp_path))
    assert parse_method(method.name) == method
    with pytest.raises(FileError, match=r"has no tuning.json; name a directory that 'blockcache tune' wrote"):
        calibrations.candidate(method)
    (tmp_path / "tuning.json").write_text("{}")
    assert calibrations.candidate(method).sampler is calibrations.candidate(method).strategy is None
    few = DDPM(num_inference_steps=3)
    names = [block.name for block in port.adapter.blocks]
    schedule = Schedule(3, dict.fromkeys(names, (0, 2)), port.with_sampler(few).fingerprint)
    ChosenSampler(few, port.fingerprint).save(tmp_path / "sampler.json")
    schedule.save(tmp_path / "schedule.json")
    found = calibrations.candidate(method)
    assert found.sampler == few
    assert found.strategy == schedule


# ---- modes


def test_a_fork_is_two_clear_modes():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(64, 3))
    assert fork(one) is None
    assert fork(np.zeros((8, 3))) is None
    two = one + np.where(np.arange(64) < 16, 20.0, 0.0)[:, None]
    centres = fork(two)
    np.testing.assert_allclose(centres, [[20] * 3, [0] * 3], atol=0.8)  # the smaller one first
    assert fork(one + np.where(np.arange(64) < 3, 20.0, 0.0)[:, None]) is None  # outliers


def test_how_often_a_method_takes_the_smaller_mode():
    rng = np.random.default_rng(1)
    noise, far = rng.normal(size=(3, 40, 2)), 30.0

    def cloud(first, second):
        taken = np.stack([np.arange(40) < first, np.arange(40) < second, np.zeros(40, bool)])
        return noise + far * taken[:, :, None]

    found = modes(cloud(0, 4), cloud(10, 8))  # the third observation is no fork
    assert (found.forks, found.dropped) == (2, 1)
    assert found.reference == pytest.approx((0.25 + 0.2) / 2)
    assert found.found == pytest.approx(0.05)
    assert found.apart == pytest.approx((0.25 + 0.1) / 2)
    assert modes(noise, noise) is None


def test_rank_correlation_knows_order_only():
    assert rank_correlation([1, 2, 3], [10, 200, 201]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)


def test_losses_agree_with_themselves_as_far_as_they_are_more_than_chance():
    draw = np.random.default_rng(0)
    clear = np.arange(8.0)[:, None] + 0.01 * draw.normal(size=(8, 40))
    assert split_half(clear) == pytest.approx(1)
    assert abs(split_half(draw.normal(size=(200, 40)))) < 0.2  # nothing but chance


# ---- the suite


def test_a_fit_that_does_not_beat_its_start_is_left_out_with_all_that_builds_on_it():
    asked = []

    def evaluation(methods, rollouts):
        asked.extend(methods)
        if methods == ["fitted-5"]:
            raise FitError("the fit of 5 steps did not beat its start")

    names = ("full", "ddpm-8:placed", "fitted-5", "fitted-4", "fitted-5:spread=1", "fitted-5+action:budget=0.8")
    suite = Suite(FRONTIER, "All of it.", None, tuple(Cell("All", name) for name in names))
    found = without_failed_fits(SimpleNamespace(evaluation=evaluation), suite)
    assert found.methods == ("full", "ddpm-8:placed", "fitted-4", "fitted-5:spread=1")
    assert asked == ["fitted-5", "fitted-4", "fitted-5:spread=1"]
    assert found.about == (
        "All of it. Left out, with all that builds on it: fitted-5: the fit of 5 steps did not beat its start."
    )
    without = Suite(FRONTIER, "All of it.", None, tuple(Cell("All", name) for name in names[:2]))
    assert without_failed_fits(SimpleNamespace(evaluation=evaluation), without) is without


# ---- rollouts, distances and the page, on the toy task


@pytest.fixture
def few_methods(monkeypatch):
    def small(equal):
        names = (
            "full",
            "bac:S=5,n=1",
            equal("action", parse_method("bac:S=5,n=1")).name,
            "ddpm-6",
            "ddpm-6+action:budget=0.7",
        )
        return Suite(FRONTIER, "small", None, tuple(Cell("All", name, main=name == "full") for name in names))

    monkeypatch.setitem(suites.KINDS, FRONTIER, replace(suites.KINDS[FRONTIER], make=small))
    monkeypatch.setattr(dealing, "COMPARED", 2)
    monkeypatch.setattr(dealing, "FITTED", 2)


@pytest.fixture
def shell(policy, tmp_path, monkeypatch, toy_by_name, command, few_methods):
    save_policy(policy, tmp_path / "policy")
    seen = np.random.default_rng(0).standard_normal((20, *observations().shape[1:]), dtype=np.float32)
    np.savez(tmp_path / "policy" / "observations.npz", obs=seen)
    monkeypatch.chdir(tmp_path)
    return command


def test_from_rollouts_to_the_page(shell, tmp_path):
    common = ["policy", "--task", "toy", "--engine", "loop", "-o", "deep", "--generations", "3"]
    suite = shell("paper", "suite", FRONTIER, *common, "--rollouts", 3, "--main-rollouts", 4, "--workers", 1)
    assert suite[0] == 0, suite
    assert "'blockcache paper frontier deep' makes the page" in suite[1]
    assert shell("paper", "timing", *common, "--repeats", 1, "--suite", FRONTIER)[0] == 0
    assert shell("paper", "distances", *common, "--samples", 4)[0] == 0
    assert shell("paper", "frontier", "deep", "-o", "pages")[0] == 0
    found = FrontierSuite.load("deep")
    assert found.item.results.setting["first_seed"] == 150_000
    assert set(found.distances.methods) == {name for name in found.item.suite.methods if name != "full"}
    assert set(found.correlations()) == {"centre shift", "energy distance", "energy beyond spread", "predicted loss"}
    text = (tmp_path / "pages" / "frontier.md").read_text()
    for wanted in (
        "`blockcache paper distances policy -o deep`",
        "Seeds from 150000",
        "Who wins where",
        "Rank correlation",
    ):
        assert wanted in text
    for picture in (found.picture, found.scatter):
        assert (tmp_path / "pages" / picture).read_bytes().startswith(b"\x89PNG")
    assert text == render(page([found]))
    code, _, err = shell("paper", "suite", "main", *common, "--tuned", "x")
    assert (code, "--tuned is for the suites frontier and rdt" in err) == (2, True)


def test_distances_need_observations_of_their_own(policy, tmp_path, few_methods):
    setting = SuiteSetting(
        port_of(policy),
        "toy",
        np.asarray(observations()),
        tmp_path / "state",
        LITTLE,
        engine="loop",
        make=Toy,
        progress=False,
    )
    with pytest.raises(ObservationError, match=r"distances need at least 8 observations besides 7 .* got"):
        measure_distances(setting, tmp_path)


def test_a_page_needs_a_suite(tmp_path):
    with pytest.raises(FileError, match="run 'blockcache paper suite frontier POLICY"):
        FrontierSuite.load(tmp_path)


def test_the_published_page_is_what_the_code_makes_of_the_published_records(monkeypatch):
    text = (ROOT / "docs/generated/frontier.md").read_text()
    (directories,) = re.findall(r"`blockcache paper frontier (.*) -o docs/generated`", text)
    monkeypatch.chdir(ROOT)  # the page names its directories as they were given
    assert render(page([FrontierSuite.load(directory) for directory in directories.split()])) == text

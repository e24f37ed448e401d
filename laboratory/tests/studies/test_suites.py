"""The paper's comparisons as suites: what is in them, methods chosen by their FLOPs, and files that several share."""

from functools import partial

import numpy as np
import pytest

from blockcache.compare.candidates import Calibrations, running
from blockcache.compare.jobs import EvaluationError
from blockcache.compare.methods import parse_method
from blockcache.errors import FileError
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.results.rollouts import Results
from blockcache.samplers import DDPM
from blockcache.solvers.teacache import TeaCacheRule
from blockcache_lab.studies.equal_flops import equal_flops, teacache_threshold
from blockcache_lab.studies.suite_runs import QUICK, RolloutCounts, SuiteSetting, prepare_suite, shortened, time_suites
from blockcache_lab.studies.suites import BASE, SUITES, suite_by_name, suite_of
from toy_evaluation import OWN
from toy_task import Toy, observations

LITTLE = RolloutCounts(rollouts=2, main_rollouts=4, group=2, generations=3)


def ground(policy, state, amount=LITTLE, make=Toy, **others):
    settings = {"source": "tiny", "engine": "loop", "progress": False} | others
    return SuiteSetting(port_of(policy), "toy", observations(), state, amount, make=make, **settings)


@pytest.fixture(scope="module")
def policy(make_policy):
    return make_policy(sampler=OWN, n_layer=3)  # enough blocks for n = 8


@pytest.fixture(scope="module")
def main(policy, tmp_path_factory):
    """Suite main, run once; its state directory and its file."""
    directory = tmp_path_factory.mktemp("main")
    run = prepare_suite(ground(policy, directory / "state"), "main")
    run.run(progress=False).save(directory / "main.json")
    return directory


# ---- what is compared


def fake_equal(kind, method):
    name = f"{kind}-7" if kind in ("ddim", "ddpm") else f"{kind}:threshold=0.5" if kind == "teacache" else f"{kind}:S=7"
    return parse_method(name)


def test_one_factor_is_changed_at_a_time():
    suites = {name: set(suite_by_name(name, fake_equal).methods) for name in SUITES}
    assert suites["n-and-s"] == {f"bac:S={s},n=5" for s in (3, 5, 7, 10, 20)} | {
        f"bac:S=10,n={n}" for n in (0, 1, 3, 5, 8)
    }
    assert suites["metrics"] == {BASE, *(f"{BASE},metric={metric}" for metric in ("mse", "l1", "wasserstein"))}
    assert suites["ddim"] == {"ddim-40", *(f"ddim-40+bac:S={s},n=3" for s in (3, 5, 10)), "ddim-7"}
    assert {"uniform:S=10", "unified:S=10", "blockwise:S=10", BASE, f"{BASE},objective=consecutive"} <= suites[
        "ablation"
    ]
    assert f"{BASE},last=1" in suites["ablation"]
    assert {"full", BASE, "bac:S=20,n=5", "uniform:S=7", "teacache:threshold=0.5", "ddim-7", "ddpm-7"} <= suites["main"]
    for name in set.union(*suites.values()):
        assert parse_method(name).name == name


def test_the_comparisons_that_count_get_many_rollouts():
    def equal(kind, method):  # tells the two budgets apart
        return parse_method(fake_equal(kind, method).name.replace("7", "8" if "S=20" in method.name else "7"))

    many = {cell.method for cell in suite_by_name("main", equal).cells if cell.main}
    assert {"full", BASE, "bac:S=20,n=5", "uniform:S=7", "uniform:S=8", "ddim-7", "ddim-8"} <= many
    assert not any(cell.main for name in SUITES[1:] for cell in suite_by_name(name, fake_equal).cells)
    assert (RolloutCounts().rollouts, RolloutCounts().main_rollouts) == (50, 250)


def test_printed_rows_exist():
    from blockcache_lab.pages.published import printed_table

    places = [cell.printed for name in SUITES for cell in suite_by_name(name, fake_equal).cells if cell.printed]
    assert len(places) > 15
    for place in places:
        table, row = place.split("/", 1)
        assert any(row in rows for rows in printed_table(table).values()), place


# ---- methods by their FLOPs


def equal_names(calibrations):
    """By names."""
    equal = equal_flops(calibrations)
    return lambda kind, name: equal(kind, parse_method(name)).name


def test_rivals_have_the_nearest_flops(policy):
    calibrations = Calibrations(port_of(policy), observations(3), progress=False)
    equal = equal_names(calibrations)

    def flops(name):
        return calibrations.candidate(parse_method(name)).flops(calibrations.port, 0.0)

    for method in (BASE, "bac:S=3,n=5"):
        wanted = flops(method)
        for kind, form in (("uniform", "uniform:S={}"), ("ddim", "ddim-{}")):
            first, second = flops(form.format(1)), flops(form.format(2))
            away = {form.format(n): abs(first + (n - 1) * (second - first) - wanted) for n in range(1, 25)}
            allowed = 0.05 * wanted if kind == "ddim" else 0
            assert away[equal(kind, method)] <= max(allowed, min(away.values()))
    assert equal("blockwise", BASE) == equal("uniform", BASE).replace("uniform", "blockwise")


def test_of_equal_samplers_the_one_that_starts_at_the_most_noise_is_taken(make_policy):
    calibrations = Calibrations(port_of(make_policy(sampler=DDPM(num_inference_steps=100))), observations(2))
    equal = equal_names(calibrations)
    assert equal("ddim", "ddpm-34") == "ddim-33"  # 34 steps start at timestep 66, 33 at 96
    assert equal("ddpm", "ddim-17") == "ddpm-17"  # 16 starts later, but is more than 5 % cheaper
    assert equal("ddim", "ddpm-20") == "ddim-20"


def test_the_threshold_follows_from_the_wanted_share():
    rule, changes = TeaCacheRule((1.0, 0.0), 0.1, 11), np.full((2, 10), 0.25)  # the estimate is the change itself
    # of 11 steps the first and the last are computed; of the nine between, each third, with three changes of 0.25
    assert 0.5 < teacache_threshold(rule, changes, 6 / 11) <= 0.75
    assert teacache_threshold(rule, changes, 9 / 11) > 2
    assert teacache_threshold(rule, changes, 0.0) < 0.25


def test_teacache_comes_near_the_wanted_flops(policy):
    calibrations = Calibrations(port_of(policy), observations(4), progress=False)
    name = equal_names(calibrations)("teacache", BASE)
    candidate = calibrations.candidate(parse_method(name))
    with running(calibrations.port, candidate) as fast:
        for one in observations(8):
            fast.act(one[None], 0)
        found = candidate.flops(calibrations.port, fast.stats().reused_share)
    wanted = calibrations.candidate(parse_method(BASE)).flops(calibrations.port, 0.0)
    assert found == pytest.approx(wanted, rel=0.25)


# ---- running


def test_the_main_methods_get_more_rollouts_than_the_others(main):
    results = Results.load(main / "main.json")
    suite = suite_of(results, main / "main.json")
    assert suite.name == "main"
    assert not suite.quick
    for cell in suite.cells:
        many = any(other.main for other in suite.cells if other.method == cell.method)
        assert list(results.of(cell.method)) == [100_000 + seed for seed in range(4 if many else 2)], cell
    assert [method.name for method in results.methods] == list(suite.methods)
    assert len({method.name for method in results.methods}) == len(results.methods)
    assert results.setting["rollouts"] == 4


def test_the_same_suite_gives_the_same_bytes(policy, main, tmp_path):
    run = prepare_suite(ground(policy, tmp_path / "state"), "main")
    run.check_output(main / "main.json")
    run.run(progress=False).save(tmp_path / "main.json")
    assert (tmp_path / "main.json").read_bytes() == (main / "main.json").read_bytes()


def test_what_one_suite_ran_another_does_not_run_again(policy, main):
    def kept():
        return {path.name for path in (main / "state").glob("*.json")}

    before = kept()
    results = prepare_suite(ground(policy, main / "state"), "n-and-s").run(progress=False)
    known = {"full", "bac:S=7,n=5", BASE, "bac:S=20,n=5"}  # of suite main
    new = [method.name for method in results.methods if method.name not in known]
    assert len(new) == 6
    assert len(kept()) == len(before) + 2 * len(new)  # one open loop, one group of two rollouts
    assert results.of(BASE) == {
        seed: record for seed, record in Results.load(main / "main.json").of(BASE).items() if seed < 100_002
    }
    again = kept()
    prepare_suite(ground(policy, main / "state"), "n-and-s").run(progress=False)
    assert kept() == again


def test_more_rollouts_build_on_those_that_are_there(policy, main):
    more = ground(policy, main / "state", RolloutCounts(rollouts=4, main_rollouts=4, group=2, generations=3))
    results = prepare_suite(more, "main").run(progress=False)
    old = Results.load(main / "main.json")
    assert all(len(results.of(method.name)) == 4 for method in results.methods)
    for record in old.records:
        assert results.of(record.method)[record.seed] == record


def test_a_quick_run_is_short_marked_and_never_written_over_real_results(policy, main, tmp_path):
    short = RolloutCounts(rollouts=1, main_rollouts=1, group=1, generations=3, max_steps=2)
    run = prepare_suite(ground(policy, tmp_path / "state", short), "metrics")
    results = run.run(progress=False)
    assert {record.steps for record in results.records} == {2}
    assert results.task["max_steps"] == 2
    results.save(tmp_path / "metrics.json")
    assert suite_of(Results.load(tmp_path / "metrics.json"), "x").quick
    with pytest.raises(EvaluationError, match="holds real results; let a quick run write to another directory"):
        run.check_output(main / "main.json")
    real = prepare_suite(ground(policy, tmp_path / "state"), "metrics")
    real.check_output(tmp_path / "metrics.json")  # worth nothing, so it may go
    assert QUICK.quick
    assert not RolloutCounts().quick


def test_a_smaller_run_does_not_take_the_place_of_a_larger_one(policy, main):
    less = RolloutCounts(rollouts=2, main_rollouts=2, group=2, generations=3)
    with pytest.raises(EvaluationError, match=r"rollouts that would be lost \(of full, .*write to another file"):
        prepare_suite(ground(policy, main / "state", less), "main").check_output(main / "main.json")


def test_a_shortened_task_is_the_same_but_shorter():
    long, short = Toy(), shortened(Toy, 2)
    assert short.spec.max_steps == 2
    for _ in range(2):  # a second episode starts anew
        assert np.array_equal(long.reset(3), short.reset(3))
        for step in range(2):
            assert not short.done
            long.step(np.ones(3))
            short.step(np.ones(3))
            assert (long.score, long.success) == (short.score, short.success), step
        assert short.done
        assert not long.done


def test_timing_covers_every_method_of_every_suite(policy, main):
    speed = time_suites(ground(policy, main / "state"), main, repeats=1)
    methods = {name for suite in ground(policy, main / "state").suites(SUITES) for name in suite.methods}
    assert set(speed.seconds) == methods | {"full", "plain policy"}


def test_timing_another_schedule_than_the_suites_ran_is_refused(policy, main):
    other = RolloutCounts(rollouts=2, main_rollouts=4, group=2, generations=1)  # another calibration
    with pytest.raises(EvaluationError, match=r"another schedule, sampler or engine under the name bac:S=10,n=5"):
        time_suites(ground(policy, main / "state", other), main, repeats=1, names=("metrics", "main"))


def test_a_file_that_is_no_suite_is_refused(main, tmp_path):
    results = Results.load(main / "main.json")
    suite = results.setting["suite"]
    for setting in (
        {},
        {"suite": 3},
        {"suite": {**suite, "when": "now"}},
        {"suite": {**suite, "cells": [{"method": "full"}]}},
    ):
        with pytest.raises(FileError, match="is not a suite's"):
            suite_of(Results(**vars(results) | {"setting": setting}), "x.json")


# ---- the verb


@pytest.fixture
def shell(policy, tmp_path, monkeypatch, toy_by_name, command):
    """Runs `blockcache paper suite` on the toy task."""
    save_policy(policy, tmp_path / "policy")
    np.savez(tmp_path / "policy" / "observations.npz", obs=observations().numpy())
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments, task="--task toy", amount="--rollouts 2 --group 2 --generations 3"):
        fixed = f"{task} {amount} --workers 1 --engine loop -o deep"
        return command("paper", "suite", name, "policy", *fixed.split(), *arguments)

    return call


def test_the_verb_writes_the_suites_file_and_its_tables(shell, tmp_path):
    code, out, _ = shell("metrics")
    assert code == 0
    found = Results.load(tmp_path / "deep" / "metrics.json")
    assert found.policy["source"] == "policy"
    (row,) = [line for line in out.splitlines() if line.startswith("BAC S=10 n=5 L1")]
    mean = np.mean([record.score for record in found.of(f"{BASE},metric=l1").values()])
    assert f"{mean:.3f}" in row
    assert "difference to BAC S=10 n=5" in out
    assert "quick" not in out


def test_the_verb_runs_quickly_times_and_refuses(shell, command, tmp_path, monkeypatch):
    monkeypatch.setattr("blockcache_lab.studies.suite_runs.SUITES", ("metrics",))
    assert "A quick run" in shell("metrics", "--quick", amount="")[1]
    amount = ["--repeats", 1, "--generations", QUICK.generations]  # as the quick suite
    assert command("paper", "timing", "policy", "--task", "toy", "--engine", "loop", "-o", "deep", *amount)[0] == 0
    assert "timings" in (tmp_path / "deep" / "timings.json").read_text()[:40]
    for arguments, message in (
        (("mian",), "'mian' is not one of"),
        (("metrics", "--ray", "auto"), "exclude one another"),
        (("metrics", "--quick"), "--rollouts, --group, --generations and --quick exclude one another"),
        (("metrics", "--rollouts", "0"), "0 is not in the range"),
    ):
        code, _, err = shell(*arguments)
        assert code == 2
        assert message in err
    code, _, err = shell("metrics", task="")
    assert code == 2
    assert "does not say which task it was trained for; name it with --task" in err


def test_an_interrupt_and_a_failure_end_as_in_eval(shell, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("toy_task.Toy", partial(Toy, interrupt=100_001))
        code, _, err = shell("metrics")
        assert code == 130
        assert "the same command goes on from there" in err
        assert not (tmp_path / "deep" / "metrics.json").exists()
    monkeypatch.setattr("toy_task.Toy", partial(Toy, fails={100_001: 0}))
    code, out, err = shell("metrics")
    assert code == 1
    assert "error: 5 rollouts failed" in err
    assert "1 (1 failed)" in out


def test_stopped_in_the_middle_of_a_group_a_suite_until_settled_loses_nothing(shell, monkeypatch, tmp_path):
    """Ctrl-C in the second group's second pair: what had ended before is not run again, and the file is the same."""
    ran: list[int] = []

    class Counted(Toy):
        def reset(self, seed):
            ran.append(seed)
            return super().reset(seed)

    amount, out = "--rollouts 6 --group 2 --generations 3 --until-settled", tmp_path / "deep"
    with monkeypatch.context() as patch:
        patch.setattr("toy_task.Toy", partial(Counted, interrupt=100_003))
        code, _, err = shell("metrics", amount=amount)
    assert code == 130
    assert "the same command goes on from there" in err
    assert not (out / "metrics.json").exists()
    before = list(ran)
    assert {100_000, 100_001, 100_003} <= set(before)
    monkeypatch.setattr("toy_task.Toy", Counted)
    assert shell("metrics", amount=amount)[0] == 0
    first = {100_000, 100_001}  # this group had ended for every method
    assert not first & set(ran[len(before) :])
    resumed = Results.load(out / "metrics.json")
    assert resumed.setting["until_settled"] is True
    assert len(ran) <= len(resumed.records) + 2  # of one method, the group that was interrupted ran twice
    (out / "state").rename(tmp_path / "elsewhere")
    (out / "metrics.json").unlink()
    assert shell("metrics", amount=amount)[0] == 0
    assert Results.load(out / "metrics.json") == resumed  # as if nobody had stopped it


@pytest.fixture(scope="module")
def quick_directory(tmp_path_factory):
    """One for all suites, as a user has it: methods that are in several run once."""
    pytest.importorskip("gym_pusht")
    return tmp_path_factory.mktemp("quick")


@pytest.mark.parametrize("name", SUITES)
def test_the_quick_form_of_each_suite_runs_in_the_real_simulator(name, quick_directory, command):
    code, out, _ = command(
        "paper", "suite", name, "pusht", "-o", quick_directory, "--quick", "--engine", "loop", "--workers", 1
    )
    assert code == 0
    found = Results.load(quick_directory / f"{name}.json")
    suite = suite_of(found, name)
    assert suite.quick
    assert {record.method for record in found.records} == {"full", *suite.methods}
    assert all(record.error is None and record.steps == QUICK.max_steps for record in found.records)
    assert "A quick run" in out

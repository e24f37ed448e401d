"""Methods by name, and what becomes of them for a policy."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from blockcache.attach.recorder import calibrate
from blockcache.compare import candidates
from blockcache.compare.candidates import Calibrations, Candidate, running
from blockcache.compare.methods import FULL, Method, method_named, parse_method
from blockcache.compare.parts import FewerSteps, FittedSteps, MethodError, SamplerFile
from blockcache.compare.reuse_parts import (
    BAC,
    ActionBudget,
    BlockWise,
    Executed,
    ScheduleFile,
    TeaCache,
    Unified,
    Uniform,
)
from blockcache.errors import FileError, SamplerError, ScheduleError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM, fewer_steps
from blockcache.schedule import Schedule
from blockcache.solvers import METHODS, PAPER_METHODS, solve
from blockcache.solvers.teacache import TeaCacheRule, fit_teacache

PARSED = {
    "full": FULL,
    "uniform": Method(reuse=Uniform(10)),
    "uniform:S=3": Method(reuse=Uniform(3)),
    "unified:S=7,metric=mse": Method(reuse=Unified(7, metric="mse")),
    "blockwise:objective=consecutive": Method(reuse=BlockWise(objective="consecutive")),
    "bac": Method(reuse=BAC(10, 5, "cosine", "anchor")),
    "bac:n=0,S=20": Method(reuse=BAC(20, 0)),
    "bac:S=10,n=3,metric=l1,objective=consecutive": Method(reuse=BAC(10, 3, "l1", "consecutive")),
    "action": Method(reuse=ActionBudget(0.15)),
    "action:budget=0.6": Method(reuse=ActionBudget(0.6)),
    "action:budget=1": Method(reuse=ActionBudget(1.0)),
    "action:S=10": Method(reuse=ActionBudget(updates=10)),
    "ddpm-10+action:budget=0.6": Method(FewerSteps("ddpm", 10), ActionBudget(0.6)),
    "bac:S=10,n=5,last=1": Method(reuse=BAC(last=True)),
    "bac:S=10,n=5,last=0": Method(reuse=BAC()),
    "ddim-40+uniform:last=1,S=4": Method(FewerSteps("ddim", 40), Uniform(4, last=True)),
    "teacache": Method(reuse=TeaCache(0.1)),
    "teacache:threshold=0.25": Method(reuse=TeaCache(0.25)),
    "teacache:threshold=1e-05": Method(reuse=TeaCache(1e-5)),
    "ddim-16": Method(FewerSteps("ddim", 16)),
    "ddpm-50": Method(FewerSteps("ddpm", 50)),
    "dpmsolver++-8": Method(FewerSteps("dpmsolver++", 8)),
    "sde-dpmsolver++-8": Method(FewerSteps("sde-dpmsolver++", 8)),
    "euler-10": Method(FewerSteps("euler", 10)),
    "sde-dpmsolver++-8+bac:S=5,n=3": Method(FewerSteps("sde-dpmsolver++", 8), BAC(5, 3)),
    "ddim-40+bac:S=5,n=3": Method(FewerSteps("ddim", 40), BAC(5, 3)),
    "ddim-40+some/where+else:x.json": Method(FewerSteps("ddim", 40), ScheduleFile("some/where+else:x.json")),
    "ddpm-8:placed": Method(FewerSteps("ddpm", 8, placed=True)),
    "sde-dpmsolver++-8:placed+bac:S=3,n=2": Method(FewerSteps("sde-dpmsolver++", 8, placed=True), BAC(3, 2)),
    "fitted-5": Method(FittedSteps(5, 0.7)),
    "fitted-5:spread=1": Method(FittedSteps(5, 1.0)),
    "fitted-5:spread=0.85+bac:S=3,n=2": Method(FittedSteps(5, 0.85), BAC(3, 2)),
    "sampler:some/where.json": Method(SamplerFile("some/where.json")),
    "sampler:a+b.json+mine.json": Method(SamplerFile("a+b.json"), ScheduleFile("mine.json")),
    "sampler:fitted.json+bac:S=3,n=2": Method(SamplerFile("fitted.json"), BAC(3, 2)),
    "mine.json": Method(reuse=ScheduleFile("mine.json")),
    "replan=4": Method(executed=Executed(4)),
    "full+temperature=0": Method(executed=Executed(temperature=0.0)),
    "fitted-4+replan=4,temperature=0.5": Method(FittedSteps(4), executed=Executed(4, 0.5)),
    "candidates=8,replan=2": Method(executed=Executed(2, candidates=8)),
    "ddim-40+bac:S=5,n=3+temperature=1.25": Method(FewerSteps("ddim", 40), BAC(5, 3), Executed(temperature=1.25)),
    "mine.json+replan=3": Method(reuse=ScheduleFile("mine.json"), executed=Executed(3)),
}


@pytest.mark.parametrize("text", PARSED)
def test_a_name_is_parsed_to_its_method_and_the_methods_name_to_the_same(text):
    method = parse_method(text)
    assert method == PARSED[text]
    assert parse_method(method.name) == method


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bac", "bac:S=10,n=5"),
        ("bac:n=3,S=7", "bac:S=7,n=3"),
        ("uniform", "uniform:S=10"),
        ("blockwise:metric=l1", "blockwise:S=10,metric=l1"),
        ("bac:last=1", "bac:S=10,n=5,last=1"),
        ("teacache", "teacache:threshold=0.1"),
        ("ddim-8+unified", "ddim-8+unified:S=10"),
    ],
)
def test_a_name_says_what_was_left_out(text, name):
    assert parse_method(text).name == name


def test_every_method_of_the_solver_has_a_name():
    assert {name: parse_method(name).reuse.word for name in PAPER_METHODS} == {name: name for name in PAPER_METHODS}
    assert {*METHODS} - {*PAPER_METHODS} == {"action"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown method ''"),
        ("bca", "unknown method 'bca'; known are full, uniform"),
        ("Full", "unknown method 'Full'"),
        (" bac", "unknown method ' bac'"),
        ("full:S=3", "unknown method"),
        ("ddim-0", "unknown method"),
        ("ddim", "unknown method"),
        ("ddim-16+full", "unknown method"),
        ("replan=0", "replan must be a whole number from 1 to 999999, got '0'"),
        ("temperature=-1", "temperature must be a number from 0 to 10, such as 0.5, got '-1'"),
        ("temperature=nan", "temperature must be a number from 0 to 10, such as 0.5, got 'nan'"),
        ("temperature=inf", "temperature must be a number from 0 to 10, such as 0.5, got 'inf'"),
        ("candidates=1", "candidates must be a whole number from 2 to 999999, got '1'"),
        ("bac+replan=4,S=3", "execution takes replan=..., temperature=..., candidates=..., each at most once"),
        ("replan=4+replan=2", "how chunks are executed is said once"),
        ("nothing+replan=4", "unknown method 'nothing'"),
        ("ddim-16+", "unknown method"),
        ("ddim-16+ddim-8", "unknown method"),
        ("action:budget=0", "budget must be a number above 0 and at most 1, got '0'"),
        ("action:budget=1.5", "budget must be a number above 0 and at most 1, got '1.5'"),
        ("action:budget=0.5,S=3", "action takes budget=... or S=..., not both"),
        ("action:n=3", "action takes budget=..., S=..."),
        ("bca", "bac, action, teacache, ddim-N"),
        ("dpmsolver-8", "ddim-N, ddpm-N, dpmsolver++-N, euler-N, sde-dpmsolver++-N, fitted-N, a schedule file"),
        ("ddim-16:place", "unknown method"),
        ("fitted", "unknown method"),
        ("fitted-0", "unknown method"),
        ("fitted-5:placed", "fitted-N takes spread=..., a number above 0 and up to 1, such as 0.7; got 'placed'"),
        ("fitted-5:spread=0", "fitted-N takes spread="),
        ("fitted-5:spread=1.1", "fitted-N takes spread="),
        ("fitted-5:spread=nan", "fitted-N takes spread="),
        ("fitted-5:", "fitted-N takes spread="),
        ("sampler:", "unknown method"),
        ("sampler:fitted", "unknown method"),
        ("bac:", "bac takes S=..., n=..., metric=..., objective=..."),
        ("bac:S=10,", "separated by commas, got ''"),
        ("bac:S=10,S=11", "at most once"),
        ("bac:S", "got 'S'"),
        ("bac:s=10", "got 's=10'"),
        ("uniform:n=5", "uniform takes S=..."),
        ("teacache:S=5", "teacache takes threshold=..."),
        ("bac:S=0", "S must be a whole number from 1 to 999999, got '0'"),
        ("bac:S=ten", "S must be a whole number from 1 to 999999, got 'ten'"),
        ("bac:S=1.5", "S must be a whole number"),
        ("bac:n=-1", "n must be a whole number from 0 to 999999, got '-1'"),
        ("bac:S=\u0663", "S must be a whole number"),
        ("bac:metric=l2", "metric must be one of cosine, mse, l1, wasserstein, got 'l2'"),
        ("bac:objective=best", "objective must be one of anchor, consecutive"),
        ("bac:last=2", "last must be 0 or 1, got '2'"),
        ("bac:last", "got 'last'"),
        ("teacache:threshold=-1", "threshold must be a number of at least 0"),
        ("teacache:threshold=nan", "threshold must be a number"),
        ("teacache:threshold=1_0", "threshold must be a number"),
    ],
)
def test_anything_else_is_refused_with_one_sentence(text, message):
    with pytest.raises(MethodError) as caught:
        parse_method(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def ready(make_policy):
    policy = make_policy()
    obs = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    return Calibrations(port_of(policy), obs, progress=False)


def test_solved_methods_are_what_the_solver_gives(ready):
    for text in ("uniform:S=3", "unified:S=3", "blockwise:S=3,metric=l1", "bac:S=3,n=2,objective=consecutive"):
        method = parse_method(text).reuse
        expected = solve(
            ready.recording(ready.port.sampler),
            method.updates,
            method.union,
            method.metric,
            method.word,
            method.objective,
        )
        found = ready.candidate(parse_method(text))
        assert found.strategy == expected
        assert (found.engine, found.sampler) == ("auto", None)
        assert found.strategy.origin["method"] == method.word


def test_fewer_steps_keep_what_makes_it_the_same_diffusion():
    own = DDPM(clip_sample_range=2.0, variance_type="fixed_large", timestep_spacing="trailing")
    kept = fewer_steps(own, "ddpm", 50)
    assert (kept.clip_sample_range, kept.variance_type, kept.num_inference_steps) == (2.0, "fixed_large", 50)
    assert fewer_steps(own, "ddim", 50).clip_sample_range == 2.0
    assert kept.timestep_spacing == "leading"  # as diffusers does by default


def test_full_and_fewer_steps_follow_no_schedule(ready):
    assert ready.candidate(FULL, "loop") == Candidate(None, "loop", None)
    found = ready.candidate(parse_method("ddim-3"), None)
    assert found.strategy is None
    assert found.sampler == DDIM(num_inference_steps=3)


@pytest.mark.parametrize("name", ["ddpm-4", "ddim-4", "dpmsolver++-4", "sde-dpmsolver++-4"])
def test_every_diffusion_sampler_runs_in_every_engine(ready, observe, name):
    found, noise = [], None
    for engine in (None, "patched", "loop"):
        with running(ready.port, ready.candidate(parse_method(name), engine)) as fast:
            noise = fast.port.policy.draw_noise(1, torch.Generator().manual_seed(0)) if noise is None else noise
            found.append(fast.act(observe(), noise=noise))
    assert np.array_equal(found[0], found[1])
    assert np.allclose(found[0], found[2], atol=1e-4)


def test_a_diffusion_policy_cannot_follow_a_flow(ready):
    with pytest.raises(SamplerError, match="a policy trained for ddpm cannot be run by euler"):
        ready.candidate(parse_method("euler-10"))


def test_a_method_on_another_sampler_is_calibrated_with_that_sampler(ready, observe):
    found = ready.candidate(parse_method("ddim-4+bac:S=2,n=1"))
    assert found.strategy.steps == 4
    assert found.strategy.fingerprint.sampler["type"] == "ddim"
    with running(ready.port, found) as fast:
        assert fast.act(observe(), 0).shape == (1, 4, 3)
        assert fast.port.policy.num_inference_steps == 4
    other = ready.candidate(parse_method("bac:S=2,n=1"))
    with (
        pytest.raises(ScheduleError, match="does not fit"),
        running(ready.port, Candidate(other.strategy, "auto", found.sampler)),
    ):
        pass


def test_teacache_is_fitted_to_the_calibration_and_counts_what_it_computed(ready, observe):
    found = ready.candidate(parse_method("teacache:threshold=1e9"))
    assert found.strategy == fit_teacache(ready.recording(ready.port.sampler), 1e9)
    with running(ready.port, found) as fast:
        fast.act(observe(), 0)
        assert fast.engine == "patched"
        reused = fast.stats().reused_share
    assert reused == pytest.approx(4 / 6)  # the first and the last of six steps
    full = Candidate().flops(ready.port, 0.0)
    assert found.flops(ready.port, 0.0) == full
    assert found.flops(ready.port, reused) < full
    assert isinstance(found.strategy, TeaCacheRule)


def test_a_schedule_file_is_read(ready, tmp_path):
    schedule = ready.candidate(parse_method("uniform:S=2")).strategy
    schedule.save(tmp_path / "mine.json")
    assert ready.candidate(parse_method(str(tmp_path / "mine.json"))).strategy == schedule
    with pytest.raises(FileError, match="does not exist"):
        ready.candidate(parse_method("nowhere.json"))


def test_calibrations_are_kept_and_told_apart(ready, make_policy, tmp_path):
    def schedule(port, obs):
        made = Calibrations(port, obs, keep=tmp_path, progress=False)
        return made.candidate(parse_method("bac:S=3,n=1")).strategy

    first = schedule(ready.port, ready.observations)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert schedule(ready.port, ready.observations) == first
    assert file.stat().st_mtime_ns == written
    schedule(port_of(make_policy(seed=1)), ready.observations)
    schedule(ready.port, ready.observations[:2])
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("keep", [False, True])
def test_action_costs_are_made_only_for_a_method_that_needs_them(ready, tmp_path, monkeypatch, keep):
    asked = []

    def watched(port, batches, *, action_costs, **options):
        asked.append((len(port.timesteps), action_costs))
        return calibrate(port, batches, action_costs=action_costs, **options)

    monkeypatch.setattr(candidates, "calibrate", watched)
    made = Calibrations(ready.port, ready.observations, keep=tmp_path if keep else None, progress=False)
    for name in ("bac:S=3", "teacache", "action:budget=0.7", "action:S=3", "bac:S=2", "ddim-4+action:budget=0.8"):
        schedule = made.candidate(parse_method(name)).strategy
    assert asked == [(6, False), (6, True), (4, True)]
    assert (schedule.steps, schedule.origin["method"], schedule.fingerprint.sampler["type"]) == (4, "action", "ddim")
    full = Candidate().flops(ready.port, 0.0)
    assert made.candidate(parse_method("action:budget=0.7")).flops(ready.port, 0.0) <= 0.7 * full
    if keep:
        again = Calibrations(ready.port, ready.observations, keep=tmp_path, progress=False)
        assert again.candidate(parse_method("ddim-4+action:budget=0.8")).strategy == schedule
        assert len(asked) == len(list(tmp_path.iterdir())) == 3


def test_candidates_run_side_by_side_on_copies(ready, observe, run):
    before = run(ready.port.policy, observe())
    schedule = ready.candidate(parse_method("uniform:S=2")).strategy
    with (
        running(ready.port, Candidate(schedule, "patched")) as one,
        running(ready.port, Candidate(None, "loop")) as two,
    ):
        assert not torch.allclose(run(one.port.policy, observe()), before, atol=1e-3)
        assert torch.allclose(run(two.port.policy, observe()), before, atol=1e-4)
        assert torch.equal(run(ready.port.policy, observe()), before)
        assert (one.engine, two.engine) == ("patched", "loop")


def test_flops_follow_schedule_and_steps(ready):
    port = ready.port
    full = Candidate().flops(port, 0.0)
    blocks = ready.recording(port.sampler).blocks
    every = Schedule.every_step(6, [block.name for block in blocks])
    assert Candidate(every, "auto").flops(port, 0.5) == full
    assert ready.candidate(parse_method("ddim-3")).flops(port, 0.0) == full // 2
    saved = 4 * sum(block.cost for block in blocks)
    assert ready.candidate(parse_method("uniform:S=2")).flops(port, 0.0) == full - saved


def test_what_makes_no_sense_is_refused(ready):
    with pytest.raises(MethodError, match="name an engine"):
        Candidate(ready.candidate(parse_method("uniform:S=2")).strategy, None)
    with pytest.raises(SamplerError, match="num_inference_steps"):
        fewer_steps(ready.port.sampler, "ddim", 1000)
    with pytest.raises(ScheduleError, match="from 1 to the number of steps 6"):
        ready.candidate(parse_method("bac:S=7"))


@pytest.mark.parametrize(
    ("name", "label", "kind"),
    [
        ("full", "full precision", "full precision"),
        ("unified:S=7,last=1", "Unified ACS S=7 and the last step", "Unified ACS"),
        ("action:S=3", "Action costs S=3", "Action costs"),
        ("ddpm-8:placed", "DDPM-8 placed", "placed DDPM-N"),
        ("fitted-5:spread=1", "fitted-5 spread=1", "fitted-N"),
        ("sampler:a.json", "a.json", "sampler file"),
        ("tuned:some/where", "tuned", "tuned"),
        ("ddim-40+bac:S=5,n=3", "DDIM-40 + BAC S=5 n=3", "reuse on few steps"),
        ("what:no=version", "what:no=version", "another method"),
        ("replan=4", "replan=4", "other execution"),
        ("tuned:there+replan=4,temperature=0.5", "tuned + replan=4 temperature=0.5", "other execution"),
    ],
)
def test_a_method_has_words_for_people_even_where_its_name_is_unknown(name, label, kind):
    method = method_named(name)
    assert (method.name, method.label, method.kind) == (name, label, kind)


def test_kinds_in_one_legend_differ_by_more_than_their_colour():
    names = (
        "full",
        "bac",
        "action",
        "teacache",
        "uniform",
        "ddpm-8",
        "ddim-8",
        "sde-dpmsolver++-8",
        "fitted-5",
        "tuned:there",
        "fitted-5+replan=4",
        "what",
    )
    methods = [method_named(name) for name in names]
    assert len({method.look for method in methods}) == len(names)
    assert [method.rank for method in methods] == sorted(method.rank for method in methods)


def test_what_needs_a_calibration_or_a_file_is_not_off_the_shelf():
    assert method_named("ddim-8").off_the_shelf
    for name in ("full", "ddpm-8:placed", "fitted-5", "ddim-8+bac", "tuned:there", "sampler:a.json", "bac"):
        assert not method_named(name).off_the_shelf
    assert method_named("tuned:there+here").tuned_in == "there+here"
    assert method_named("ddim-8").tuned_in is None
    replanned = method_named("tuned:there+replan=4")
    assert (replanned.tuned_in, replanned.portable_name) == ("there", "tuned+replan=4")


def test_an_unknown_method_can_be_shown_and_not_run(ready):
    with pytest.raises(MethodError, match="no method that this version knows"):
        ready.candidate(method_named("what:no=version"))


def test_methods_are_values_without_torch():
    code = "import sys; sys.modules['torch'] = None; import blockcache.compare.methods as m; m.parse_method('bac')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

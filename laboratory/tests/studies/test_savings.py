"""The exact savings, switched off and then on one by one: the same actions, and the FLOPs that torch counts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import blockcache as bc
from blockcache.compare.bench import run_bench
from blockcache.engines.build import build
from blockcache.engines.loop import Loop
from blockcache.models.registry import port_of
from blockcache.models.sampling import draw_all
from blockcache.samplers import table
from blockcache.schedule import Schedule, compile_plan, generation_flops
from blockcache_lab.studies.savings import DiffusersLoop, add_savings
from blockcache_lab.studies.savings_programs import PlainRDTProgram, without_savings
from dit_policies import ACTION, SEEN, STATE, TOKENS, tiny_dit, tiny_observation
from dit_policies import SAMPLERS as DIT_SAMPLERS
from dit_policies import STEPS as DIT_STEPS
from foreign_policy import BLOCKS, OBS, Policy
from foreign_policy import STEPS as FOREIGN_STEPS
from loops import SAMPLERS, SHAPES, STEPS, built, counted, error, formula, loop_of, policies
from rdt_policies import rdt_observation, rdt_policy

pytestmark = pytest.mark.usefixtures("exports_stay_here")

SAVINGS = (
    "conditions encoded at every step",
    "+ conditions encoded once",
    "+ keys, values and queries folded once",
)


def variant(policy, made, saving):
    return without_savings(port_of(policy), made.program)[saving]


def runners(policy, made, saving):
    """With constant sampler coefficients, and with diffusers' sampler."""
    loop = Loop(variant(policy, made, saving), made.plan, made.sampler)
    return loop, DiffusersLoop(loop, policy.sampler)


def seen(policy):
    return {"obs": torch.randn(1, policy.n_obs_steps, policy.obs_dim)}


policy, shaped = policies(SAMPLERS), policies(SHAPES)


# -- DP-T


def test_the_savings_have_names_and_end_with_the_program_itself(policy):
    program = built(policy).program
    variants = without_savings(port_of(policy), program)
    assert tuple(variants) == SAVINGS
    assert variants[SAVINGS[-1]] is program


@pytest.mark.parametrize("saving", SAVINGS)
def test_each_saving_gives_the_eager_policy_s_actions(policy, observed, saving):
    made = built(policy)
    for runner in runners(policy, made, saving):
        for batch in (1, 3):
            noise = policy.draw_noise(batch)
            expected = policy.predict_action(observed(batch), noise=noise)
            found = runner(observed(batch), noise)
            assert set(found) == set(expected)
            assert error(policy, found["action_pred"], expected["action_pred"]) < 1e-5


@pytest.mark.parametrize("order", ["cut first", "savings off first"])
@pytest.mark.parametrize("saving", SAVINGS)
def test_executed_actions_only_with_each_saving(policy, observed, saving, order):
    whole = built(policy)
    if order == "cut first":
        made = whole.actions_only()
    else:
        made = replace(whole, program=variant(policy, whole, saving)).actions_only()
        # a variant that is cut is the variant of the program that was cut
        assert made.program.weights.keys() == variant(policy, whole.actions_only(), saving).weights.keys()
    assert made.program.tokens == policy.config.executed.stop < policy.horizon
    noise = policy.draw_noise(2)
    expected = policy.predict_action(observed(2), noise=noise)["action"]
    cut = loop_of(made) if order != "cut first" else Loop(variant(policy, made, saving), made.plan, made.sampler)
    for runner in (cut, DiffusersLoop(cut, policy.sampler)):
        found = runner(observed(2), noise)
        assert list(found) == ["action"]
        assert error(policy, found["action"], expected) < 1e-5


def test_savings_follow_a_schedule_too(policy, observed, random_updates):
    made = built(policy, random_updates)
    noise = policy.draw_noise(2)
    with bc.accelerate(policy, made.schedule, engine="patched"):
        expected = policy.predict_action(observed(2), noise=noise)["action_pred"]
    for saving in SAVINGS:
        for runner in runners(policy, made, saving):
            assert error(policy, runner(observed(2), noise)["action_pred"], expected) < 1e-5


def test_in_double_precision_the_algebra_is_exact(policy, observed, observe, random_updates):
    """With diffusers' own sampler all that is left is the folding: its constants are single precision in any case."""
    policy.double()
    made, noise = built(policy, random_updates), policy.draw_noise(2)
    with bc.accelerate(policy, made.schedule, engine="patched"):
        expected = policy.predict_action(observe(2), noise=noise)["action_pred"]
    for saving in SAVINGS:
        _, own = runners(policy, made, saving)
        assert error(policy, own({"obs": observe(2).double()}, noise)["action_pred"], expected) < 1e-12


def test_each_saving_saves(shaped):
    """The lines of the benchmark, from what the plain policy does down to the loop engine."""
    port, noise, obs = port_of(shaped), shaped.draw_noise(1), seen(shaped)
    made = built(shaped)
    plain = generation_flops(port.adapter.blocks, port.adapter.every_step, STEPS)
    rungs = [replace(made, program=program) for program in without_savings(port, made.program).values()]
    runners = [
        *(DiffusersLoop(loop_of(rung), shaped.sampler) for rung in rungs),
        loop_of(made),
        loop_of(made.actions_only()),
    ]
    costs = [counted(lambda runner=runner: runner(obs, noise)) for runner in runners]
    assert costs == [formula(rung) for rung in (*rungs, made, made.actions_only())]
    # the first embeds the observations once already, which the plain policy does at every step
    embedding = 2 * shaped.n_obs_steps * shaped.obs_dim * shaped.config.n_emb
    assert costs[0] == plain - (STEPS - 1) * embedding
    assert costs[0] > costs[1] > costs[2] == costs[3] > costs[4]


def test_executed_actions_only_saves_with_every_saving(shaped, random_updates):
    noise, made = shaped.draw_noise(1), built(shaped, random_updates)
    for program in without_savings(port_of(shaped), made.program).values():
        cut = replace(made, program=program).actions_only()
        real = counted(lambda cut=cut: loop_of(cut)(seen(shaped), noise))
        assert real == formula(cut, made.schedule) < formula(replace(made, program=program), made.schedule)


# -- other families


def test_rdt_with_each_saving_gives_the_same_actions():
    policy, obs = rdt_policy(), rdt_observation(2)
    port, expected = (
        port_of(policy),
        policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action_pred"],
    )
    noise = policy.draw_noise(2, torch.Generator().manual_seed(0))
    plan = compile_plan(Schedule.every_step(6, [block.name for block in port.adapter.blocks]))
    for program in without_savings(port, port.program()).values():
        found = Loop(program, plan, table(policy.sampler))(policy.check(obs), noise)["action_pred"]
        assert torch.allclose(found, expected, atol=1e-5)
    variants = without_savings(port, port.program())
    assert isinstance(variants["keys and values projected at every use"], PlainRDTProgram)


@pytest.mark.parametrize("sampler", DIT_SAMPLERS)
def test_a_dit_s_savings_are_exact_and_counted(sampler):
    port = port_of(tiny_dit(sampler=DIT_SAMPLERS[sampler]))
    program, obs = port.program(), port.read_observation(tiny_observation(2), port.policy.like)
    sampled = table(port.sampler)
    plan = compile_plan(Schedule.every_step(DIT_STEPS, [block.name for block in port.adapter.blocks]), sums=False)
    noise = draw_all(sampled, (2, TOKENS, ACTION), port.policy.like, torch.Generator().manual_seed(0))
    variants = without_savings(port, program)
    answers = [Loop(item, plan, sampled)(obs, noise)["action"] for item in variants.values()]
    assert all(torch.allclose(answer, answers[-1], atol=1e-5) for answer in answers)
    plain, tabled, whole = ((item.once, item.every_step) for item in variants.values())
    features, cond, widths = 8, SEEN * STATE + 3, 2 * 6 * 16  # layers x chunks x width
    ends = 2 * 2 * TOKENS * ACTION * 16
    assert whole == (2 * cond * widths, ends)
    assert tabled == (0, ends + 2 * cond * widths)
    assert plain == (0, ends + 2 * (cond + features) * widths)
    mlp = 2 * 2 * features * 2 * features
    assert port.adapter.every_step == plain[1] + mlp
    assert port.adapter.blocks[0].cost == 2 * TOKENS * 16 * 16 * 4 + 2 * 2 * TOKENS * TOKENS * 16


# -- in a benchmark


def test_a_bench_adds_each_saving(monkeypatch):
    def compile_nothing(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch.nn.Module.compile", compile_nothing)
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.01))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    point = SimpleNamespace(name="savings", load=lambda: add_savings)
    monkeypatch.setattr("blockcache.compare.bench.entry_points", lambda group: [point])
    port, schedule = port_of(Policy()), Schedule(FOREIGN_STEPS, {name: [0, 2] for name in BLOCKS})
    obs = torch.randn(2, port.n_obs_steps, OBS)
    bench = run_bench(port, schedule, obs, {}, threads=1, repeats=1, progress=False)
    rows = {row["name"]: row for row in json.loads(json.dumps(bench.to_dict()))["rows"]}
    names = [*SAVINGS, "+ constant sampler", "+ executed actions only"]
    assert [name for name in rows if name.startswith("savings")] == [f"savings: {name}" for name in names]
    whole = build(port, Schedule.every_step(FOREIGN_STEPS, BLOCKS), "loop")
    programs = [*without_savings(port, whole.program).values(), whole.program, whole.actions_only().program]
    for name, program in zip(names, programs, strict=True):
        row = rows[f"savings: {name}"]
        assert row["saving"] == name
        assert row["max_difference"] < 1e-5
        inputs, noise = port.read_observation({"obs": obs[:1]}, program.like), port.draw_noise(1)
        real = counted(lambda program=program, x=inputs, z=noise: Loop(program, whole.plan, whole.sampler)(x, z))
        assert row["gflop"] == pytest.approx(real / 1e9, rel=1e-12)

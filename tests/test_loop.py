"""The loop engine by itself: other dtypes, no look at a value inside the loop, and each exact saving switched off."""

import pytest
import torch
from blockcache.engines.compiled import compile_policy
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import blockcache as bc
from blockcache.engines.loop import Loop, TabulatedMemory
from blockcache.errors import EngineError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM, DPMSolver
from blockcache.schedule.plan import compile_plan
from blockcache.studies.savings import DiffusersLoop, EncodedMemory, ProjectedMemory

pytestmark = pytest.mark.usefixtures("exports_stay_here")

SAMPLERS = {
    "ddpm": DDPM(num_inference_steps=6),
    "ddim with eta": DDIM(num_inference_steps=6, eta=0.7),
    "dpmsolver++": DPMSolver(num_inference_steps=6, beta_schedule="linear"),
}
MEMORIES = {
    "encoded at every step": EncodedMemory,
    "encoded once": ProjectedMemory,
    "keys and values once": TabulatedMemory,
}


def compiled(policy, schedule=None):
    """The policy's matrices and a plan: every step an update, or those of a schedule."""
    target = port_of(policy)
    names = [block.name for block in target.adapter.blocks]
    steps = len(target.timesteps)
    updates = bc.Schedule.every_step(steps, names) if schedule is None else bc.Schedule(steps, schedule(names, steps))
    return compile_policy(target, "loop"), compile_plan(updates), updates


@pytest.fixture(params=SAMPLERS)
def policy(request, make_policy):
    return make_policy(sampler=SAMPLERS[request.param])


def error(policy, found, expected):
    return float(((found - expected) * policy.normalizer.action.scale).abs().max())


# -- the exact savings, one by one


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("constant", [False, True], ids=["diffusers' sampler", "constant sampler"])
def test_each_saving_gives_the_eager_policy_s_actions(policy, observe, memory, constant):
    matrices, plan, _ = compiled(policy)
    loop = Loop(matrices, plan, memory)
    runner = loop if constant else DiffusersLoop(loop, policy.sampler)
    for batch in (1, 3):
        noise = policy.draw_noise(batch)
        expected = policy.predict_action(observe(batch), noise=noise)
        found = runner(observe(batch), noise)
        assert set(found) == set(expected)
        assert error(policy, found["action_pred"], expected["action_pred"]) < 1e-5


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("constant", [False, True], ids=["diffusers' sampler", "constant sampler"])
def test_executed_actions_only_with_each_saving(policy, observe, memory, constant):
    matrices, plan, _ = compiled(policy)
    stop = policy.config.executed.stop
    assert stop < policy.horizon
    loop = Loop(matrices.cut(stop), plan, memory)
    runner = loop if constant else DiffusersLoop(loop, policy.sampler)
    noise = policy.draw_noise(2)
    expected = policy.predict_action(observe(2), noise=noise)["action"]
    found = runner(observe(2), noise)
    assert list(found) == ["action"]
    assert error(policy, found["action"], expected) < 1e-5


def test_savings_follow_a_schedule_too(policy, observe, random_updates):
    matrices, plan, schedule = compiled(policy, random_updates)
    noise = policy.draw_noise(2)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = policy.predict_action(observe(2), noise=noise)["action_pred"]
    for memory in MEMORIES.values():
        loop = Loop(matrices, plan, memory)
        for runner in (loop, DiffusersLoop(loop, policy.sampler)):
            assert error(policy, runner(observe(2), noise)["action_pred"], expected) < 1e-5


# -- dtypes, devices


def test_double_precision(policy, observe, random_updates):
    policy.double()
    matrices, plan, schedule = compiled(policy, random_updates)
    noise = policy.draw_noise(2)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = policy.predict_action(observe(2), noise=noise)["action_pred"]
    with bc.accelerate(policy, schedule) as fast:
        assert fast.engine == "loop", "onnx runs float32 only"
        found = fast.predict_action(observe(2), noise=noise)["action_pred"]
    assert found.dtype == torch.float64
    assert error(policy, found, expected) < 1e-5  # diffusers' constants are single precision in any case
    # with diffusers' own sampler all that is left is our algebra, and that is exact
    folded = DiffusersLoop(Loop(matrices, plan), policy.sampler)(observe(2).double(), noise)["action_pred"]
    assert error(policy, folded, expected) < 1e-12


def test_onnx_refuses_double_precision(make_policy):
    with pytest.raises(EngineError, match=r'runs float32 on the CPU, got torch.float64 on cpu; use engine="loop"'):
        bc.accelerate(make_policy().double(), engine="onnx")


def test_half_precision_runs(make_policy, observe):
    policy = make_policy().to(torch.bfloat16)
    noise = policy.draw_noise(1)
    expected = policy.predict_action(observe(), noise=noise)["action"]
    with bc.accelerate(policy, engine="loop") as fast:
        found = fast.predict_action(observe(), noise=noise)["action"]
    assert found.dtype == torch.bfloat16
    assert error(policy, found, expected) < 0.2


@pytest.mark.parametrize("output", ["chunk", "action"])
def test_nothing_is_copied_to_the_host_inside_the_loop(policy, observe, random_updates, output):
    """Fake tensors have no values: any look at one, such as `if x > 0`, is an error. So CUDA graphs can capture it."""
    matrices, plan, _ = compiled(policy, random_updates)
    loop = Loop(matrices if output == "chunk" else matrices.cut(policy.config.executed.stop), plan)
    noise = policy.draw_noise(2)
    real = loop(observe(2), noise)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        obs, drawn = mode.from_tensor(observe(2)), mode.from_tensor(noise)
        fake = loop(obs, drawn)
        with pytest.raises(DataDependentOutputException):
            bool(fake["action"].sum() > 0)
    assert {name: value.shape for name, value in fake.items()} == {name: value.shape for name, value in real.items()}


def test_nothing_of_a_generation_stays_in_the_loop(policy, observe, random_updates):
    matrices, plan, _ = compiled(policy, random_updates)
    loop = Loop(matrices, plan)
    held = set(vars(loop))
    first = loop(observe(1), noise := policy.draw_noise(1))["action"]
    loop(100 * observe(3), policy.draw_noise(3))
    assert torch.equal(loop(observe(1), noise)["action"], first)
    assert set(vars(loop)) == held


def test_sums_are_given_up_when_nothing_uses_them(policy, observe, random_updates):
    matrices, plan, _ = compiled(policy, random_updates)
    generation = Loop(matrices, plan).start(observe(1))
    with torch.no_grad():
        for step in range(plan.steps):
            generation.denoise(step, torch.zeros(1, 6, 3))
    assert generation.sums == {}

"""The loop engine by itself: other dtypes, and no look at a value inside the loop."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import blockcache as bc
from blockcache.engines.loop import TorchBackend
from blockcache.engines.walk import denoiser_output
from blockcache.errors import EngineError
from blockcache.schedule import Reuse
from loops import SAMPLERS, built, error, loop_of, policies

pytestmark = pytest.mark.usefixtures("exports_stay_here")

policy = policies(SAMPLERS)


# -- dtypes, devices


def test_double_precision(policy, observed, observe, random_updates):
    policy.double()
    made = built(policy, random_updates)
    noise = policy.draw_noise(2)
    with bc.accelerate(policy, made.schedule, engine="patched"):
        expected = policy.predict_action(observe(2), noise=noise)["action_pred"]
    with bc.accelerate(policy, made.schedule) as fast:
        assert fast.engine == "loop", "onnx runs float32 only"
        found = fast.predict_action(observe(2), noise=noise)["action_pred"]
    assert found.dtype == torch.float64
    assert error(policy, found, expected) < 1e-5  # diffusers' constants are single precision in any case


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
def test_nothing_is_copied_to_the_host_inside_the_loop(policy, observed, random_updates, output):
    """Fake tensors have no values: any look at one, such as `if x > 0`, is an error. So CUDA graphs can capture it.
    Whether it was finite is looked at once, behind the loop."""
    made = built(policy, random_updates)
    loop = loop_of(made if output == "chunk" else made.actions_only())
    noise = policy.draw_noise(2)
    real = loop.unchecked(observed(2), noise)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        obs, drawn = mode.from_tensor(observed(2)["obs"]), mode.from_tensor(noise)
        fake = loop.unchecked({"obs": obs}, drawn)
        with pytest.raises(DataDependentOutputException):
            bool(fake["action"].sum() > 0)
    assert {name: value.shape for name, value in fake.items()} == {name: value.shape for name, value in real.items()}


def test_nothing_of_a_generation_stays_in_the_loop(policy, observed, random_updates):
    loop = loop_of(built(policy, random_updates))
    held = {name: id(value) for name, value in vars(loop).items()}
    first = loop(observed(1), noise := policy.draw_noise(1))["action"]
    loop({"obs": 100 * observed(3)["obs"]}, policy.draw_noise(3))
    assert torch.equal(loop(observed(1), noise)["action"], first)
    assert {name: id(value) for name, value in vars(loop).items()} == held


def test_sums_are_given_up_when_nothing_uses_them(policy, observed, random_updates):
    made = built(policy, random_updates)
    backend = TorchBackend(loop_of(made).constants, 1)
    reuse, sums = Reuse(made.plan, backend.add), []
    with torch.no_grad():
        conditions = made.program.conditions(backend, observed(1))
        for step, operations in enumerate(made.plan.program):
            denoiser_output(backend, made.program, operations, reuse, conditions, step, torch.zeros(6, 3))
            reuse.end_step(step)
            sums.append(len(reuse._sums))
    assert max(sums) > 0
    assert reuse._sums == {}
    assert {run for run in reuse._started if run[0] < run[1]} == set()

"""The patched engine and calibration on a policy that shares nothing with ours but the public interface."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from torch import nn

import blockcache as bc
from blockcache.errors import PolicyError
from blockcache.models.flops import feed_forward
from blockcache.models.registry import port_of
from blockcache.models.sampling import generate
from stranger_policy import (
    ACTION,
    HIDDEN,
    SEEN,
    STEPS,
    TOKENS,
    WIDTH,
    Bare,
    ByName,
    Policy,
    act,
    observe,
)

SCHEDULERS = {
    "ddpm": (lambda: DDPMScheduler(STEPS * 5, beta_schedule="squaredcos_cap_v2"), {}),
    "ddim": (lambda: DDIMScheduler(STEPS * 5), {"eta": 0.5}),
    "dpmsolver++": (lambda: DPMSolverMultistepScheduler(STEPS * 5), {}),
    "repeats a timestep": (lambda: PNDMScheduler(STEPS * 5, skip_prk_steps=True), {}),
    "float timesteps": (lambda: FlowMatchEulerDiscreteScheduler(STEPS * 5), {}),
}


@pytest.fixture(params=SCHEDULERS)
def any_policy(request):
    make, kwargs = SCHEDULERS[request.param]
    return Policy(make(), **kwargs)


@pytest.fixture
def policy():
    return Policy()


def test_seen_by_its_shape(policy):
    adapter = port_of(policy).adapter
    assert adapter.family == "dp-t"
    assert [block.name for block in adapter.blocks] == [f"layers.{i}.{k}" for i in (0, 1) for k in ("SA", "CA", "FFN")]
    assert adapter.widths == {"width": WIDTH, "heads": 3, "hidden": HIDDEN}
    assert {block.cost for block in adapter.blocks} == {0}, "its tokens are unknown, so no cost is claimed"


def test_a_known_number_of_tokens_gives_costs(policy):
    """With position embeddings of DP-T's kind the blocks are counted, hidden width included."""
    del policy.model.pos_emb
    policy.model.pos_emb = nn.Parameter(torch.zeros(1, TOKENS, WIDTH))
    policy.model.cond_pos_emb = nn.Parameter(torch.zeros(1, 1 + SEEN, WIDTH))
    adapter = port_of(policy).adapter
    assert {b.cost for b in adapter.blocks if b.kind == "FFN"} == {feed_forward(TOKENS, WIDTH, HIDDEN)}


@pytest.mark.parametrize("batch", [1, 7])
def test_every_step_an_update_is_bit_identical(any_policy, batch):
    plain = act(any_policy, observe(batch))
    with bc.accelerate(any_policy, engine="patched") as fast:
        assert torch.equal(act(any_policy, observe(batch)), plain)
        assert torch.equal(act(fast, observe(batch)), plain)
    assert torch.equal(act(any_policy, observe(batch)), plain)


def test_calibrate_solve_accelerate(any_policy, tmp_path):
    before = {id(module): set(vars(module)) for module in any_policy.modules()}
    plain = act(any_policy, observe(2))
    recording = bc.calibrate(any_policy, [observe(3), observe(2, seed=1)], progress=False)
    assert recording.samples == 5
    recording.save(tmp_path / "r.safetensors")
    schedule = bc.solve(bc.Recording.load(tmp_path / "r.safetensors"), updates=3, union=2)
    schedule.save(tmp_path / "s.json")
    calls = []
    with bc.accelerate(any_policy, bc.Schedule.load(tmp_path / "s.json"), engine="patched") as fast:
        hook = any_policy.model.decoder.layers[1].linear2.register_forward_hook(lambda *args: calls.append(1))
        assert not torch.equal(act(any_policy, observe(2)), plain)
        assert fast.stats().computed == {name: len(steps) for name, steps in schedule.updates.items()}
        assert len(calls) == len(schedule.updates["layers.1.FFN"])
        hook.remove()
    assert torch.equal(act(any_policy, observe(2)), plain)
    assert {id(module): set(vars(module)) for module in any_policy.modules()} == before


def test_an_object_that_is_no_module(policy):
    bare, plain = Bare(policy), act(policy, observe(2))
    recording = bc.calibrate(bare, [observe(2)], progress=False)
    with bc.accelerate(bare, bc.solve(recording, updates=STEPS), engine="patched"):
        assert torch.equal(act(bare, observe(2)), plain)
        assert torch.equal(act(policy, observe(2)), plain)  # the inner policy shares the denoiser and is left alone
    assert "predict_action" not in vars(bare)


def test_layers_called_by_name():
    policy = Policy(model=ByName())
    plain = act(policy, observe(2))
    recording = bc.calibrate(policy, [observe(2)], progress=False)
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(act(policy, observe(2)), plain)
    with bc.accelerate(policy, bc.fit_teacache(recording, 0.0)):
        assert torch.equal(act(policy, observe(2)), plain)


class WithGradients(Policy):
    """The public policies leave `torch.no_grad` to whoever calls them."""

    def predict_action(self, obs_dict):
        return {"action_pred": self.sample(obs_dict["obs"], None)}


def test_a_policy_that_keeps_gradients():
    """Calibration keeps no graph over all steps; acceleration leaves the caller's choice alone."""
    policy = WithGradients()
    plain, enabled = act(policy, observe(2)), []
    assert plain.requires_grad
    hook = policy.model.register_forward_hook(lambda *args: enabled.append(torch.is_grad_enabled()))
    bc.calibrate(policy, [observe(2)], progress=False)
    hook.remove()
    assert not any(enabled)
    with bc.accelerate(policy, engine="patched"):
        fast = act(policy, observe(2))
    assert fast.requires_grad
    assert torch.equal(fast, plain)


def test_pairing_through_the_global_generator(policy):
    before = torch.get_rng_state()
    assert torch.equal(act(policy, observe(), seed=1), act(policy, observe(), seed=1))
    assert not torch.equal(act(policy, observe(), seed=1), act(policy, observe(), seed=2))
    assert torch.equal(torch.get_rng_state(), before)
    with bc.accelerate(policy, engine="patched") as fast:
        paired = act(fast, observe(), seed=1)
    assert torch.equal(paired, act(policy, observe(), seed=1))


def test_pairing_uses_a_generator_where_there_is_one(make_policy):
    ours, obs = make_policy(), torch.zeros(1, 2, 5)
    right = ours.predict_action(obs, generator=torch.Generator().manual_seed(3))["action"]
    assert torch.equal(generate(ours.predict_action, obs, 3)["action"], right)
    with bc.accelerate(ours, engine="patched") as fast:
        assert torch.equal(generate(ours.predict_action, obs, 3)["action"], right)
        assert torch.equal(generate(fast.predict_action, obs, 3)["action"], right)


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_the_handle_has_the_policy_s_own_signature(make_policy, engine):
    """Pairing looks for `generator` in it: on a GPU the other way of seeding draws other noise."""
    ours = make_policy()
    expected = inspect.signature(ours.predict_action)
    with bc.accelerate(ours, engine=engine, threads=1) as fast:
        assert inspect.signature(fast.predict_action) == expected
    with pytest.raises(PolicyError, match="was disabled"):
        fast.predict_action(torch.zeros(1, 2, 5))


def test_threads_are_serialised():
    """One scheduler with a memory (DPM-Solver++): two generations at once would spoil each other."""
    policy = Policy(DPMSolverMultistepScheduler(STEPS * 5))
    schedule = bc.Schedule(STEPS, {block.name: [0, 2, 5] for block in port_of(policy).adapter.blocks})
    cases = [observe(1 + index % 3, seed=index) for index in range(6)]
    for case in cases:
        case["start"] = torch.randn(len(case["obs"]), TOKENS, ACTION)
    start = threading.Barrier(len(cases), timeout=30)

    def work(case):
        start.wait()
        return [policy.predict_action(case)["action_pred"] for _ in range(5)]

    with bc.accelerate(policy, schedule, engine="patched") as fast:
        expected = [policy.predict_action(case)["action_pred"] for case in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            results = list(pool.map(work, cases))
        assert fast.stats().generations == 36
    assert policy.most_active == 1
    for repeated, right in zip(results, expected, strict=True):
        assert all(torch.equal(result, right) for result in repeated)


def test_after_an_exception_the_lock_is_free(policy):
    with bc.accelerate(policy, engine="patched"):
        right = act(policy, observe())
        hook = policy.model.leave.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act(policy, observe(3))
        hook.remove()
        with ThreadPoolExecutor(1) as other:
            assert torch.equal(other.submit(act, policy, observe()).result(timeout=30), right)

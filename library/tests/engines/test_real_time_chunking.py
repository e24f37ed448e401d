"""Chunks that are told of the one before: the same in every engine, and what is committed comes out as it was."""

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.engines import export_policy, open_export
from blockcache.errors import EngineError, ObservationError, PolicyError
from blockcache.models.registry import port_of
from blockcache.samplers import Fitted
from blockcache_runtime import open_export as open_without_torch
from blockcache_runtime.chunks import EXECUTION_HORIZON, LATENCY, PREVIOUS_CHUNK, Previous
from dit_policies import tiny_dit, tiny_observation
from engine_comparison import CLOSE, SAMPLERS, accelerate, difference, generator, observe, sampler, schedule_for
from rdt_policies import rdt_observation, rdt_policy
from toy_family import FlowPolicy, claim

pytestmark = pytest.mark.usefixtures("exports_stay_here")
TOLD = {
    **{name: SAMPLERS[name] for name in ("ddpm", "ddim", "ddim, v, eta 0.7", "ddim, placed", "euler", "euler, placed")},
    **{name: SAMPLERS[name] for name in ("dpmsolver++, order 2", "dpmsolver++, clipped", "sde-dpmsolver++, order 2")},
    **{name: SAMPLERS[name] for name in ("ddpm, sample", "ddim, sample", "ddpm, one step")},
    "fitted": Fitted.of(sampler("ddpm", 4, timesteps=[70, 57.5, 20, 5])),
}


def told(policy, batch=3, delay=2, overlap=0, seed=9):
    """What a chunk might have been: somewhere among the actions that the policy gives."""
    with torch.no_grad():
        chunk = policy.predict_action(observe(policy, batch, seed), generator=generator(seed))["action_pred"]
    return Previous(chunk[:, policy.n_obs_steps - 1 :].numpy(), delay, overlap)


def chunk_of(policy, previous, batch=3, **more):
    found = policy.predict_action(observe(policy, batch), generator=generator(1), previous=previous, **more)
    return found["action_pred"]


@pytest.mark.parametrize("full", [True, False], ids=["full", "schedule"])
@pytest.mark.parametrize("overlap", [0, 4], ids=["committed only", "soft"])
@pytest.mark.parametrize("setting", TOLD.values(), ids=TOLD)
def test_every_engine_gives_what_the_policy_gives(engine, make_policy, random_updates, setting, overlap, full):
    policy = make_policy(sampler=setting)
    previous, schedule = told(policy, overlap=overlap), None if full else schedule_for(policy, random_updates)
    with accelerate(policy, schedule, "patched", rtc=True):
        expected, free = chunk_of(policy, previous), chunk_of(policy, None)
    with accelerate(policy, schedule, engine, rtc=True) as fast:
        assert difference(policy, chunk_of(fast.policy, previous), expected) < CLOSE
        assert difference(policy, chunk_of(fast.policy, None), free) < CLOSE
    start = policy.n_obs_steps - 1
    assert difference(policy, expected[:, start : start + 2], torch.from_numpy(previous.actions[:, :2])) < 1e-4
    assert difference(policy, expected, free) > 1e-2, "or being told would mean nothing"


@pytest.mark.parametrize("made", ["dit", "rdt"])
def test_other_families_can_be_told_too(engine, made):
    if made == "dit":
        policy, obs, other = tiny_dit(), tiny_observation(2), tiny_observation(2, seed=7)
    else:
        policy, obs, other = rdt_policy(), rdt_observation(2), rdt_observation(2, seed=7)
    with torch.no_grad():
        before = policy.predict_action(other, generator=generator(5))["action_pred"][:, policy.n_obs_steps - 1 :]
    previous = Previous(before.numpy(), np.array([1, 2]))
    expected = policy.predict_action(obs, generator=generator(1), previous=previous)["action_pred"]
    with accelerate(policy, None, engine, rtc=True) as fast:
        found = fast.predict_action(obs, generator=generator(1), previous=previous)["action_pred"]
    scale = torch.from_numpy(port_of(policy).action_scale)
    assert float(((found - expected).double() * scale).abs().max()) < CLOSE
    start = policy.n_obs_steps - 1
    for place, delay in enumerate((1, 2)):  # each of the batch has its own delay
        kept = slice(start, start + delay)
        assert torch.allclose(expected[place, kept], before[place, :delay], atol=1e-4)
        assert not torch.allclose(expected[place, start + delay], before[place, delay], atol=1e-4)


def test_off_is_what_it_was_and_takes_no_previous_chunk(engine, make_policy):
    policy = make_policy(sampler=sampler("ddpm"))
    with accelerate(policy, None, engine) as fast:
        plain = fast.predict_action(observe(policy), generator=generator())["action_pred"]
        with pytest.raises(EngineError, match="accelerate the policy with rtc=True"):
            fast.predict_action(observe(policy), previous=told(policy, 1))
    with accelerate(policy, None, engine, rtc=True) as fast:
        assert torch.equal(fast.predict_action(observe(policy), generator=generator())["action_pred"], plain)


def test_a_schedule_under_which_most_is_reused_still_ends_at_what_is_committed(engine, make_policy):
    policy = make_policy(sampler=sampler("ddpm", 20))
    schedule = bc.Schedule(20, {block.name: [0, 10] for block in port_of(policy).adapter.blocks})
    previous = told(policy, delay=3)
    with accelerate(policy, schedule, engine, rtc=True) as fast:
        found = chunk_of(fast.policy, previous)
    start = policy.n_obs_steps - 1
    assert difference(policy, found[:, start : start + 3], torch.from_numpy(previous.actions[:, :3])) < CLOSE


@pytest.mark.parametrize("output", ["chunk", "action"])
def test_an_export_takes_it_as_inputs(tmp_path, make_policy, output):
    policy = make_policy(sampler=sampler("ddim"))
    export_policy(policy, None, tmp_path / "told.onnx", output, rtc=True)
    export_policy(policy, None, tmp_path / "plain.onnx", output)
    opened, plain = open_export(tmp_path / "told.onnx", policy), open_without_torch(tmp_path / "plain.onnx")
    start = policy.n_obs_steps - 1
    known = (policy.horizon if output == "chunk" else start + policy.n_action_steps) - start
    inputs = opened.header["inputs"]
    assert inputs[PREVIOUS_CHUNK] == ["batch", known, policy.action_dim]
    assert inputs[LATENCY] == inputs[EXECUTION_HORIZON] == ["batch"]
    assert PREVIOUS_CHUNK not in plain.header["inputs"]
    assert opened.sizes == plain.sizes  # of observations and noise
    previous = told(policy)
    expected = policy.predict_action(observe(policy, 3), generator=generator(1), previous=previous)["action"]
    found = opened.predict_action(observe(policy, 3), generator=generator(1), previous=previous)["action"]
    assert difference(policy, found, expected) < CLOSE
    noise, seen = policy.draw_noise(3, generator(1)).numpy(), observe(policy, 3).numpy()
    robot = open_without_torch(tmp_path / "told.onnx")
    assert (robot.takes_previous, plain.takes_previous) == (True, False)
    assert np.array_equal(robot.predict_action(seen, noise=noise, previous=previous)["action"], found.numpy())
    unguided = robot.predict_action(seen, noise=noise)["action"]
    np.testing.assert_allclose(unguided, plain.predict_action(seen, noise=noise)["action"], atol=1e-5)
    with pytest.raises(ObservationError, match="export it with --rtc"):
        plain.predict_action(seen, previous=previous)
    with pytest.raises(ObservationError, match="previous actions have shape"):
        robot.predict_action(seen, previous=Previous(np.zeros((2, 7)), 1))


@pytest.mark.parametrize("form", [{"obs_as_cond": False, "time_as_cond": False}, {"obs_as_cond": False}])
def test_a_policy_that_in_paints_its_observations_cannot_be_told(make_policy, form):
    policy = make_policy(**form)
    previous = Previous(np.zeros((1, policy.action_dim)), 1)
    with pytest.raises(PolicyError, match="denoises actions alone"):
        policy.predict_action(observe(policy), previous=previous)
    with pytest.raises(EngineError):
        bc.accelerate(policy, None, engine="loop", rtc=True)


def test_the_patched_engine_runs_a_policy_as_it_is():
    with pytest.raises(EngineError, match="takes no previous chunk, and the patched engine runs it as it is"):
        bc.accelerate(claim(FlowPolicy()), None, engine="patched", rtc=True)


def test_a_foreign_policy_is_told_by_the_engine_that_runs_it(engine):
    policy = FlowPolicy()
    port = claim(policy)
    obs = {name: torch.randn(2, *shape, generator=generator(3)) for name, shape in port.inputs.items()}
    start, stop = port.executed
    before = np.full((2, stop - start, len(port.action_scale)), 0.25, dtype=np.float32)
    with accelerate(port, None, engine, rtc=True):
        entry = getattr(policy, port.entry)
        returned = entry(obs, previous=Previous(before, 2))
    assert np.allclose(port.action_of(returned)[:, :2].detach().numpy(), 0.25, atol=1e-5)

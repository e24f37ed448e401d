"""One contract for both whole-loop engines: what loop and onnx promise, checked against the patched engine."""

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.errors import EngineError, ObservationError
from engine_comparison import (
    BLOCKS,
    CLOSE,
    SAMPLERS,
    accelerate,
    act,
    difference,
    generator,
    names,
    observe,
    sampler,
    schedule_for,
)

pytestmark = pytest.mark.usefixtures("exports_stay_here")
SHAPES = {
    "one layer": {"n_layer": 1},
    "one head": {"n_head": 1},
    "four heads": {"n_head": 4, "n_layer": 3},
    "not causal": {"causal_attn": False},
    "one observation": {"n_obs_steps": 1},
    "as many observations as actions": {"n_obs_steps": 6, "n_action_steps": 1},
    "one action": {"horizon": 2, "n_action_steps": 1},
    "one number": {"action_dim": 1, "obs_dim": 1},
}


def assert_equal_to_patched(policy, schedule, engine):
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = {batch: act(policy, batch)["action_pred"] for batch in (1, 3)}
    with accelerate(policy, schedule, engine) as fast:
        for batch in (1, 3, 1):  # the batch may change from call to call
            found = act(fast.policy, batch)
            assert difference(policy, found["action_pred"], expected[batch]) < CLOSE
            assert torch.equal(found["action"], found["action_pred"][:, policy.config.executed])
    return expected[1]


# -- the same actions


@pytest.mark.parametrize("setting", SAMPLERS.values(), ids=SAMPLERS)
def test_a_schedule_gives_what_the_patched_engine_gives(engine, make_policy, random_updates, setting):
    policy = make_policy(sampler=setting)
    schedule = schedule_for(policy, random_updates)
    full, skipped = act(policy)["action_pred"], assert_equal_to_patched(policy, schedule, engine)
    if setting.num_inference_steps > 1:
        assert difference(policy, skipped, full) > 1e-3, "or the comparison means little"


@pytest.mark.parametrize("setting", SAMPLERS.values(), ids=SAMPLERS)
def test_full_precision_gives_what_the_plain_policy_gives(engine, make_policy, setting):
    policy = make_policy(sampler=setting)
    expected = {batch: act(policy, batch)["action_pred"] for batch in (1, 3)}
    with accelerate(policy, None, engine) as fast:
        for batch in (1, 3, 1):
            assert difference(policy, act(fast.policy, batch)["action_pred"], expected[batch]) < CLOSE


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_other_shapes(engine, make_policy, random_updates, changes, full):
    policy = make_policy(**changes)
    assert_equal_to_patched(policy, None if full else schedule_for(policy, random_updates), engine)


@pytest.mark.parametrize("seed", range(4))
def test_long_random_schedules(engine, make_policy, random_updates, seed):
    policy = make_policy(seed, n_layer=3, sampler=sampler("ddpm", steps=25))
    schedule = bc.Schedule(25, random_updates(names(policy), 25, seed, share=(0.05, 0.2, 0.5, 0.9)[seed]))
    assert_equal_to_patched(policy, schedule, engine)


def test_a_schedule_with_hardly_anything_to_compute(engine, make_policy):
    policy = make_policy()
    assert_equal_to_patched(policy, bc.Schedule(6, dict.fromkeys(BLOCKS, (0,))), engine)


def test_skipping_changes_the_action(engine, policy):
    """The other tests could not fail if nothing depended on the schedule."""
    full = act(policy)["action_pred"]
    for name in BLOCKS:
        updates = {block: (0,) if block == name else range(6) for block in BLOCKS}
        with accelerate(policy, bc.Schedule(6, updates), engine) as fast:
            assert difference(policy, act(fast.policy)["action_pred"], full) > 1e-3, name


# -- noise and observations


@pytest.mark.parametrize("setting", ["ddpm", "ddim, eta 0.7", "ddpm, trailing", "dpmsolver++, order 2"])
def test_noise_from_a_generator_a_tensor_or_torch_itself(engine, make_policy, setting):
    policy = make_policy(sampler=SAMPLERS[setting])
    obs = observe(policy, 3)
    expected = policy.predict_action(obs, generator=generator(5))["action_pred"]
    noise = policy.draw_noise(3, generator(5))
    after = generator(5)
    policy.predict_action(obs, generator=after)
    with accelerate(policy, None, engine, output="action") as fast:
        own = generator(5)
        slices = [fast.predict_action(obs, generator=own)["action"], fast.predict_action(obs, noise=noise)["action"]]
        torch.manual_seed(5)
        slices.append(fast.predict_action(obs)["action"])
        slices.append(fast.predict_action(obs, noise=noise.numpy())["action"])
    for found in slices:
        assert difference(policy, found, expected[:, policy.config.executed]) < CLOSE
    assert torch.equal(own.get_state(), after.get_state()), "as much noise is drawn, in the same order"


def test_noise_of_another_shape_is_refused(engine, policy):
    noise = policy.draw_noise(1)
    with accelerate(policy, None, engine) as fast:
        for wrong in (noise[:-1], noise[:, :, :-1], policy.draw_noise(2)):
            with pytest.raises(ObservationError, match="noise has shape"):
                fast.predict_action(observe(policy), noise=wrong)


def test_observations_come_in_many_forms(engine, policy):
    obs = observe(policy, 2)
    expected = policy.predict_action(obs, generator=generator())["action"]
    forms = [
        {"obs": obs},
        obs.numpy(),
        obs.double(),
        obs.clone().requires_grad_(),
        obs.transpose(0, 2).contiguous().transpose(0, 2),  # not contiguous
        {"obs": np.asarray(obs, dtype=np.float64), "also": "ignored"},
    ]
    with accelerate(policy, None, engine) as fast:
        for form in forms:
            found = fast.predict_action(form, generator=generator())["action"]
            assert not found.requires_grad
            assert difference(policy, found, expected) < CLOSE


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (torch.zeros(1, 3, 5), r"shape \(1, 3, 5\), expected \(batch, 2, 5\)"),
        (torch.zeros(1, 2, 4), r"shape \(1, 2, 4\), expected \(batch, 2, 5\)"),
        (torch.zeros(2, 5), r"expected \(batch, 2, 5\)"),
        (torch.zeros(0, 2, 5), r"expected \(batch, 2, 5\)"),
        (torch.full((1, 2, 5), torch.nan), "NaN or infinity"),
        (torch.full((1, 2, 5), -torch.inf), "NaN or infinity"),
        (torch.full((1, 2, 5), 1e300, dtype=torch.float64), "NaN or infinity"),  # infinite in single precision
        ({"image": torch.zeros(1, 2, 5)}, "no key 'obs'"),
        ("nothing", "not an array"),
    ],
)
def test_observations_that_are_refused(engine, policy, wrong, sentence):
    expected = act(policy)["action"]
    with accelerate(policy, None, engine) as fast:
        with pytest.raises(ObservationError, match=sentence):
            fast.predict_action(wrong)
        assert fast.stats().generations == 0
        assert difference(policy, act(fast.policy)["action"], expected) < CLOSE  # the next one is right


# -- output="action"


@pytest.mark.parametrize("n_action_steps", [1, 4, 5])  # 5 reaches the end of the horizon
@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_executed_actions_only(engine, make_policy, random_updates, n_action_steps, full):
    policy = make_policy(n_action_steps=n_action_steps)
    schedule = None if full else schedule_for(policy, random_updates)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = {batch: act(policy, batch)["action"] for batch in (1, 3)}
    with accelerate(policy, schedule, engine, output="action") as fast:
        for batch in (1, 3):
            found = act(fast.policy, batch)
            assert list(found) == ["action"]
            assert difference(policy, found["action"], expected[batch]) < CLOSE


@pytest.mark.parametrize("chosen", ["loop", "onnx", "auto"])
def test_executed_actions_only_needs_causal_attention(make_policy, chosen):
    policy = make_policy(causal_attn=False)
    with pytest.raises(EngineError, match="needs causal attention, which this policy lacks"):
        accelerate(policy, None, chosen, output="action")
    assert "predict_action" not in vars(policy)


def test_a_mask_that_hides_more_than_the_future_is_obeyed(engine, make_policy, random_updates):
    """Causal, but with a window: not what ONNX calls causal, and not to be cut short."""
    policy = make_policy()
    with torch.no_grad():
        policy.model.mask.copy_(policy.model.mask + torch.full((6, 6), -torch.inf).tril(diagonal=-3))
    assert_equal_to_patched(policy, schedule_for(policy, random_updates), engine)
    with pytest.raises(EngineError, match="causal"):
        accelerate(policy, None, engine, output="action")

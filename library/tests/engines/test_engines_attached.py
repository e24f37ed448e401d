"""A policy while loop or onnx is attached to it and afterwards: threads, copies, counts, and weights that change."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, PolicyError, StaleWeightsError
from engine_comparison import BLOCKS, CLOSE, SAMPLERS, accelerate, act, difference, observe, schedule_for

pytestmark = pytest.mark.usefixtures("exports_stay_here")


# -- attached and detached


def test_two_threads_at_once(engine, make_policy, random_updates):
    policy = make_policy()
    with accelerate(policy, schedule_for(policy, random_updates), engine) as fast:
        alone = [act(policy, 1 + seed % 3, seed)["action"] for seed in range(12)]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda seed: act(policy, 1 + seed % 3, seed)["action"], range(12)))
        assert fast.stats().generations == 24
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(alone, together, strict=True))


def test_disable_leaves_nothing_behind(engine, policy, random_updates):
    before, attributes = act(policy)["action_pred"], set(vars(policy))
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    fast = accelerate(policy, schedule_for(policy, random_updates), engine)
    act(policy)
    assert list(policy.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    fast.disable()
    fast.disable()
    assert set(vars(policy)) == attributes
    assert torch.equal(act(policy)["action_pred"], before)
    with pytest.raises(PolicyError, match="was disabled"):
        fast.predict_action(observe(policy))
    with accelerate(policy, None, engine) as again:  # and once more
        assert difference(policy, act(again.policy)["action_pred"], before) < CLOSE


@pytest.mark.parametrize("second", ["loop", "onnx", "patched", "auto"])
def test_enabling_twice_is_refused(engine, policy, second):
    with accelerate(policy, None, engine):
        with pytest.raises(PolicyError, match=r"accelerated already; call disable\(\) first"):
            accelerate(policy, None, second)
        act(policy)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_copying_while_enabled_is_refused(engine, policy, clone):
    with accelerate(policy, None, engine), pytest.raises(PolicyError, match="cannot be"):
        clone(policy)
    clone(policy)


def test_another_policy_with_the_same_denoiser_is_not_touched(engine, policy, random_updates):
    other = policy.with_sampler(SAMPLERS["ddim"])
    before = act(other)["action_pred"]
    with accelerate(policy, schedule_for(policy, random_updates), engine):
        assert torch.equal(act(other)["action_pred"], before)
        with accelerate(other, None, engine):
            assert difference(policy, act(other)["action_pred"], before) < CLOSE


def test_stats_count_finished_generations(engine, policy):
    updates = {name: (0, 2) if name.endswith("SA") else (0,) for name in BLOCKS}
    with accelerate(policy, bc.Schedule(6, updates), engine) as fast:
        assert fast.stats().generations == 0
        act(policy, batch=3)
        act(policy)
        stats = fast.stats()
    assert (stats.engine, stats.generations) == (engine, 2)
    assert list(stats.computed) == list(BLOCKS)
    assert {stats.computed["layers.0.SA"], stats.computed["layers.1.FFN"]} == {4, 2}
    assert {stats.reused["layers.0.SA"], stats.reused["layers.1.FFN"]} == {8, 10}
    assert stats.notes == ("the schedule was made for no weights in particular",)


def test_full_precision_reuses_nothing(engine, policy):
    with accelerate(policy, None, engine) as fast:
        act(policy)
    assert fast.stats().reused_share == 0
    assert set(fast.stats().computed.values()) == {6}


def test_code_of_one_s_own_is_not_passed_over(policy, engine):
    """A hook changes what the model gives: an engine that did not run it would give other actions."""
    policy.model.register_forward_hook(lambda module, given, out: 1.5 * out)
    expected = act(policy)["action_pred"]
    with pytest.raises(EngineError, match="its actions differ from the engine's"):
        accelerate(policy, engine=engine)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"
        assert "not onnx: " in fast.stats().notes[0]
        assert "its actions differ from the engine's" in fast.stats().notes[1]
        assert torch.equal(act(policy)["action_pred"], expected)


# -- weights that change


def _edit(policy, other):
    with torch.no_grad():
        policy.model.decoder.layers[1].linear2.bias[3] += 1


def _load(policy, other):
    policy.load_state_dict(other.state_dict())


def _write_around_torch(policy, other):
    for own, new in zip(policy.parameters(), other.parameters(), strict=True):
        own.data.copy_(new)


def _write_one_around_torch(policy, other):
    policy.model.decoder.layers[0].self_attn.in_proj_weight.data.copy_(
        other.model.decoder.layers[0].self_attn.in_proj_weight
    )


def _new_storage(policy, other):
    policy.model.head.weight.data = policy.model.head.weight.data.clone()


def _new_parameter(policy, other):
    policy.model.pos_emb = nn.Parameter(other.model.pos_emb.detach().clone())


def _new_module(policy, other):
    policy.model.decoder.layers[0].linear1 = other.model.decoder.layers[0].linear1


def _new_denoiser(policy, other):
    policy.model = other.model


def _normaliser(policy, other):
    policy.normalizer.action.scale.mul_(2)


def _mask_gone(policy, other):
    policy.model.mask = None


def _double(policy, other):
    policy.double()


EDITS = [
    _edit, _load, _write_around_torch, _write_one_around_torch, _new_storage, _new_parameter, _new_module, _new_denoiser,
    _normaliser, _mask_gone, _double,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=[edit.__name__.strip("_") for edit in EDITS])
def test_changed_weights_are_noticed(engine, make_policy, edit):
    policy = make_policy()
    fast = accelerate(policy, None, engine)
    act(policy)
    edit(policy, make_policy(seed=1))
    for _ in range(2):
        with pytest.raises(StaleWeightsError, match=r"weights changed .* disable\(\) and accelerate again"):
            act(policy)
    fast.disable()
    expected = act(policy)["action_pred"]
    with bc.accelerate(policy, None, engine="loop") as fast:
        assert difference(policy, act(fast.policy)["action_pred"], expected) < CLOSE


def test_what_is_no_change_is_not_taken_for_one(engine, make_policy):
    with torch.inference_mode():  # whose tensors have no version counter
        policy = make_policy()
        policy.normalizer.obs.input_stats.get_buffer("std").fill_(torch.nan)  # never equal to itself, and never used
    policy.register_buffer("nothing", torch.empty(0))
    expected = act(policy)["action"]
    with accelerate(policy, None, engine) as fast:
        policy.requires_grad_(False)
        with torch.inference_mode():
            act(policy)
        assert difference(policy, act(fast.policy)["action"], expected) < CLOSE


def test_another_sampler_is_noticed(engine, policy):
    with accelerate(policy, None, engine):
        policy.config = replace(policy.config, sampler=SAMPLERS["ddim"])
        with pytest.raises(EngineError, match=r"sampler or sizes changed .* disable\(\) and accelerate again"):
            act(policy)

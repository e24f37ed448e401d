"""A policy that changes under loop or onnx: what the next call notices, what some calls notice, and what verify() does."""

import inspect
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import blockcache as bc
from blockcache.engines.staleness import PARTS, TURNS, Structure
from blockcache.errors import EngineError, PolicyError, StaleError, StaleWeightsError
from blockcache.models.dpt.denoiser import SinusoidalEmbedding
from blockcache.models.registry import port_of
from engine_comparison import CLOSE, accelerate, act, difference, observe
from foreign_policy import OBS, SEEN, WIDTH, Policy
from repository import DOCS

pytestmark = pytest.mark.usefixtures("exports_stay_here")


def calls_until_noticed(policy, most):
    """How many calls it took to notice; every later one must notice as well."""
    for count in range(1, most + 1):
        try:
            act(policy)
        except StaleError:
            for _ in range(3):
                with pytest.raises(StaleError):
                    act(policy)
            return count
    return None


# -- structure


def _hook(policy):
    policy.model.decoder.layers[1].register_forward_hook(lambda module, given, out: 2 * out)


def _pre_hook(policy):
    policy.model.head.register_forward_pre_hook(lambda module, given: (2 * given[0],))


def _eps(policy):
    policy.model.ln_f.eps = 0.1


def _activation(policy):
    policy.model.decoder.layers[0].activation = F.relu


def _heads(policy):
    policy.model.decoder.layers[1].self_attn.num_heads = 4


def _forward(policy):
    policy.model.time_emb.forward = lambda timesteps: torch.zeros(len(timesteps), 16)


def _function(policy):
    policy.model.encode = lambda time, cond: time


def _another_setting_for_one(policy):  # as many as before
    del policy.model.ln_f.eps
    policy.model.ln_f.epsilon = 1e-5


EDITS = [_hook, _pre_hook, _eps, _activation, _heads, _forward, _function, _another_setting_for_one]


@pytest.mark.parametrize("edit", EDITS, ids=[edit.__name__.strip("_") for edit in EDITS])
def test_another_structure_is_noticed_within_16_calls(policy, edit):
    assert TURNS == 16
    with accelerate(policy, None, "loop") as fast:
        act(policy)
        edit(policy)
        with pytest.raises(
            StaleError, match=r"the policy changed after .* \(policy\..*disable\(\) and accelerate again"
        ):
            fast.verify()
        assert calls_until_noticed(policy, TURNS) is not None


@pytest.mark.parametrize("edit", [_eps, _activation, _heads, _forward])
def test_what_was_noticed_has_an_effect(policy, edit):
    """Else nothing was wrong with not noticing it."""
    before = act(policy)["action"]
    edit(policy)
    assert not torch.equal(act(policy)["action"], before)


def test_the_sentence_says_what_changed(policy):
    structure = Structure(port_of(policy))
    policy.model.ln_f.eps = 0.1
    with pytest.raises(StaleError, match=r"\(policy\.model\.ln_f\.eps was 1e-05, is 0\.1\)"):
        structure.check_everything()
    policy.model.ln_f.eps = 1e-5  # as it was
    structure.check_everything()
    policy.model.encoder.append(nn.ReLU())
    with pytest.raises(StaleWeightsError, match=r"\(policy\.model\.encoder\.3 is another object\)"):
        structure.check()


class Flagged(Policy):
    """Does more if somebody asks for it; keeps its limits in a list and its masks where torch does not look for them."""

    relative = False

    def __init__(self):
        super().__init__()
        self.limits, self.queue, self.low = [1.0, 2.0], deque(), torch.zeros(3)

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {name: (value.cumsum(1) if self.relative else value) for name, value in found.items()}


def call(policy):
    torch.manual_seed(0)
    return policy.predict_action({"obs": torch.ones(1, SEEN, OBS)})["action"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda policy: setattr(policy, "relative", True),
        lambda policy: setattr(policy, "limits", [1.0, 3.0]),
        lambda policy: setattr(policy, "low", torch.ones(3)),
        lambda policy: policy.low.add_(1),
        lambda policy: setattr(policy, "horizon", 8),
    ],
    ids=["flag of the class", "list", "tensor", "edited tensor", "size"],
)
def test_a_policy_s_own_settings_are_noticed_by_the_next_call(edit):
    policy = Flagged()
    with accelerate(policy, None, "loop"):
        call(policy)
        edit(policy)
        for _ in range(2):
            with pytest.raises(StaleError, match="accelerate again"):
                call(policy)


def _set_again(policy):
    policy.limits, policy.obs_dim = [1.0, 2.0], int("4")


def _note(policy):
    policy.episode, policy.latest = 3, torch.ones(1)


def _queue(policy):
    policy.queue = deque([1])


def _top(policy):
    ours = policy.predict_action
    policy.predict_action = lambda obs_dict: ours(obs_dict)


def _gradients(policy):
    policy.requires_grad_(False)
    policy.training = True  # of the policy itself only, which does nothing with it


@pytest.mark.parametrize("change", [_set_again, _note, _queue, _top, _gradients])
def test_what_is_no_change_is_not_taken_for_one(change):
    policy = Flagged()
    fast = accelerate(policy, None, "loop")
    expected = call(policy)
    change(policy)
    assert all(torch.equal(call(policy), expected) for _ in range(TURNS + 1))
    fast.verify()


def test_another_acceleration_of_the_same_denoiser_is_no_change(policy):
    other = policy.with_sampler(policy.sampler)
    with accelerate(policy, None, "loop") as fast:
        expected = act(policy)["action"]
        with bc.accelerate(other, engine="patched"):
            assert all(torch.equal(act(policy)["action"], expected) for _ in range(TURNS + 1))
            fast.verify()
        bc.calibrate(other, [observe(policy)], progress=False)
        assert all(torch.equal(act(policy)["action"], expected) for _ in range(TURNS + 1))


# -- verify


def _within_a_list(policy, patch):
    policy.limits[1] = 3.0


def _class(policy, patch):
    policy.model.time_emb.__class__ = type("Other", (type(policy.model.time_emb),), {})


def _code_of_a_class(policy, patch):
    patch.setattr(type(policy.model.time_emb), "forward", lambda self, t: torch.zeros(len(t), WIDTH))


def _library(policy, patch):
    patch.setattr(F, "mish", torch.relu)


@pytest.mark.parametrize("edit", [_within_a_list, _class, _code_of_a_class, _library])
def test_what_only_verify_notices(edit, monkeypatch):
    policy = Flagged()
    with accelerate(policy, None, "loop") as fast:
        fast.verify()
        edit(policy, monkeypatch)
        call(policy)
        with pytest.raises(StaleError, match="accelerate again"):
            fast.verify()


def test_a_hook_of_all_modules_is_noticed_by_verify(policy):
    with accelerate(policy, None, "loop") as fast:
        hook = register_module_forward_hook(lambda module, given, out: out + 1 if module is policy.model else None)
        try:
            act(policy)
            with pytest.raises(StaleError, match="no longer acts as this engine"):
                fast.verify()
        finally:
            hook.remove()
        fast.verify()


def test_verify_compares_our_own_policies_too(engine, policy, monkeypatch):
    with accelerate(policy, None, engine) as fast:
        assert fast.verify() is None
        monkeypatch.setattr(SinusoidalEmbedding, "forward", lambda self, t: torch.zeros(len(t), 16))
        with pytest.raises(StaleError, match=r"no longer acts as this engine, its actions differ from .* by up to"):
            fast.verify()


@pytest.mark.parametrize("settings", [{}, {"output": "action"}], ids=["chunk", "action"])
def test_verify_changes_nothing(engine, policy, settings, tmp_path):
    schedule = bc.Schedule(6, {block.name: [0, 3] for block in port_of(policy).adapter.blocks})
    with accelerate(policy, schedule, engine, **settings) as fast:
        expected, held = act(policy)["action"], sorted(tmp_path.glob("cache/*"))
        torch.manual_seed(5)
        state = torch.get_rng_state()
        fast.verify()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(act(policy)["action"], expected)
        assert fast.stats().generations == 2
        assert sorted(tmp_path.glob("cache/*")) == held


def test_patched_reads_the_policy_as_it_is(policy):
    with bc.accelerate(policy, engine="patched") as fast:
        before = act(policy)["action"]
        policy.model.ln_f.eps = 0.1
        policy.model.head.weight.data[0, 0] += 1
        fast.verify()
        assert not torch.allclose(act(policy)["action"], before, atol=1e-3)
        assert fast.noticed_within == 1
    with pytest.raises(PolicyError, match="was disabled"):
        fast.verify()


def test_accelerating_again_takes_the_policy_as_it_is(engine, policy):
    with accelerate(policy, None, engine) as fast:
        policy.model.ln_f.eps = 0.1
        policy.model.head.weight.data[0, 0] += 1
        with pytest.raises(StaleError):
            fast.verify()
    for norm in (norm for layer in policy.model.decoder.layers for norm in (layer.norm1, layer.norm2, layer.norm3)):
        norm.eps = 0.1  # one for all is what these engines support
    expected = act(policy)["action_pred"]
    with accelerate(policy, None, engine) as fast:
        fast.verify()
        assert difference(policy, act(policy)["action_pred"], expected) < CLOSE


def test_the_promise_names_the_numbers_that_hold():
    """In the handle, in accelerate's docstring and in the docs."""
    for promise in (inspect.getdoc(bc.accelerate), (DOCS / "engines-and-samplers.md").read_text()):
        assert f"within {TURNS} calls" in promise
        assert f"within {PARTS} calls" in promise
        assert "noticed_within" in promise
    assert issubclass(StaleWeightsError, StaleError)
    assert issubclass(StaleError, EngineError)

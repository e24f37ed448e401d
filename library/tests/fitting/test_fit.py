"""A schedule goes on the policy it was made for and on no other; a policy that cannot be cached says why."""

import json
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, PolicyError, ScheduleError
from blockcache.fingerprint import fingerprint_differences
from blockcache.models.modules import weights_hash
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM


def made_for(policy, **changes):
    """A schedule bound to everything about a policy; keywords change the fingerprint."""
    fingerprint = replace(port_of(policy).fingerprint, **changes)
    return bc.Schedule.every_step(fingerprint.steps, fingerprint.blocks, fingerprint)


def test_fits_its_own_policy(policy):
    with bc.accelerate(policy, made_for(policy), engine="patched") as fast:
        assert fast.stats().notes == ()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"n_layer": 3}, r"6 blocks instead of 9 \(no block layers\.2\.CA\)"),
        ({"n_layer": 1}, r"6 blocks instead of 3 \(an extra block layers\.1\.CA\)"),
        ({"n_emb": 24}, "width 16 instead of 24, hidden 64 instead of 96"),
        ({"n_head": 4}, "heads 2 instead of 4"),
        ({"horizon": 8}, "tokens 6 instead of 8"),
        ({"obs_dim": 7}, "cond_dim 5 instead of 7"),
        ({"action_dim": 2}, "input_dim 3 instead of 2"),
        ({"time_as_cond": False, "obs_as_cond": False}, r"an extra block layers\.0\.CA"),
        ({"sampler": DDPM(num_inference_steps=10)}, "steps 6 instead of 10; num_inference_steps 6"),
        ({"sampler": DDIM(num_inference_steps=6)}, 'type "ddpm" instead of "ddim"'),
        (
            {"sampler": DDPM(num_inference_steps=6, clip_sample=False)},
            "clip_sample true instead of false",
        ),
        ({"sampler": DDPM(num_train_timesteps=200, num_inference_steps=6)}, "num_train_timesteps 100 instead of 200"),
        ({"seed": 1}, "weights [0-9a-f]{8} instead of [0-9a-f]{8}"),
    ],
    ids=str,
)
def test_made_for_something_else(policy, make_policy, observe, run, changes, difference):
    plain = run(policy, observe())
    schedule = made_for(make_policy(**changes))
    with pytest.raises(ScheduleError, match=difference) as caught:
        bc.accelerate(policy, schedule, engine="patched")
    assert "'blockcache calibrate'" in str(caught.value)
    assert "predict_action" not in vars(policy)
    assert torch.equal(run(policy, observe()), plain)


def test_other_weights_are_refused_or_noted(policy, make_policy, observe, run, random_updates):
    schedule = made_for(make_policy(seed=1))
    with pytest.raises(ScheduleError, match=r'weights .* \(or pass check="shape" to use it all the same\)'):
        bc.accelerate(policy, schedule, engine="patched")
    plain = run(policy, observe())
    with bc.accelerate(policy, schedule, engine="patched", check="shape") as fast:
        assert fast.stats().notes == ("the schedule was made for other weights",)
        assert torch.equal(run(fast, observe()), plain)


def test_shape_means_all_but_the_weights(policy, make_policy):
    schedule = made_for(make_policy(seed=1, n_head=4))
    with pytest.raises(ScheduleError, match="heads 2 instead of 4") as caught:
        bc.accelerate(policy, schedule, engine="patched", check="shape")
    assert "check=" not in str(caught.value)


def test_the_smallest_edit_of_a_weight_counts(policy):
    before = weights_hash(policy)
    with torch.no_grad():
        policy.model.head.bias[1] += 1e-7
    assert weights_hash(policy) != before


def test_the_normaliser_counts_as_weights(policy):
    before = port_of(policy).fingerprint
    policy.normalizer.action.scale.mul_(2)
    assert fingerprint_differences(port_of(policy).fingerprint, before) != ()


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (lambda names: names[:-1], r"6 blocks instead of 5 \(an extra block layers\.1\.FFN\)"),
        (lambda names: [*names, "layers.9.SA"], r"6 blocks instead of 7 \(no block layers\.9\.SA\)"),
        (lambda names: ["layers.0.XY", *names[1:]], r"no block layers\.0\.XY"),
        (lambda names: names[::-1], "the same blocks in another order"),
    ],
)
def test_unknown_and_missing_blocks(policy, blocks, sentence):
    names = [block.name for block in port_of(policy).adapter.blocks]
    schedule = bc.Schedule(6, {name: [0] for name in blocks(names)})
    with pytest.raises(ScheduleError, match=sentence):
        bc.accelerate(policy, schedule, engine="patched")


def test_a_printed_schedule_goes_on_any_policy_of_its_shape(make_policy):
    policy = make_policy(n_layer=8, sampler=DDPM())
    with bc.accelerate(policy, bc.published_schedule("square_ph"), engine="patched") as fast:
        assert fast.stats().notes == ("the schedule was made for no weights in particular",)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"engine": "magic"}, EngineError, "unknown engine 'magic', known are auto"),
        ({"output": "video"}, EngineError, "unknown output 'video'"),
        ({"check": "none"}, EngineError, "unknown check 'none', known are strict, shape"),
        ({"schedule": "schedule.json"}, ScheduleError, r"got str; a file is read with Schedule\.load\(path\)"),
        ({"schedule": {"layers.0.SA": [0]}}, ScheduleError, "got dict"),
    ],
)
def test_wrong_options(policy, options, error, sentence):
    with pytest.raises(error, match=sentence):
        bc.accelerate(policy, **options)
    assert "predict_action" not in vars(policy)


# ----------------------------------------------------------------------------------------- policies that cannot be used


class Slots:
    __slots__ = ("model", "noise_scheduler", "num_inference_steps")

    def predict_action(self, obs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (object(), r"object is no diffusion policy that blockcache knows \(dp-t: it lacks model, noise_scheduler"),
        (nn.Linear(2, 2), "Linear is no diffusion policy that blockcache knows"),
        (Slots(), "it lacks model"),
        (
            types.SimpleNamespace(model=3, noise_scheduler=3, num_inference_steps=3, predict_action=print),
            "must be a torch module, got int",
        ),
        (
            types.SimpleNamespace(
                model=nn.Linear(2, 2).eval(), noise_scheduler=3, num_inference_steps=3, predict_action=print
            ),
            r"\(dp-t: the denoiser Linear has no decoder.layers of .*; other families can register",
        ),
    ],
)
def test_things_that_are_no_policy(policy, sentence):
    for use in (lambda: bc.accelerate(policy), lambda: bc.calibrate(policy, [torch.zeros(1, 2, 5)])):
        with pytest.raises(PolicyError, match=sentence):
            use()


def test_a_policy_without_room_for_attributes(policy):
    slots = Slots()
    slots.model, slots.noise_scheduler, slots.num_inference_steps = policy.model, policy.noise_scheduler, 6
    with pytest.raises(PolicyError, match="Slots has __slots__"):
        bc.accelerate(slots, engine="patched")
    assert "forward" not in vars(policy.model)


class OwnForward(nn.TransformerDecoderLayer):
    def forward(self, tgt, memory, **kwargs):
        return tgt


class OwnFeedForward(nn.TransformerDecoderLayer):
    def _ff_block(self, x):
        return x


class OnlyAnotherName(nn.TransformerDecoderLayer):
    pass


def replaced(kind, **options):
    settings = {"norm_first": True, "batch_first": True} | options
    return lambda: kind(16, 2, 64, activation="gelu", **settings).eval()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (replaced(nn.TransformerDecoderLayer, norm_first=False), r"layers\.1 is post-norm \(norm_first=False\)"),
        (replaced(nn.TransformerDecoderLayer, batch_first=False), r"layers\.1 is not batch_first"),
        (replaced(OwnForward), r"layers\.1 is a OwnForward with its own forward"),
        (replaced(OwnFeedForward), r"layers\.1 is a OwnFeedForward with its own _ff_block"),
        (lambda: nn.Identity().eval(), "dp-t: the denoiser DiffusionTransformer has no decoder.layers of Transformer"),
    ],
)
def test_layers_that_cannot_be_cached(policy, make, sentence):
    policy.model.decoder.layers[1] = make()
    with pytest.raises(PolicyError, match=sentence):
        bc.accelerate(policy, engine="patched")
    assert "predict_action" not in vars(policy)


def test_a_subclass_that_changes_nothing_is_fine(policy, observe, run):
    policy.model.decoder.layers[1] = replaced(OnlyAnotherName)()
    plain = run(policy, observe())
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(run(policy, observe()), plain)


def test_a_post_norm_encoder_is_refused(make_policy):
    policy = make_policy(time_as_cond=False, obs_as_cond=False)
    policy.model.encoder.layers[0] = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True).eval()
    with pytest.raises(PolicyError, match=r"layers\.0 is post-norm"):
        bc.accelerate(policy, engine="patched")


@pytest.mark.parametrize(
    ("place", "name", "named"),
    [
        ("decoder.layers.1", "forward", r"layers\.1\.forward"),
        ("decoder.layers.1", "_sa_block", r"layers\.1\._sa_block"),
        ("decoder.layers.0.linear1", "forward", r"layers\.0\.linear1\.forward"),
        ("decoder.layers.0.multihead_attn", "forward", r"layers\.0\.multihead_attn\.forward"),
        ("", "forward", r"DiffusionTransformer\.forward"),
    ],
)
def test_patched_by_something_else(policy, observe, run, place, name, named):
    module = policy.model.get_submodule(place)
    theirs = getattr(module, name)
    vars(module)[name] = theirs
    for use in (lambda: bc.accelerate(policy, engine="patched"), lambda: bc.calibrate(policy, [observe()])):
        with pytest.raises(PolicyError, match=rf"{named} is already patched by something else; .*remove that patch"):
            use()
    assert vars(module)[name] is theirs
    assert "predict_action" not in vars(policy)
    run(policy, observe())


def test_a_patched_predict_action_is_refused(policy):
    policy.predict_action = lambda obs: obs
    with pytest.raises(PolicyError, match=r"predict_action is already patched by something else"):
        bc.accelerate(policy, engine="patched")


def test_a_fingerprint_survives_a_file(policy, tmp_path):
    schedule = made_for(policy)
    schedule.save(tmp_path / "s.json")
    with bc.accelerate(policy, bc.Schedule.load(tmp_path / "s.json"), engine="patched") as fast:
        assert fast.stats().notes == ()
    assert json.loads((tmp_path / "s.json").read_text())["fingerprint"]["weights"] == weights_hash(policy)

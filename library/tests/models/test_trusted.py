"""A policy of this package's own classes that somebody changed before it is accelerated: noticed, or honoured."""

import types
from dataclasses import replace

import pytest
import torch

import blockcache as bc
from blockcache.errors import BlockcacheError, PolicyError
from blockcache.models.loading import load_policy
from blockcache.models.policy_files import shipped_policies
from blockcache.models.registry import port_of
from dit_policies import tiny_dit, tiny_observation
from image_policies import image_policy, observed
from rdt_policies import rdt_observation, rdt_policy


def _more(value):
    return tuple(map(_more, value)) if isinstance(value, tuple) else value + 0.5 if value.is_floating_point() else value


def _on_instance(name):
    def change(policy):
        own = getattr(policy, name)
        setattr(policy, name, lambda *args, **kwargs: _more(own(*args, **kwargs)))

    return change


def _checked(policy):
    own = policy.check
    policy.check = lambda obs: {name: value * 0.5 for name, value in own(obs).items()}


def _entry(policy):
    own = policy.predict_action

    def predict_action(obs, *, generator=None, noise=None):
        return {name: value + 1 for name, value in own(obs, generator=generator, noise=noise).items()}

    policy.predict_action = predict_action


def _normalize(policy):
    field = policy.normalizer.action
    field.unnormalize = types.MethodType(lambda self, value: value * 3, field)


def _field(policy):
    """The normaliser of another project, under the same names."""
    field = policy.normalizer.action
    field.__class__ = type("Field", (type(field),), {"unnormalize": lambda self, value: value * 3, "__module__": "x"})


def _shadowed(policy):
    field = policy.normalizer.action
    vars(field)["scale"] = 3 * field.scale


def _settings(policy):
    kind = type(policy.config)
    executed = property(lambda config: slice(0, config.n_action_steps))
    object.__setattr__(policy.config, "__class__", type("Config", (kind,), {"executed": executed, "__module__": "x"}))


ANY = {
    **{name: _on_instance(name) for name in ("encode", "denoiser_output", "constrain", "actions")},
    "check": _checked,
    "predict_action": _entry,
    "config": _settings,
}
NORMALISED = {"unnormalize": _normalize, "a field's class": _field, "a shadowed buffer": _shadowed}
FAMILIES = {
    "dp-t": (lambda make: make(), lambda observe: observe(), ANY | NORMALISED),
    "cameras": (lambda make: image_policy(), lambda observe: observed(), ANY | NORMALISED),
    "dit": (lambda make: tiny_dit(), lambda observe: tiny_observation(2), ANY | NORMALISED),
    "rdt": (lambda make: rdt_policy(), lambda observe: rdt_observation(2), ANY),
}


@pytest.mark.parametrize(
    ("family", "edit"), [(family, edit) for family, (_, _, edits) in FAMILIES.items() for edit in edits]
)
@pytest.mark.parametrize("engine", ["loop", "onnx", "auto"])
def test_what_was_changed_beforehand_is_noticed_or_honoured(family, edit, engine, make_policy, observe):
    make, seen, edits = FAMILIES[family]
    policy, obs = make(make_policy), seen(observe)
    before = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]
    edits[edit](policy)
    changed = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]
    assert (
        changed.shape != before.shape or (changed - before).abs().max() > 1e-2 or (family == "rdt" and edit == "config")
    )
    assert not port_of(policy).trusted
    try:
        with bc.accelerate(policy, None, engine=engine):
            found = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]
    except BlockcacheError:
        assert engine != "auto" or edit == "predict_action"  # auto runs the policy as it is, where its entry is its own
    else:
        assert torch.allclose(found, changed, atol=1e-4)


@pytest.mark.parametrize("edit", ["encode", "unnormalize"])
def test_what_a_copy_or_a_file_would_lose_is_refused(edit, make_policy, tmp_path):
    policy = make_policy()
    (ANY | NORMALISED)[edit](policy)
    few = replace(policy.sampler, num_inference_steps=2)
    if edit == "encode":
        with pytest.raises(PolicyError, match=r"policy\.encode was replaced .* lost by a copy with other settings"):
            policy.with_sampler(few)
    else:  # the copy shares the normaliser
        assert not port_of(policy.with_sampler(few)).trusted
    with pytest.raises(PolicyError, match=rf"policy\.\S*{edit} was replaced .* lost by saving it; delete it, or make"):
        bc.save_policy(policy, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()
    with bc.accelerate(untouched := make_policy(), None, engine="loop"):  # what this package puts there is known
        bc.save_policy(untouched, tmp_path / "policy")
        untouched.with_sampler(replace(untouched.sampler, num_inference_steps=2))


def test_a_method_that_is_replaced_in_the_class_is_noticed(make_policy, monkeypatch):
    policy = make_policy()
    assert port_of(policy).trusted
    monkeypatch.setattr(type(policy), "encode", lambda self, observed: observed["obs"])
    assert not port_of(policy).trusted


@pytest.mark.parametrize("engine", ["loop", "onnx"])
def test_a_hook_of_all_modules_is_noticed(make_policy, engine):
    policy = make_policy()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, found: found * 1.2 if isinstance(module, torch.nn.Linear) else None
    )
    try:
        with pytest.raises(BlockcacheError, match="its actions differ from the engine's"):
            bc.accelerate(policy, None, engine=engine)
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["pusht", "pusht/tuned"])
def test_what_nobody_changed_is_trusted(name):
    assert name in shipped_policies()
    policy = load_policy(name)
    assert port_of(policy).trusted
    with bc.accelerate(policy, None, engine="loop"):
        assert port_of(policy).trusted  # what this package itself puts there is known

"""Random edits of a policy before and after it is accelerated: engines honour or refuse them, `verify()` notices them."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockcache as bc
import foreign_policy
from blockcache.errors import BlockcacheError, StaleError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy

from .interrupts import CONFIG
from .outcome import Outcome

TOLERANCE = 1e-2


def _weights(policy: Any, chance: random.Random) -> None:
    weight = chance.choice([item for item in policy.parameters() if item.numel()])
    weight.data.view(-1)[chance.randrange(weight.numel())] += chance.choice([0.5, 3.0])


def _action_unit(policy: Any, chance: random.Random) -> None:
    tensors = policy.normalizer.state_dict()
    tensors[chance.choice([name for name in tensors if ".action." in name])].add_(0.7)


def _hook(policy: Any, chance: random.Random) -> None:
    module = chance.choice([policy.model.head, policy.model.ln_f, policy.model])
    module.register_forward_hook(lambda module, args, output: output + 0.3)


def _forward(policy: Any, chance: random.Random) -> None:
    module = chance.choice([policy.model.head, policy.model.ln_f, policy.model.input_emb])
    own = module.forward
    vars(module)["forward"] = lambda *args: own(*args) * 1.2


def _module(policy: Any, chance: random.Random) -> None:
    old = policy.model.head
    policy.model.head = nn.Linear(old.in_features, old.out_features)


def _eps(policy: Any, chance: random.Random) -> None:
    policy.model.ln_f.eps = 0.5


def _entry(policy: Any, chance: random.Random) -> None:
    """In a subclass, since an instance's own entry cannot be patched on top of."""
    kind = type(policy)

    def predict_action(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.predict_action(self, *args, **kwargs)
        return {name: value.cumsum(dim=1) for name, value in found.items()}

    policy.__class__ = type("Other", (kind,), {"predict_action": predict_action})


def _method(policy: Any, chance: random.Random) -> None:
    """One of the methods that `predict_action` is made of, on the instance."""
    if isinstance(policy, foreign_policy.Policy):
        own = policy.scaled
        policy.scaled = lambda name: tuple(item * 1.3 for item in own(name))
        return
    name = chance.choice(["encode", "denoiser_output", "actions", "constrain", "check"])
    method = getattr(policy, name)

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        if isinstance(found, dict):
            return {key: value + 0.4 for key, value in found.items()}
        return found + 0.4 if isinstance(found, torch.Tensor) else found

    vars(policy)[name] = types.MethodType(other, policy)


def _note(policy: Any, chance: random.Random) -> None:
    """Changes nothing."""
    policy.remark = "seen"


def _steps(policy: Any, chance: random.Random) -> None:
    if isinstance(policy, foreign_policy.Policy):
        policy.num_inference_steps = 4
    else:
        policy.config = policy.with_sampler(type(policy.sampler)(num_inference_steps=2)).config


EDITS: list[Callable[[Any, random.Random], None]] = [
    _weights, _action_unit, _hook, _forward, _module, _eps, _entry, _method, _note, _steps,
]  # fmt: skip


def check(seed: int, case: int, directory: Path) -> Outcome:
    """One edit, before or after, in one engine."""
    chance = random.Random(f"{seed}/edits/{case}")
    kind, engine = chance.choice(["own", "foreign"]), chance.choice(["loop", "onnx", "patched"])
    edit, when = chance.choice(EDITS), chance.choice(["before", "after"])
    about = f"{kind}, {engine}, {edit.__name__} {when}"
    with torch.random.fork_rng():
        torch.manual_seed(chance.randrange(2**31))
        policy = foreign_policy.Policy() if kind == "foreign" else DiffusionTransformerPolicy.random(CONFIG, seed=case)
        finding, tag = before(policy, engine, edit, chance) if when == "before" else after(policy, engine, edit, chance)
    return Outcome(case, about, finding, f"{when} {tag}")


def act(policy: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return policy.predict_action({"obs": torch.linspace(-0.9, 0.8, 8).reshape(1, 2, 4)})["action"]


def before(policy: Any, engine: str, edit: Any, chance: random.Random) -> tuple[str | None, str]:
    bc.accelerate(policy, None, engine, threads=1).disable()  # so that an export of the policy as it was is kept
    edit(policy, chance)
    expected = act(policy)
    try:
        fast = bc.accelerate(policy, None, engine, threads=1)
    except BlockcacheError:
        return None, "refused"
    with fast:
        if not close(act(policy), expected):
            return "the edit is not honoured", ""
        try:
            fast.verify()
        except StaleError as error:
            return f"verify() refuses what was just made: {error}", ""
    return None if close(act(policy), expected) else "other actions afterwards", "honoured"


def after(policy: Any, engine: str, edit: Any, chance: random.Random) -> tuple[str | None, str]:
    fast = bc.accelerate(policy, None, engine, threads=1)
    try:
        accelerated = act(policy)
        edit(policy, chance)
        noticed = False
        try:
            fast.verify()
        except StaleError:
            noticed = True
        if engine == "patched":  # runs the policy as it is, and says so at the next call where it cannot
            try:
                accelerated = act(policy)
            except BlockcacheError:
                noticed = True
    finally:
        fast.disable()
    if noticed or close(act(policy), accelerated):
        return None, "noticed" if noticed else "the same actions"
    return "nobody noticed", ""


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool(((found - expected).abs() <= TOLERANCE).all())

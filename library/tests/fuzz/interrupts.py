"""Ctrl-C at a random line within `accelerate` or `disable`: no trace may be left, and the policy must act as before."""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import blockcache as bc
import foreign_policy
from blockcache.attach.patching import Replacement
from blockcache.errors import PolicyError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import DDIM

from .outcome import Outcome

CONFIG = DPTConfig(
    obs_dim=4,
    action_dim=3,
    horizon=6,
    n_obs_steps=2,
    n_action_steps=3,
    n_layer=1,
    n_head=1,
    n_emb=8,
    sampler=DDIM(num_inference_steps=3),
)
_lines: dict[tuple[str, str, str], int] = {}  # that a verb goes through, by policy, engine and verb


class Interrupter:
    """Raises KeyboardInterrupt at one of the lines of blockcache that run inside, or at none and counts them.

    The exit of a `with` is left out: no signal handler runs between its body and the release of a lock.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.place = at, 0, ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if "/blockcache" in frame.f_code.co_filename and "/src/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(name, number).lstrip().startswith("with "):
            self.count += 1
            if self.count - 1 == self.at:
                self.place = f"{Path(name).name}:{number}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def check(seed: int, case: int, directory: Path) -> Outcome:
    """One interrupt, in one policy, engine and verb."""
    chance = random.Random(f"{seed}/interrupts/{case}")
    kind, engine = chance.choice(["own", "foreign"]), chance.choice(["patched", "loop", "onnx"])
    verb = chance.choice(["accelerate", "disable"])
    policy = foreign_policy.Policy() if kind == "foreign" else DiffusionTransformerPolicy.random(CONFIG)
    before, expected = held(policy), act(policy)
    fast: bc.Acceleration | None = None

    def run() -> None:
        nonlocal fast
        fast = bc.accelerate(policy, None, engine, threads=1)

    def stop() -> None:
        fast.disable()

    if (kind, engine, verb) not in _lines:
        run()  # an export is made once and then kept
        stop()
        for name, function in (("accelerate", run), ("disable", stop)):
            with Interrupter(None) as counter:
                function()
            _lines[kind, engine, name] = counter.count
    at = chance.randrange(_lines[kind, engine, verb])
    if verb == "disable":
        run()
    with Interrupter(at) as interrupter, contextlib.suppress(KeyboardInterrupt):
        run() if verb == "accelerate" else stop()
    about = f"{kind}, {engine}, {verb} at line {at}, {interrupter.place or 'not reached'}"
    if verb == "disable" and fast.enabled:
        if act(policy) is None or bc.handle_of(policy) is not fast:
            return Outcome(case, about, "enabled in part")
        stop()
    if verb == "accelerate" and not interrupter.place:
        stop()
    return Outcome(case, about, trace(policy, before, expected), interrupter.place and f"{engine} {verb}")


def act(policy: Any) -> Any:
    torch.manual_seed(0)
    obs = torch.full((1, 2, 4), 0.3)
    return policy.predict_action({"obs": obs})["action"]


def held(policy: Any) -> dict[str, Any]:
    """Everything that the policy and its modules hold, by name."""
    parts = {"": policy, **dict(policy.named_modules())}
    found = {f"{name}.{key}": value for name, part in parts.items() for key, value in vars(part).items()}
    hooks = {f"{name} hooks": len(part._forward_hooks) + len(part._forward_pre_hooks) for name, part in parts.items()}
    return {**{name: id(value) for name, value in found.items() if not name.endswith("_scheduler")}, **hooks}


def trace(policy: Any, before: dict[str, Any], expected: Any) -> str | None:
    """What is left of an acceleration; None if nothing is."""
    for part in policy.modules():
        if any(isinstance(value, Replacement) for value in vars(part).values()):
            return f"{type(part).__name__} is still patched"
    if held(policy) != before:
        return f"other attributes: {sorted(set(held(policy).items()) ^ set(before.items()))[:3]}"
    try:
        bc.handle_of(policy)
        return "a handle is left"
    except PolicyError:
        pass
    if not torch.equal(act(policy), expected):
        return "other actions"
    with bc.accelerate(policy, None, "patched"):  # no lock is held either
        pass
    return None if torch.equal(act(policy), expected) else "other actions after another acceleration"

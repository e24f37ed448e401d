"""Policies as code: random bodies of `predict_action` over a helper module, with memories, slices and squeezes.

The promise: an engine acts as the policy's own code does, call by call, or it is refused. What the code is made of differs
from the public code by far more than the comparison tolerates, or not at all.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

import blockcache as bc
from blockcache.errors import BlockcacheError, EngineError

from .outcome import Outcome

TOLERANCE = 1e-2  # of actions of order 1; the comparison refuses 2e-3
HISTORY = {
    "first": "obs[:, : self.n_obs_steps]",
    "last": "obs[:, -self.n_obs_steps :]",
    "window": "helper.window(obs, self.n_obs_steps)",
    "exact": "helper.exact(obs, self.n_obs_steps)",
}
"""Which moments of a longer history the policy looks at."""
SEEN = {
    "as it is": "seen",
    "of a batch of one": "helper.alone(seen)",
    "remembered": "self.blend('seen', seen)",
    "shifted": "seen + helper.SHIFT",
}
"""What else it does with them."""
START = {"drawn": "x", "from the last chunk": "self.blend('start', x)", "scaled": "x * helper.GAIN"}
CHUNK = {
    "as it is": "chunk",
    "summed up": "chunk.cumsum(dim=1)",
    "blended": "self.blend('chunk', chunk)",
    "squeezed": "chunk.squeeze(0)",
    "first of the batch": "chunk[:1].expand_as(chunk)",
    "settled": "helper.settled(chunk)",
    "counted": "chunk + 0.3 * self.count()",
}
ANSWER = {
    "both": '{"action": action, "action_pred": chunk}',
    "actions alone": '{"action": action}',
    "another chunk": '{"action": action, "action_pred": 2 * chunk}',
    "more": '{"action": action, "action_pred": chunk, "value": chunk.mean()}',
}
MODULE = """
import foreign_policy
import torch
import helper_{name} as helper


class Policy(foreign_policy.Policy):
    def __init__(self):
        super().__init__()
        self.memory = {memory}
        self.calls = 0

    def blend(self, name, value):
        before = self.memory.get(name)
        self.memory[name] = value
        return value if before is None or before.shape != value.shape else 0.5 * (value + before)

    def count(self):
        self.calls += 1
        return self.calls > 1

    @torch.no_grad()
    def predict_action(self, obs_dict):
        obs = obs_dict["obs"]
        scale, offset = self.scaled("obs")
        seen = {history} * scale + offset
        seen = {seen}
        x = torch.randn(len(obs), self.horizon, self.action_dim, dtype=obs.dtype)
        x = {start}
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.model(x, t, seen), t, x).prev_sample
        scale, offset = self.scaled("action")
        chunk = (x - offset) / scale
        chunk = {chunk}
        start = self.n_obs_steps - 1
        action = chunk[..., start : start + self.n_action_steps, :]
        return {answer}
"""
HELPER = """
import json
import os
from pathlib import Path

SHIFT = float(os.environ.get("FUZZ_SHIFT", 0))
GAIN = json.loads(Path({data!r}).read_text())


def window(obs, moments):
    return obs[:, {window}]


def exact(obs, moments):
    assert obs.shape[1] == moments
    return obs


def alone(seen):
    return seen{alone} if len(seen) == 1 else seen


def settled(chunk):
    return chunk{settled}
"""


def written(chance: random.Random, name: str, directory: Path, parts: dict[str, str]) -> str:
    """A policy's module and its helper; what they are made of."""
    data = directory / f"gain_{name}.json"
    data.write_text(chance.choice(["1.0", "1.0", "1.5"]))
    windows, alone, settled = ["-moments:", ":moments"], ["", " + 0.4"], ["", " * 1.3", ".flip(1)"]
    inner = {"window": chance.choice(windows), "alone": chance.choice(alone), "settled": chance.choice(settled)}
    os.environ["FUZZ_SHIFT"] = shift = chance.choice(["0", "0", "0.7"])
    (directory / f"helper_{name}.py").write_text(HELPER.format(data=str(data), **inner))
    (directory / f"policy_{name}.py").write_text(MODULE.format(name=name, **parts))
    return f"{inner}, shift {shift}, gain {data.read_text()}"


def loaded(name: str, directory: Path) -> Any:
    """The policy, as a new process would read its code."""
    for kind in ("helper", "policy"):
        spec = importlib.util.spec_from_file_location(f"{kind}_{name}", directory / f"{kind}_{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__cached__"] = None
        sys.modules[f"{kind}_{name}"] = module
        code = compile((directory / f"{kind}_{name}.py").read_text(), str(spec.origin), "exec")
        exec(code, module.__dict__)
    return module.Policy()


def check(seed: int, case: int, directory: Path) -> Outcome:
    """One policy, in one engine; then again with another helper, as in a process that starts after an edit."""
    chance = random.Random(f"{seed}/code/{case}")
    name, engine = f"{os.getpid()}_{case}", chance.choice(["loop", "onnx", "auto"])
    picked = {what: chance.choice([*kinds][:1] * 8 + [*kinds]) for what, kinds in PARTS.items()}
    parts = {what: PARTS[what][kind] for what, kind in picked.items()} | {"memory": "{}"}
    about, tags = f"{engine}, {picked}", []
    for state in ("written", "edited"):
        about = f"{about}; {state}: {written(chance, name, directory, parts)}"
        policy, twin = loaded(name, directory), loaded(name, directory)
        try:
            fast = bc.accelerate(policy, None, engine, threads=1)
        except EngineError:
            tags.append("refused")
            continue
        with fast:
            tags.append(fast.engine if engine == "auto" else "accelerated")
            finding = differs(policy, twin, chance)
            if finding is None and fast.engine != "patched":
                try:
                    fast.verify()
                except EngineError as error:
                    finding = f"verify() refuses what accelerate took: {error}"
        if finding is not None:
            return Outcome(case, about, f"{state}: {finding}")
    return Outcome(case, about, tag=tags[0])


PARTS = {"history": HISTORY, "seen": SEEN, "start": START, "chunk": CHUNK, "answer": ANSWER}


def differs(policy: Any, twin: Any, chance: random.Random) -> str | None:
    """How some calls in a row come out differently; what either refuses ends them, if the engine answers nothing else."""
    for call in range(4):
        batch, moments = chance.choice([1, 1, 2, 3]), policy.n_obs_steps + chance.choice([0, 0, 1, 2])
        obs = {"obs": torch.randn(batch, moments, policy.obs_dim)}
        torch.manual_seed(call)
        try:
            expected = twin.predict_action(obs)
        except Exception as error:  # whatever the policy's code raises
            expected = error
        torch.manual_seed(call)
        try:
            found = policy.predict_action(obs)
        except (BlockcacheError, AssertionError):
            return None
        if isinstance(expected, Exception):
            return f"call {call}, batch {batch}, {moments} moments: an answer where the policy raises {expected!r}"
        for name, value in expected.items():
            if name not in found or found[name].shape != value.shape or (found[name] - value).abs().max() > TOLERANCE:
                return f"call {call}, batch {batch}, {moments} moments: another {name}"
    return None

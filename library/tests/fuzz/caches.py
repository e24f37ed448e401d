"""Damage to the cache of converted checkpoints and exports: policies load and act as if nothing were kept."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockcache as bc
import public_policy
from blockcache.models.dpt.public import load_checkpoint

from .outcome import Outcome

NAMES, KINDS = ("a", "b", "c"), ("policy", "onnx")
_known: dict[Path, dict[str, tuple[dict[str, Tensor], Tensor]]] = {}  # by directory and checkpoint


def check(seed: int, case: int, directory: Path) -> Outcome:
    """Damage to one entry or two, after which every checkpoint must load, and its export act, as itself."""
    chance = random.Random(f"{seed}/caches/{case}")
    place = directory / f"caches-{os.getpid()}"  # processes share a directory
    os.environ["BLOCKCACHE_CACHE"] = str(place / "cache")
    if place not in _known:
        place.mkdir()
        _known[place] = {name: _written(place / f"{name}.ckpt", number) for number, name in enumerate(NAMES)}
    kind = chance.choice(KINDS)
    entries = sorted((place / "cache").glob(f"*.{kind}"))
    harm = chance.choice([_flip, _cut, _lose, _exchange, _exchange_files, _copy])
    about = f"{kind}: {harm.__name__[1:]} {harm(entries, chance)}"
    for name in chance.sample(NAMES, len(NAMES)):
        weights, action = _known[place][name]
        policy = load_checkpoint(place / f"{name}.ckpt")
        found = policy.state_dict()
        if not all(torch.equal(value, found[key]) for key, value in weights.items()):
            return Outcome(case, about, f"{name}.ckpt loads with other weights")
        if kind == "onnx" and not torch.equal(_action(policy), action):
            return Outcome(case, about, f"the export of {name}.ckpt acts otherwise")
    return Outcome(case, about, tag=f"{kind} {harm.__name__[1:]}")


def _written(path: Path, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint: its weights, and an action."""
    public_policy.write_checkpoint(path, public_policy.config(n_layer=1, n_emb=16, n_head=1, steps=3), seed=number)
    policy = load_checkpoint(path)
    return {name: value.clone() for name, value in policy.state_dict().items()}, _action(policy)


def _action(policy: Any) -> Tensor:
    obs = torch.ones(1, policy.n_obs_steps, policy.obs_dim)
    with bc.accelerate(policy, engine="onnx", threads=1) as fast:
        return fast.predict_action(obs, generator=torch.Generator().manual_seed(0))["action"]


def _file(entries: list[Path], chance: random.Random) -> Path:
    entry = chance.choice(entries)
    return chance.choice(sorted(entry.iterdir())) if entry.is_dir() else entry


def _flip(entries: list[Path], chance: random.Random) -> str:
    file = _file(entries, chance)
    data = bytearray(file.read_bytes())
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} in {file.name}"


def _cut(entries: list[Path], chance: random.Random) -> str:
    file = _file(entries, chance)
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])
    return file.name


def _lose(entries: list[Path], chance: random.Random) -> str:
    file = _file(entries, chance)
    file.unlink()
    return file.name


def _exchange(entries: list[Path], chance: random.Random) -> str:
    first, second = chance.sample(entries, 2)
    return _swap(first, second)


def _exchange_files(entries: list[Path], chance: random.Random) -> str:
    first, second = chance.sample(entries, 2)
    if first.is_file():
        return _swap(first, second)
    names = chance.sample(sorted(file.name for file in first.iterdir()), chance.randint(1, 2))
    return ", ".join(_swap(first / name, second / name) for name in names)


def _copy(entries: list[Path], chance: random.Random) -> str:
    first, second = chance.sample(entries, 2)
    if first.is_file():
        shutil.copy(first, second)
    else:
        shutil.rmtree(second)
        shutil.copytree(first, second)
    return "an entry over another"


def _swap(first: Path, second: Path) -> str:
    aside = first.parent / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return first.name

"""Flipped bits, cut files and exchanged entries in the cache of converted checkpoints: they load as if nothing were kept."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import torch

import public_policy
from blockcache.models.dpt.public import load_checkpoint

from .outcome import Outcome

NAMES = ("a", "b", "c")
_weights: dict[Path, dict[str, dict[str, torch.Tensor]]] = {}  # by directory and checkpoint


def check(seed: int, case: int, directory: Path) -> Outcome:
    """Damage to one entry or two, after which every checkpoint must load as itself."""
    chance = random.Random(f"{seed}/caches/{case}")
    place = directory / f"caches-{os.getpid()}"  # processes share a directory
    os.environ["BLOCKCACHE_CACHE"] = str(place / "cache")
    if place not in _weights:
        place.mkdir()
        _weights[place] = {name: _converted(place, number) for number, name in enumerate(NAMES)}
    entries = sorted((place / "cache").glob("*.policy"))
    harm = chance.choice([_flip, _cut, _lose, _exchange, _exchange_files, _copy])
    about = f"{harm.__name__[1:]} {harm(entries, chance)}"
    for name in chance.sample(NAMES, len(NAMES)):
        found = load_checkpoint(place / f"{name}.ckpt").state_dict()
        if not all(torch.equal(value, found[key]) for key, value in _weights[place][name].items()):
            return Outcome(case, about, f"{name}.ckpt loads with other weights")
    return Outcome(case, about, tag=harm.__name__[1:])


def _converted(place: Path, number: int) -> dict[str, torch.Tensor]:
    path = place / f"{NAMES[number]}.ckpt"
    public_policy.write_checkpoint(path, public_policy.config(n_layer=1, n_emb=16, n_head=1, steps=3), seed=number)
    return {name: value.clone() for name, value in load_checkpoint(path).state_dict().items()}


def _file(entries: list[Path], chance: random.Random) -> Path:
    return chance.choice(sorted(chance.choice(entries).iterdir()))


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
    names = chance.sample(sorted(file.name for file in first.iterdir()), chance.randint(1, 2))
    return ", ".join(_swap(first / name, second / name) for name in names)


def _copy(entries: list[Path], chance: random.Random) -> str:
    first, second = chance.sample(entries, 2)
    shutil.rmtree(second)
    shutil.copytree(first, second)
    return "an entry over another"


def _swap(first: Path, second: Path) -> str:
    aside = first.parent / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return first.name

"""Messages of clients, as a server takes them: sound ones, ways to damage them, and what must hold whatever comes."""

from __future__ import annotations

import functools
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from blockcache_runtime.errors import BlockcacheError
from blockcache_runtime.serve.protocols import PROTOCOLS, Openpi, Protocol, Question, Served
from blockcache_runtime.serve.wire import pack
from served_toy import ACTIONS, ToyPolicy

from .mutations import Mutated, bytewise
from .running import Sample

DTYPES = (
    "<f4",
    ">f8",
    "|u1",
    "|b1",
    "|O",
    "O",
    "<c8",
    "<c16",
    "|V8",
    "<U1",
    "|S4",
    "<M8[s]",
    "<f16",
    "f4,f4",
    "",
    "x",
    4,
)
SHAPES = (
    [],
    [0],
    [2],
    [-1],
    [2, 0],
    [2**31],
    [2**62, 4],
    [1] * 40,
    [2.0],
    [None],
    "2",
    None,
    {"a": 1},
    [2, 2],
    [4, 5, 3],
)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, -(2**63), 0.5, float("nan"), float("inf"), "", "x" * 3000, b"", b"\0" * 3000, [], {}, [[[]]],
    [0] * 5000, {"x": {"x": {}}}, msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2), "observation", "hello", "reset",
)  # fmt: skip


# -- sound messages


def png(width: int, height: int, rows: int) -> bytes:
    """A picture whose header says one size and whose data may have another."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes((1 + 3 * 5) * rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def observation() -> dict[str, Any]:
    return {"state": np.array([1, 2], np.float32), "image": np.zeros((4, 5, 3), np.uint8), "prompt": "push"}


def make_openpi(place: Path) -> list[Path]:
    words = {"reset": True, "seed": 3, "observe_only": False}
    messages = {"plain": observation(), "words": {**observation(), **words}}
    return _written(place, {name: pack(value, bytes_keys=True) for name, value in messages.items()})


def make_vla_eval(place: Path) -> list[Path]:
    picture = {"__image__": True, "format": "png", "data": png(5, 4, 4), "shape": [4, 5, 3]}
    payloads = {
        "hello": {"protocol_version": 1, "harness_version": "0.8.0"},
        "episode_start": {"task": {"name": "x", "seed": 1}, "mode": "live"},
        "observation": {**observation(), "image": picture},
    }
    return _written(place, {kind: _message(kind, payload, 7) for kind, payload in payloads.items()})


def _message(kind: str, payload: dict[str, Any], seq: int) -> bytes:
    return pack({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}, bytes_keys=False)


def _written(place: Path, messages: dict[str, bytes]) -> list[Path]:
    for name, data in messages.items():
        (place / f"{name}.msgpack").write_bytes(data)
    return [place / f"{name}.msgpack" for name in messages]


# -- what must hold


def use(protocol: str, path: Path) -> None:
    """A message is answered, or refused with a sentence that can be sent; then the next sound one has the right history."""
    connection = PROTOCOLS[protocol](Served(_policy(), {}, ACTIONS))
    _ask(connection, 1.0, 1)
    refused: BlockcacheError | None = None
    try:
        found = connection.receive(path.read_bytes())
        if isinstance(found, Question):
            connection.answer(_policy().predict([found.observation], [found.generator])[0], 1.0)
    except BlockcacheError as error:
        refused = error
    if refused is None:
        return
    assert connection.refusal(str(refused)), "a refusal that says nothing"
    states = _ask(connection, 2.0, 2**62)
    assert states == [1, 2], f"what was refused changed the history: {states}"
    raise refused


def _ask(connection: Protocol, value: float, seq: int) -> list[float]:
    seen = {**observation(), "state": np.array([value, 0], np.float32)}
    data = pack(seen, bytes_keys=True) if isinstance(connection, Openpi) else _message("observation", seen, seq)
    found = connection.receive(data)
    assert isinstance(found, Question)
    states: list[float] = found.observation["state"][0, :, 0].tolist()
    return states


@functools.cache
def _policy() -> ToyPolicy:
    return ToyPolicy(camera=True)


FRAMES = {
    "openpi message": Sample(make_openpi, functools.partial(use, "openpi")),
    "vla-eval message": Sample(make_vla_eval, functools.partial(use, "vla-eval")),
}


# -- damage


def message_file(data: bytes, chance: random.Random) -> Mutated:
    way = chance.choice(["bytes", "value", "value", "array", "array", "picture", "lengths", "deep", "names"])
    if way == "bytes":
        return bytewise(data, chance)
    if way == "deep":
        depth, part = chance.choice([5, 100, 600, 50_000]), chance.choice([b"\x91", b"\x81\xa1a", b"\x81\x91"])
        return b"\x81\xa5state" + part * depth + b"\x00", f"{depth} levels of {part!r}"
    if way == "lengths":
        head = chance.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xdc", b"\xde", b"\xc9"])
        count = chance.choice([2**32 - 1, 2**31, 2**20, 70_000, 5_000])
        tail = chance.choice([b"", b"\x90", b"\x80", b"\xc0", b"\xa0"]) * min(count, 2**18)
        return b"\x81\xa5state" + head + struct.pack(">I", count) + tail, f"{head!r} that says {count:,}"
    tree = msgpack.unpackb(data, strict_map_key=False)
    holders = list(_maps(tree))
    if way in ("array", "picture"):
        marks = (b"__ndarray__", "__ndarray__", "__image__")
        holders = [item for item in holders if any(mark in item for mark in marks)] or holders
    holder = chance.choice(holders)
    keys = list(holder)
    if not keys:
        return bytewise(data, chance)
    if way == "array":
        key = chance.choice(keys)
        name = key.decode() if isinstance(key, bytes) else key
        holder[key] = chance.choice({"dtype": DTYPES, "shape": SHAPES}.get(name, ODD))
    elif way == "picture":
        width, height = (chance.choice([0, 1, 4, 5, 300, 20_000, 2**31 - 1]) for _ in range(2))
        made = png(width, height, chance.choice([0, 4, 60_000]))
        holder[keys[0]] = {"__image__": True, "format": "png", "data": bytewise(made, chance)[0], "shape": [4, 5, 3]}
        if chance.random() < 0.5:
            holder.update({"__image__": True, "format": chance.choice(["png", "jpeg", "raw"]), "data": made})
    elif way == "names":
        key = chance.choice(keys)
        holder[chance.choice(["state", b"state", "image", "reset", "seed", "type", "x" * 500])] = holder.pop(key)
    else:
        holder[chance.choice(keys)] = chance.choice(ODD)
    return msgpack.packb(tree), f"{way} in {sorted(map(str, keys))}"[:200]


def _maps(tree: Any) -> Any:
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _maps(value)


def picture_of(width: int, height: int) -> bytes:
    """A vla-eval observation with such a picture."""
    picture = {"__image__": True, "format": "png", "data": png(width, height, 4), "shape": [4, 5, 3]}
    return _message("observation", {**observation(), "image": picture}, 7)


def many_empty_lists() -> bytes:
    """Four megabytes that would become four hundred."""
    return b"\x81\xa5state\xdd" + struct.pack(">I", 2**22) + b"\x90" * 2**22

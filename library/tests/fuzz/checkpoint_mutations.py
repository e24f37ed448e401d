"""Ways to damage a checkpoint of torch.save: its bytes, its zip entries, the program of its pickle, or a call put into it.

After the pickle or an entry was changed, the zip is written anew, so that its checksums fit and the damage is really read.
"""

from __future__ import annotations

import functools
import io
import pickletools
import random
import stat
import struct
import warnings
import zipfile
from typing import Any

from .mutations import Mutated, bytewise

CALLS = (
    ("os", "system", "touch ran"),
    ("posix", "system", "touch ran"),
    ("__builtin__", "open", "ran"),
    ("io", "open", "ran"),
    ("importlib", "import_module", "this"),
    ("__builtin__", "eval", "open('ran', 'w')"),
    ("__builtin__", "getattr", "x"),
    ("operator", "attrgetter", "x"),
    ("torch", "load", "x"),
    ("torch._utils", "_rebuild_tensor_v2", "x"),
    ("collections", "OrderedDict", "x"),
    ("omegaconf.dictconfig", "DictConfig", "x"),
    ("numpy.core.multiarray", "scalar", "x"),
)
ODD_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 65_535, 2**31 - 1, -(2**31))


def checkpoint_file(data: bytes, chance: random.Random) -> Mutated:
    if chance.random() < 0.15:
        return bytewise(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries: list[Any] = [(name, file.read(name)) for name in file.namelist()]
    way = chance.choice(["operations", "operations", "operations", "text", "text", "call", "call", "bytes", "entries"])
    if way == "entries":
        note = _entries(entries, chance)
    else:
        place = next(number for number, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
        name, pickled = entries[place]
        change = {"operations": _operations, "text": _text, "call": _call, "bytes": bytewise}[way]
        pickled, note = change(pickled, chance)
        entries[place] = (name, pickled)
    return _zipped(entries, zipfile.ZIP_DEFLATED if note.endswith("packed") else zipfile.ZIP_STORED), f"{way}: {note}"


def _zipped(entries: list[Any], compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that is there twice
        for name, data in entries:
            file.writestr(name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def _entries(entries: list[Any], chance: random.Random) -> str:
    place = chance.randrange(len(entries))
    name, data = entries[place]
    ways = ["gone", "twice", "renamed", "link", "shorter", "longer", "other", "bytes", "packed", "bomb, packed"]
    way = chance.choice(ways)
    if way == "gone":
        del entries[place]
    elif way == "twice":
        entries.append((name, data))
    elif way == "renamed":
        entries[place] = (
            chance.choice(["/etc/x", "../x", "x", "a/data/0", "archive/data.pkl", "a\\b", name + "0"]),
            data,
        )
    elif way == "link":
        info = zipfile.ZipInfo(name)
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        entries[place] = (info, data)
    elif way in ("shorter", "longer"):
        entries[place] = (name, data[:-1] if way == "shorter" else data + b"\0")
    elif way == "other":
        entries[place] = (name, entries[chance.randrange(len(entries))][1])
    elif way == "bytes":
        entries[place] = (name, bytewise(data, chance)[0] if data else b"x")
    elif way == "bomb, packed":
        entries[place] = (name, bytes(5_000_000))
    return f"{name}: {way}"


@functools.lru_cache(maxsize=4)
def _pieces(pickled: bytes) -> list[tuple[Any, Any, bytes]]:
    """Operation, argument and bytes of each part of the program."""
    found = [(code, argument, place) for code, argument, place in pickletools.genops(pickled)]
    ends = [place for _, _, place in found[1:]] + [len(pickled)]
    return [(code, argument, pickled[start:end]) for (code, argument, start), end in zip(found, ends, strict=True)]


def _operations(pickled: bytes, chance: random.Random) -> Mutated:
    """Operations left out, doubled, exchanged, or with another number."""
    pieces = [data for _, _, data in _pieces(pickled)]
    numbers = [
        place for place, (code, _, _) in enumerate(_pieces(pickled)) if code.name in ("BININT1", "BININT2", "BININT")
    ]
    place, other = (chance.randrange(1, len(pieces) - 1) for _ in range(2))
    way = chance.choice(["out", "twice", "exchanged", "replaced", *["number"] * 8, chance.choice(["many", "deep"])])
    if way == "out":
        del pieces[place]
    elif way == "twice":
        pieces.insert(place, pieces[place])
    elif way == "exchanged":
        pieces[place], pieces[other] = pieces[other], pieces[place]
    elif way == "replaced":
        pieces[place] = pieces[other]
    elif way == "number":
        place = chance.choice(numbers)
        pieces[place] = b"J" + struct.pack("<i", chance.choice([*ODD_NUMBERS, chance.randrange(100)]))
    elif way == "many":
        pieces.insert(place, chance.choice([b"N0", b"]0", b"}0", b"N(", b")0"]) * _amount(chance, 10, 1_000))
    else:
        depth = _amount(chance, 50, 5_000)
        pieces.insert(place, chance.choice([b"]" * depth + b"a" * (depth - 1), b")" + b"\x85" * depth]) + b"0")
    return b"".join(pieces), f"operation {place} of {len(pieces)}: {way}"


def _amount(chance: random.Random, *usual: int) -> int:
    """So many times; seldom so often that reading it takes a hundred times as long as any other file."""
    return 100_000 if chance.random() < 0.05 else chance.choice(usual)


def _text(pickled: bytes, chance: random.Random) -> Mutated:
    """Another text, such as a name or a value of the config, or another value in its place."""
    pieces = _pieces(pickled)
    texts = [place for place, (code, _, _) in enumerate(pieces) if code.name == "BINUNICODE"]
    place = chance.choice(texts)
    old = pieces[place][1]
    other = pieces[chance.choice(texts)][1]
    plain = ["", "x", old + "x", old[:-1], other, "9" * 400, "é" * 500, None]
    new = chance.choice([*plain, "${" + old + "}", "${eval:'" + old + "'}", "${" + other])
    data = b"N" if new is None else b"X" + struct.pack("<I", len(new.encode())) + new.encode()
    found = [piece for _, _, piece in pieces]
    found[place] = data
    return b"".join(found), f"{old[:40]!r} is {str(new)[:40]!r}"


def _call(pickled: bytes, chance: random.Random) -> Mutated:
    """A call, as a value of its own or in place of another one."""
    module, name, argument = chance.choice(CALLS)
    made = f"c{module}\n{name}\n(S{argument!r}\ntR".encode()
    pieces = [data for _, _, data in _pieces(pickled)]
    place = chance.randrange(1, len(pieces) - 1)
    way = chance.choice(["instead", "instead", "thrown away", "for all"])
    if way == "instead":
        pieces[place] = made
    elif way == "thrown away":
        pieces.insert(place, made + b"0")
    else:
        pieces = [made, b"."]
    return b"".join(pieces), f"{module}.{name} {way} at {place}"

"""Ways to damage a file: bytes, JSON trees, safetensors, zipped arrays, ONNX graphs, checkpoints. Knows nothing of formats.

A mutation takes the bytes and a source of chance, and returns other bytes and a phrase that says what was done.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, TypeAlias

Mutated: TypeAlias = tuple[bytes, str]
Mutation: TypeAlias = Callable[[bytes, random.Random], Mutated]

_TWICE = "@twice@"
_RAW: dict[str, int] = {}  # texts by number
DEEP = [40, 3_000, 100_000]


def raw(text: str) -> str:
    """Stands in a tree for text that JSON does not have."""
    return f"@raw{_RAW.setdefault(text, len(_RAW))}@"


ODD = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 10**12, -(10**12), 2**63, 10**400, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308,
    raw("NaN"), raw("Infinity"), raw("-Infinity"), raw("9" * 5_000), raw("1e999"), raw("\"\\ud800\""), "", "x", "1",
    "NaN", "\0", "a\nb", "../x", "é" * 300, "x" * 100_000, [], [[]], [0], [None], ["x"], [0] * 5_000, {}, {"": 0},
    {"x": {}}, [{}], {"type": "ddpm"},
)  # fmt: skip


# -- bytes


def flip(data: bytes, chance: random.Random) -> Mutated:
    changed, count = bytearray(data), chance.choice([1, 1, 1, 2, 8, 64])
    places = [chance.randrange(len(data)) for _ in range(count)]
    for place in places:
        changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed), f"{count} bits flipped, the first in byte {places[0]}"


def cut(data: bytes, chance: random.Random) -> Mutated:
    end = chance.choice([chance.randrange(len(data)), max(0, len(data) - chance.randrange(1, 17))])
    return data[:end], f"cut after {end} of {len(data)} bytes"


def splice(data: bytes, chance: random.Random) -> Mutated:
    """A piece is left out, doubled, blanked, moved, or made up."""
    size = min(len(data), chance.choice([1, 2, 4, 8, 64, 512]))
    start, other = (chance.randrange(len(data) - size + 1) for _ in range(2))
    piece, way = data[start : start + size], chance.choice(["out", "twice", "blank", "ones", "moved", "made up"])
    new = {
        "out": b"", "twice": piece * 2, "blank": bytes(size), "ones": b"\xff" * size, "moved": data[other : other + size],
        "made up": chance.randbytes(size),
    }[way]  # fmt: skip
    return data[:start] + new + data[start + size :], f"{size} bytes from {start} on: {way}"


def bytewise(data: bytes, chance: random.Random) -> Mutated:
    return chance.choice([flip, flip, cut, splice])(data, chance)


# -- JSON


def write_json(value: Any) -> bytes:
    """Also what JSON does not have: see `raw`; a key that begins with `_TWICE` loses that, and so stands there twice."""
    text = json.dumps(value).replace(f'"{_TWICE}', '"')
    return re.sub(r'"@raw(\d+)@"', lambda found: list(_RAW)[int(found[1])], text).encode()


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def tree(value: Any, chance: random.Random) -> tuple[Any, str]:
    """One or two things in a JSON tree changed, in place."""
    notes = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        places = list(_places(value))
        if not places:
            break
        holder, key, path = chance.choice(places)
        way = chance.choice(["odd", "odd", "odd", "odd", "gone", "twice", "renamed", "deep", "other", "sign", "listed"])
        notes.append(f"{path}: {_change(holder, key, way, places, chance)}")
    return value, "; ".join(notes)


def _change(holder: Any, key: Any, way: str, places: list[Any], chance: random.Random) -> str:
    old = holder[key]
    if way == "gone":
        del holder[key]
    elif way in ("twice", "renamed") and isinstance(holder, dict):
        name = _TWICE + key if way == "twice" else chance.choice(["", "x", key + "x", key.upper(), "x" * 10_000])
        holder[name] = _copied(old) if way == "twice" else holder.pop(key)
    elif way == "deep":
        depth, (before, behind) = chance.choice(DEEP), chance.choice([("[", "]"), ('{"a": ', "}")])
        holder[key] = raw(before * depth + "0" + behind * depth)
        way = f"{depth} deep"
    elif way == "other":  # something from elsewhere in the same file
        other, at, path = chance.choice(places)
        if isinstance(other, dict) == isinstance(at, str) and (
            at in other if isinstance(other, dict) else at < len(other)
        ):
            holder[key], way = _copied(other[at]), f"that of {path}"
    elif way == "sign" and isinstance(old, int | float) and abs(old) < 1e300:
        holder[key] = chance.choice([-old, old + 1, old - 1, float(old), str(old), old * 1000])
        way = repr(holder[key])
    elif way == "listed":
        holder[key] = _copied(chance.choice([[old], {"x": old}, [old] * 3]))
    else:
        holder[key] = odd = _copied(chance.choice(ODD))
        way = repr(odd)[:40]
    return way


def _places(value: Any, path: str = "") -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        where = f"{path}/{key}"[-80:]
        yield value, key, where
        yield from _places(item, where)


def json_file(data: bytes, chance: random.Random) -> Mutated:
    if chance.random() < 0.2:
        return bytewise(data, chance)
    changed, note = tree(json.loads(data), chance)
    return write_json(changed), note


# -- safetensors


def join_safetensors(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def safetensors_file(data: bytes, chance: random.Random) -> Mutated:
    """Anything of it; its header; the header of ours within that; the type or shape of a tensor."""
    way = chance.choice(["bytes", "header", "ours", "ours", "retyped", "body"])
    header, body = split_safetensors(data)
    metadata = header.get("__metadata__", {})
    ours = next((key for key, text in metadata.items() if text.startswith("{")), None)
    if way == "body" and body:
        body, note = bytewise(body, chance)
    elif way == "header" or (way == "ours" and ours is None):
        header, note = tree(header, chance)
    elif way == "ours":
        inner, note = tree(json.loads(metadata[ours]), chance)
        if chance.random() < 0.1:
            text, note = bytewise(metadata[ours].encode(), chance)
            metadata[ours] = text.decode("latin-1")
        else:
            metadata[ours] = write_json(inner).decode()
    elif way == "retyped":
        note = _retyped(header, chance)
    else:
        return bytewise(data, chance)
    return join_safetensors(write_json(header), body), f"{way}: {note}"


_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _retyped(header: dict[str, Any], chance: random.Random) -> str:
    """Another type and a shape that has as many bytes, or the same shape in another order."""
    name = chance.choice([key for key in header if key != "__metadata__"])
    entry, kind = header[name], chance.choice(list(_SIZES))
    start, stop = entry["data_offsets"]
    if chance.random() < 0.3:
        entry["shape"] = chance.choice([entry["shape"][::-1], [1, *entry["shape"]], [*entry["shape"], 1]])
        return f"{name} in shape {entry['shape']}"
    entry["dtype"], entry["shape"] = kind, [(stop - start) // _SIZES[kind]]
    return f"{name} as {kind}"


# -- zipped arrays


def npz_file(data: bytes, chance: random.Random) -> Mutated:
    if chance.random() < 0.35:
        return bytewise(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = [(name, file.read(name)) for name in file.namelist()]
    place = chance.randrange(len(entries))
    name, content = entries[place]
    way = chance.choice(["gone", "renamed", "twice", "npy", "npy", "npy", "bytes", "no npy", "empty", "bomb", "stored"])
    note = f"{name}: {way}"
    if way == "gone":
        del entries[place]
    elif way == "renamed":
        entries[place] = (
            chance.choice(["x.npy", "obs", "../x.npy", "", "file.npy", "a/b.npy", "action.npy", "é.npy"]),
            content,
        )
    elif way == "twice":
        entries.append((name, entries[chance.randrange(len(entries))][1]))
    elif way == "npy":
        content, note = _npy(content, chance)
        entries[place], note = (name, content), f"{name}: {note}"
    elif way == "bytes":
        entries[place] = (name, bytewise(content, chance)[0])
    elif way == "no npy":
        entries[place] = (name, chance.choice([b"", b"text", b"\x80\x04N.", b"\x93NUMPY", content[:20]]))
    elif way == "empty":
        entries = []
    elif way == "bomb":  # little to read, much to make of it
        entries[place] = (name, content[:10] + bytes(1_000_000))
    compression = zipfile.ZIP_STORED if way == "stored" else chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that is there twice
        for entry, text in entries:
            file.writestr(zipfile.ZipInfo(entry or "x", (1980, 1, 1, 0, 0, 0)), text, compression)
    return buffer.getvalue(), note


_TYPES = (
    "<f4",
    ">f4",
    "<f8",
    ">f8",
    "<f2",
    "|O",
    "|b1",
    "<i4",
    ">i8",
    "|u1",
    "<U3",
    "|S4",
    "<c8",
    "<M8[s]",
    "|V8",
    "nonsense",
    "[('a', '<f4')]",
)


def _npy(content: bytes, chance: random.Random) -> Mutated:
    """Another type, shape or order in an array's own header; the values stay."""
    (length,) = struct.unpack("<H", content[8:10])
    header = eval(content[10 : 10 + length].decode("latin-1"), {})  # a dict of our own making
    shape, way = header["shape"], chance.choice(["type", "shape", "order", "text"])
    if way == "type":
        header["descr"] = chance.choice(_TYPES)
    elif way == "shape":
        sizes = [
            shape[::-1],
            (0, *shape[1:]),
            (*shape, 1),
            shape[1:],
            (-1, *shape),
            (10**12,),
            (2**62, 4),
            (),
            (len(content),),
        ]
        header["shape"] = chance.choice([*sizes, ("x",), (1.5,), "x", None])
    elif way == "order":
        header["fortran_order"] = chance.choice([True, 1, "x", None])
    words = [f"'{key}': {value!r}" for key, value in header.items() if value != "[('a', '<f4')]"]
    if len(words) < 3:
        words.append(f"'descr': {header['descr']}")
    text = ("{" + ", ".join(words) + "}").encode("latin-1")
    if way == "text":
        text = bytewise(text, chance)[0]
    return content[:8] + struct.pack("<H", len(text) + 1) + text + b"\n" + content[10 + length :], f"{way} {header}"


def _onnx_file(data: bytes, chance: random.Random) -> Mutated:
    from .onnx_mutations import onnx_file  # which needs onnx

    return onnx_file(data, chance)


def _checkpoint_file(data: bytes, chance: random.Random) -> Mutated:
    from .checkpoint_mutations import checkpoint_file  # which imports this

    return checkpoint_file(data, chance)


def _message_file(data: bytes, chance: random.Random) -> Mutated:
    from .frames import message_file  # which imports this

    return message_file(data, chance)


MUTATIONS: dict[str, Mutation] = {
    ".json": json_file, ".safetensors": safetensors_file, ".npz": npz_file, ".onnx": _onnx_file,
    ".ckpt": _checkpoint_file, ".pt": _checkpoint_file, ".msgpack": _message_file,
}  # fmt: skip

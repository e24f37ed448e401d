"""What must hold of a file of any kind, however it was changed: it gives a value, or a short sentence.

Tests of each house try their own kinds: `EXAMPLES` of `file_formats` and of `laboratory_formats`.
"""

import importlib
import json
import os
import pkgutil
import random
import re
import tracemalloc

from blockcache.errors import BlockcacheError
from blockcache_runtime.files import Format
from file_formats import safetensors_with

ODD = [
    *(None, True, False, 0, -1, 1, 1.5, 2**63, 10**12, 10**400, "", "x", "3", "\ud800", "x" * 200_000, "\n" * 300),
    *([], {}, [[]], [None], {"": 0}, ["x"] * 50, [0] * 2_000, [[1]], {"type": []}, {"x" * 5_000: [1]}),
]
COUNTS = {".json": 150, ".onnx": 30}
DEEP = "[" * 300 + "]" * 300


def formats(*packages):
    """The names of all that the packages have, or import."""
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for held in vars(importlib.import_module(module.name)).values():
                value = getattr(held, "FORMAT", held)  # a class that is a file has its own
                if isinstance(value, Format):
                    yield value.name


def loads_or_says_why(example, path):
    """The sentence, or None."""
    try:
        example.load(path)
    except BlockcacheError as error:
        message = str(error)
        assert 10 < len(message) <= 1000, message
        assert message.count("\n") < 4
        return message
    return None


def places(value, at=()):
    """The path of everything inside a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(rng, value):
    """A copy of a JSON value in which one thing is another, gone, doubled or new."""
    value = json.loads(json.dumps(value))
    *way, last = rng.choice([place for place in places(value) if place])
    holder = value
    for key in way:
        holder = holder[key]
    match rng.randrange(4), holder:
        case 0, _:
            del holder[last]
        case 1, dict():
            holder[rng.choice(["extra", "", "format", "x" * 300])] = holder[last]
        case 1, list():
            holder.append(holder[last])
        case _:
            holder[last] = rng.choice(ODD)
    return value


def large(examples):
    """Those of which a file can claim to be far larger than it is."""
    return [item for item in examples if item.formats or "weights" in item.name]


def mutations(rng, path, count):
    data = path.read_bytes()
    for _ in range(count):
        way = rng.randrange(6)
        if way == 0:
            yield data[: rng.randrange(len(data))]
        elif way == 1:
            noisy = bytearray(data)
            for _ in range(rng.choice([1, 1, 3, 30])):
                noisy[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
            yield bytes(noisy)
        elif path.suffix == ".json":
            text = json.dumps(changed(rng, json.loads(data)))
            yield (text if way > 2 else text.replace("1", rng.choice(["1e999", DEEP, "NaN", "01"]), 1)).encode()
        elif path.suffix == ".safetensors":

            def change(header, way=way):
                inner = header.get("__metadata__", {})
                if way > 3 and inner.keys() - {"format"}:
                    (entry,) = inner
                    return {**header, "__metadata__": {entry: json.dumps(changed(rng, json.loads(inner[entry])))}}
                return changed(rng, header)

            yield safetensors_with(data, change)
        else:
            start = rng.randrange(len(data))
            yield data[:start] + rng.randbytes(rng.randrange(1, 64)) + data[start + rng.randrange(64) :]


def try_changes(example, directory):
    """A few hundred, always the same ones; `tests/fuzz` does many more."""
    rng, path = random.Random(0), example.write(directory)
    for data in mutations(rng, path, COUNTS.get(path.suffix, 60)):
        path.write_bytes(data)
        loads_or_says_why(example, path)


def try_a_terabyte(example, directory):
    """A terabyte of nothing: no reader of JSON begins to read it, and no other believes the size that a header claims."""
    path = example.write(directory)
    if path.suffix == ".json":
        os.truncate(path, 10**12)
    elif path.suffix == ".safetensors":
        path.write_bytes((10**12).to_bytes(8, "little") + path.read_bytes()[8:])
    else:  # an export: a field that says it is a terabyte long
        path.write_bytes(b"\x3a\x80\xa0\x94\xa5\x8d\x1d" + path.read_bytes())
    tracemalloc.start()
    try:
        assert loads_or_says_why(example, path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def try_what_is_no_file(example, directory):
    """Nothing waits for a pipe, reads a device or raises what the system said."""
    path = example.write(directory)
    path.unlink()
    long, zero = (path.parent / part / path.name for part in ("x" * 5_000, "a\0b"))
    is_kept = "job" not in example.name  # of a job that is not there, nothing is kept
    for make, place, found in (
        (lambda: None, path, is_kept),
        (lambda: None, long, is_kept),
        (lambda: None, zero, is_kept),
        (lambda: path.symlink_to(path.name), path, is_kept),
        (lambda: path.symlink_to("/dev/zero"), path, True),
        (lambda: os.mkfifo(path), path, True),
        (lambda: path.mkdir(), path, True),
    ):
        make()
        sentence = loads_or_says_why(example, place)
        assert bool(sentence) is found
        assert not found or re.search("cannot read|no .* at|no policy", sentence)
        if os.path.lexists(path) and not path.is_dir():
            path.unlink()

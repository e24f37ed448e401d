"""Pickles read without running them: what comes out for what Python writes, and what is refused."""

import collections
import decimal
import functools
import os
import pickle
import pickletools
from pathlib import PurePosixPath

import pytest

from blockcache.errors import ContentError, FileError
from blockcache.foreign.pickles import MOST_BYTES, Call, Global, Persistent, _Machine, as_mapping, load_pickle


def load(data):
    return load_pickle(data, "thing", "a.pkl")


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    255,
    70_000,
    2**40,
    -(2**70),
    10**400,
    1.5,
    float("inf"),
    "",
    "text",
    "é" * 300,
    b"",
    b"bytes" * 100,
    bytearray(b"more"),
    [],
    [1, [2, [3]]],
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    {},
    {"a": 1, 2: None, None: 3.5, b"x": (1, {"y": []})},
    {str(number): number for number in range(2_000)},
    list(range(2_000)),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_out_as_they_went_in(protocol):
    for value in PLAIN:
        written = pickle.dumps(value, protocol)
        found = load(written)
        if isinstance(found, Call):  # old protocols have no bytes, and make them by a call
            assert isinstance(value, bytes | bytearray)
            assert protocol < (5 if isinstance(value, bytearray) else 3)
        elif not isinstance(value, dict):
            assert type(found) is type(value)
            assert found == value
    shared = [1]
    found = load(pickle.dumps([shared, shared], protocol))
    assert found[0] is found[1]
    circle = []
    circle.append(circle)
    found = load(pickle.dumps(circle, protocol))
    assert found[0] is found


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_a_mapping_comes_out_whole(protocol):
    for value in PLAIN:
        if isinstance(value, dict):
            assert load(pickle.dumps(value, protocol)) == value


class Kept:
    """Of this module, which is not imported again."""

    def __init__(self, value):
        self.value = value


class Listed(list):
    pass


class Named:
    def __getnewargs_ex__(self):
        return (1,), {"two": 2}

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_objects_are_inert_and_can_be_looked_into(protocol):
    found = load(pickle.dumps(Kept([1, 2]), protocol))
    assert isinstance(found, Call)
    assert found.kind == f"{Kept.__module__}.Kept"
    assert found.state == {"value": [1, 2]}
    listed = Listed([1, 2])
    listed.note = "x"
    found = load(pickle.dumps(listed, protocol))
    assert found.members == [1, 2] or found.arguments[2] == [1, 2]
    assert found.state == {"note": "x"}
    ordered = collections.OrderedDict(a=1, b=2)
    found = load(pickle.dumps(ordered, protocol))
    assert found.kind == "collections.OrderedDict"
    if protocol > 1:
        assert as_mapping(found) == ordered
    partial = load(pickle.dumps(functools.partial(int, base=2), protocol))
    assert partial.function == Global("functools", "partial")
    assert load(pickle.dumps(Kept, protocol)) == Global(Kept.__module__, "Kept")
    assert isinstance(load(pickle.dumps(PurePosixPath("/etc"), protocol)), Call)
    assert isinstance(load(pickle.dumps(decimal.Decimal(3), protocol)), Call)
    assert isinstance(load(pickle.dumps({1, (2, 3)}, protocol)), Call)
    assert isinstance(load(pickle.dumps(frozenset({1}), protocol)), Call)
    if protocol >= 4:
        assert load(pickle.dumps(Named(), protocol)).kind == f"{Named.__module__}.Named"


def test_what_is_kept_elsewhere_has_its_name():
    import io

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", value.value) if isinstance(value, Kept) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump([Kept("0")])
    (found,) = load(buffer.getvalue())
    assert isinstance(found, Persistent)
    assert found.name == ("storage", "0")
    assert load(b"Pnumber 3\n.").name == "number 3"


def test_old_ways_to_make_things():
    assert load(b"(I1\nI2\nl.") == [1, 2]
    assert load(b"(S'a'\nI1\nd.") == {"a": 1}
    assert load(b"I01\n.") is True
    assert load(b"(idataset\nKind\n.").kind == "dataset.Kind"
    assert load(b"(cdataset\nKind\nI1\no.").arguments == (1,)
    assert load(b"I1\nI2\n0.") == 1
    assert load(b"I1\n(I2\n0" + b"0.") == 1
    assert load(b"I1\n(I2\n1.") == 1
    assert load(b"I1\n2\x86.") == (1, 1)


NAMES = [
    ("os", "system", True),
    ("posix", "system", True),
    ("os.path", "join", True),
    ("subprocess", "Popen", True),
    ("commands", "Popen", True),
    ("io", "open", True),
    ("importlib", "import_module", True),
    ("importlib.util", "find_spec", True),
    ("builtins", "eval", True),
    ("__builtin__", "open", True),
    ("builtins", "exec", True),
    ("builtins", "dict", False),
    ("__builtin__", "set", False),
    ("omegaconf.dictconfig", "DictConfig", False),
    ("torch._utils", "_rebuild_tensor_v2", False),
    ("typing", "Any", False),
    ("operating", "system", False),
    ("my_project.os", "system", False),
    ("dill._dill", "_load_type", False),
]


@pytest.mark.parametrize(("module", "name", "harmful"), NAMES)
def test_names_that_no_data_needs_are_refused(module, name, harmful):
    old = f"c{module}\n{name}\n(S'touch ran'\ntR.".encode()
    new = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93."
    )
    for data in (old, new):
        if harmful:
            with pytest.raises(FileError, match=rf"a.pkl would run {module}.{name} if it were loaded as a pickle"):
                load(data)
        else:
            assert load(data) is not None


GARBLED = {
    "empty": (b"", "garbled"),
    "no end": (b"I1\n", "garbled"),
    "nothing left": (b".", "IndexError"),
    "no mark": (b"l.", "IndexError"),
    "unknown operation": (b"\xff.", "garbled"),
    "cut": (pickle.dumps("x" * 100)[:-20], "garbled"),
    "not in the memo": (b"h\x07.", "KeyError"),
    "too few": (b"I1\n\x87.", "more values than there are"),
    "append to a number": (b"I1\nI2\na.", "appended to int"),
    "key of a list": (b"]I1\nI2\ns.", "under a key of list"),
    "key alone": (b"}(I1\nu.", "a key without a value"),
    "state of a list": (b"]}b.", "a state for list"),
    "arguments that are a list": (b"ca\nb\n]R.", "a call with list for its arguments"),
    "name that is no text": (b"\x80\x04I1\nI2\n\x93.", "a name that is no text"),
    "extension": (b"\x82\x01.", "the operation EXT1"),
    "buffer": (b"\x97.", "the operation NEXT_BUFFER"),
    "a billion": (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.", "garbled"),
    "no object": (b"(o.", "garbled"),
    "digits": (b"I" + b"9" * 5_000 + b"\n.", "garbled"),
}


@pytest.mark.parametrize(("data", "sentence"), GARBLED.values(), ids=GARBLED)
def test_what_is_garbled_is_refused(data, sentence):
    with pytest.raises(FileError, match=sentence) as caught:
        load(data)
    assert "the thing a.pkl is garbled" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_every_operation_of_python_s_is_known_or_refused_by_name():
    """A new protocol may bring more; then this says which."""
    refused = set()
    for code in pickletools.opcodes:
        try:
            _Machine().step(code.name, 1)
        except ContentError as error:
            if f"the operation {code.name}, which no checkpoint needs" in str(error):
                refused.add(code.name)
        except LookupError:
            pass  # it is known, and misses what it works on
    assert refused == {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "STOP"}  # STOP is the end, not a step


def test_limits():
    with pytest.raises(FileError, match="more than 1,000,000 operations"):
        load(b"N0" * 600_000 + b".")
    with pytest.raises(FileError, match=r"holds a pickle of .* bytes"):
        load(bytes(MOST_BYTES + 1))


def test_keys_that_would_be_hashed_at_length_are_left_out():
    """The hash of a tuple in a tuple in a tuple and so on goes so deep that the process dies of it."""
    deep = b")" + b"\x85" * 300_000
    assert load(b"}" + deep + b"I1\ns.") == {}
    assert load(b"}(" + deep + b"I1\nI2\nI3\nu.") == {2: 3}
    assert isinstance(load(b"\x80\x04\x8f(" + deep + b"\x90."), Call)


def test_keys_that_all_have_the_same_hash_are_left_out():
    """Half a million of them would take Python hours to put into a dict."""
    prime = 2**61 - 1  # integers are hashed modulo this
    keys = [(number * prime).to_bytes(11, "little", signed=True) for number in range(5, 200_000)]
    pairs = b"".join(b"\x8a\x0b" + key + b"N" for key in keys)
    assert load(b"}(" + pairs + b"I2\nI3\nu.") == {2: 3}
    assert load(b"}(" + b"J\xff\xff\xff\x7fNu.") == {2**31 - 1: None}


def test_nothing_is_called(tmp_path, monkeypatch):
    """Whatever its function is, a call is a note of it."""
    monkeypatch.chdir(tmp_path)
    for function in (b"ca\nb\n", b"ca\nb\n(tR", b"]", b"I1\n"):
        found = load(function + b"(S'x'\ntR.")
        assert isinstance(found, Call)
        assert found.arguments == ("x",)
    assert os.listdir() == []

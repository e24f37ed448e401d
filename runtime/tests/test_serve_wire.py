"""Messages byte by byte: what public clients send and read, and what is refused without being made."""

import io
import struct
import tracemalloc
import zlib

import msgpack
import numpy as np
import pytest

from blockcache_runtime.errors import ContentError
from blockcache_runtime.serve.wire import MOST_CONTAINERS, MOST_ITEMS, pack, unpack

OPENPI_ZERO = "84c40b5f5f6e6461727261795f5fc3c40464617461c40400000000c4056474797065a33c6634c40573686170659101"
VLA_ZERO = "84ab5f5f6e6461727261795f5fc3a464617461c40400000000a56474797065a33c6634a573686170659101"


def message(**words):
    return msgpack.packb(words)


def array(**words):
    return {"__ndarray__": True, "data": bytes(4), "dtype": "<f4", "shape": [1]} | words


def test_arrays_are_those_of_the_public_clients_to_the_last_byte():
    zero = np.zeros(1, np.float32)
    assert pack({"a": zero}, bytes_keys=True).hex() == "81a161" + OPENPI_ZERO
    assert pack({"a": zero}, bytes_keys=False).hex() == "81a161" + VLA_ZERO


@pytest.mark.parametrize("described", [OPENPI_ZERO, VLA_ZERO])
def test_both_dialects_are_read(described):
    found = unpack(bytes.fromhex("81a161" + described), 100)["a"]
    assert found.dtype == np.float32
    assert found.tolist() == [0]


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", "|u1", "|i1", "<i8", "<u2", "|b1"])
def test_every_type_of_plain_numbers_survives(dtype):
    given = np.arange(6).reshape(2, 3).astype(dtype)
    found = unpack(pack({"a": given}, bytes_keys=True), 100)["a"]
    assert found.dtype == given.dtype
    assert np.array_equal(found, given)


def test_numpy_s_own_numbers_and_raw_pictures_are_read():
    scalar = {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f4"}
    picture = {"__image__": True, "format": "raw", "data": bytes(range(6)), "dtype": "|u1", "shape": [1, 2, 3]}
    found = unpack(msgpack.packb({"s": scalar, "p": picture}), 100)
    assert found["s"].dtype == np.float32
    assert found["s"] == 2.5
    assert found["p"].tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x81\xa1a", "not msgpack"),
        (message()[:0] + b"\x01", "a int, expected a map"),
        (message(a=1) + b"\x00", "not msgpack"),
        (b"\x81\x01\x02", "not msgpack"),
        (b"\x82\xa1a\x01\xc4\x01a\x02", "same name twice"),
        (message(a=array(dtype="|O")), "the type '|O'"),
        (message(a=array(dtype="O8")), "the type 'O8'"),
        (message(a=array(dtype="<c8")), "the type '<c8'"),
        (message(a=array(dtype="|V4")), "the type '|V4'"),
        (message(a=array(dtype="f4,f4")), "the type 'f4,f4'"),
        (message(a=array(dtype="<U1")), "the type '<U1'"),
        (message(a=array(dtype="<M8[s]")), "the type"),
        (message(a=array(dtype=["<f4"])), "the type"),
        (message(a=array(shape=[2])), "cannot be made of 4 bytes"),
        (message(a=array(shape=[-1])), "the shape"),
        (message(a=array(shape=[True])), "the shape"),
        (message(a=array(shape=[2**40, 0])), "the shape"),
        (message(a=array(shape=[1] * 9)), "the shape"),
        (message(a=array(shape="1")), "the shape"),
        (message(a=array(data="abcd")), "cannot be made of str"),
        (message(a={"__ndarray__": True}), "the type None"),
        (message(a={"__npgeneric__": True, "data": 300, "dtype": "|u1"}), "does not fit its type"),
        (message(a={"__npgeneric__": True, "data": [1], "dtype": "|u1"}), "a number is"),
        (message(a={"__image__": True, "format": "gif", "data": b""}), "the format 'gif'"),
        (message(a={"__image__": True, "format": "png", "data": b"\x89PNG"}), "picture cannot be read"),
        (message(a=[0] * (MOST_ITEMS + 1)), "not msgpack"),
        (message(a=[[] for _ in range(MOST_CONTAINERS)]), "lists and maps"),
        (message(a=msgpack.ExtType(1, b"x")), "not msgpack"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\x00", "not msgpack"),
    ],
)
def test_what_is_no_message_is_refused_in_one_sentence(data, said):
    with pytest.raises(ContentError) as error:
        unpack(data, 1000)
    assert said in str(error.value)
    assert len(str(error.value)) < 500


def png(width, height):
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes((1 + 3 * min(width, 1000)) * min(height, 1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_pictures_are_unpacked():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    given = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    for shape, kept in (((4, 5, 3), given), ((4, 5, 1), given[..., :1])):
        buffer = io.BytesIO()
        image.fromarray(kept[..., 0] if shape[2] == 1 else kept).save(buffer, format="PNG")
        packed = {"__image__": True, "format": "png", "data": buffer.getvalue(), "shape": list(shape)}
        assert np.array_equal(unpack(msgpack.packb({"a": packed}), 100)["a"], kept)


def test_a_picture_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked():
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    bomb = msgpack.packb({"a": {"__image__": True, "format": "png", "data": png(20_000, 20_000), "shape": [1, 1, 3]}})
    tracemalloc.start()
    with pytest.raises(ContentError, match=r"20000 x 20000 pixels|picture cannot be read"):
        unpack(bomb, 10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("part", [b"\x90", b"\x80", b"\xc0", b"\xa0", b"\xcb" + bytes(8)])
def test_nothing_small_becomes_large(part):
    """A list of a million empty lists takes a hundred times the bytes of the message."""
    count = 2**20 // len(part)
    data = b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + part * count
    tracemalloc.start()
    with pytest.raises(ContentError):
        unpack(data, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20

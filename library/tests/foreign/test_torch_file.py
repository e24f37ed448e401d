"""Files of torch.save opened without torch: entries and tensors that are not as torch writes them are refused."""

import io
import pickle
import stat
import zipfile
from pathlib import Path

import pytest
import torch

from blockcache.errors import ContentError, FileError
from blockcache.foreign import torch_file
from blockcache.foreign.torch_file import KINDS, open_torch_file

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def entries():
    """Those of a sound file, by name."""
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, "a.pt")
    with zipfile.ZipFile("a.pt") as file:
        return {name: file.read(name) for name in file.namelist()}


def write(pairs, **settings):
    with zipfile.ZipFile("a.pt", "w", **settings) as file:
        for name, data in pairs:
            file.writestr(name, data)


def numbers(file, value):
    """A tensor's numbers, in order."""
    stored = file.tensor(value)
    flat = torch.frombuffer(file.read(stored.storage), dtype=getattr(torch, stored.storage.dtype))
    return flat.as_strided(stored.shape, stored.stride, stored.offset)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind(kind):
    dtype, size = kind
    saved = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(getattr(torch, dtype))
    assert saved.element_size() == size
    views = {
        "a": saved,
        "row": saved[1],
        "turned": saved.T,
        "parameter": None,
        "none": saved[:0],
        "number": saved[1, 1],
    }
    views["parameter"] = torch.nn.Parameter(saved) if saved.is_floating_point() else saved
    torch.save(views, "a.pt")
    with open_torch_file("a.pt", "thing") as file:
        for name, tensor in views.items():
            if name != "none":
                torch.testing.assert_close(numbers(file, file.content[name]), tensor.detach())
        assert file.tensor(file.content["none"]).shape == (0, 3)
        assert len({file.tensor(file.content[name]).storage for name in ("a", "row", "turned")}) == 1


def link():
    info = zipfile.ZipInfo("archive/data/1")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, b"/etc/passwd"


def packed():
    info = zipfile.ZipInfo("archive/data/1")
    info.compress_type = zipfile.ZIP_DEFLATED
    return info, bytes(10_000)


ODD = {
    "link": (lambda: [link()], "the entry 'archive/data/1' is a link"),
    "packed": (lambda: [packed()], "is packed"),
    "absolute": (lambda: [("/etc/passwd", b"x")], "has a name that leads elsewhere"),
    "upwards": (lambda: [("archive/../../x", b"x")], "has a name that leads elsewhere"),
    "drive": (lambda: [("C:/x", b"x")], "has a name that leads elsewhere"),
    "backwards": (lambda: [("archive\\x", b"x")], "has a name that leads elsewhere"),
    "folder": (lambda: [("archive/x/", b"")], "has a name that leads elsewhere"),
    "twice": (lambda: [("a/version", b"3\n")], "is there twice"),
    "two pickles": (lambda: [("other/data.pkl", b"N.")], "expected one data.pkl"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("more", "sentence"), ODD.values(), ids=ODD)
def test_entries_that_torch_does_not_write_are_refused(more, sentence):
    write([*entries().items(), *more()])
    with pytest.raises(FileError, match=sentence), open_torch_file("a.pt", "thing"):
        pass


def patched(change):
    """The bytes of a sound file, edited."""
    entries()
    data = bytearray(Path("a.pt").read_bytes())
    change(data)
    Path("a.pt").write_bytes(data)


def directory(data):
    """Where the list of entries begins."""
    return data.index(b"PK\x01\x02")


def lock(data):
    data[directory(data) + 8] |= 1


def claim(data):
    """The first entry says that it is 2 GB long."""
    at = directory(data)
    data[at + 20 : at + 28] = (2**31).to_bytes(4, "little") * 2


def move(data):
    """The first entry is said to lie where another one does."""
    at = data.index(b"PK\x01\x02", directory(data) + 4)
    first = directory(data)
    data[first + 42 : first + 46] = data[at + 42 : at + 46]


def flip(data):
    """A bit of a number."""
    at = data.index(torch.arange(6.0).numpy().tobytes())
    data[at + 5] ^= 1


def away(data):
    """An entry begins behind the end of the file."""
    first = directory(data)
    data[first + 42 : first + 46] = (2**30).to_bytes(4, "little")


def long_list(data):
    """The list of entries is said to be a gigabyte long."""
    at = data.rindex(b"PK\x06\x06")
    data[at + 40 : at + 48] = (2**30).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lock, "is locked with a password"),
        (claim, "more than the .* of the whole file|cannot be read"),
        (move, "cannot be read"),
        (away, "cannot be read"),
        (long_list, "takes more than|cannot be read"),
        (flip, "Bad CRC-32"),
        (lambda data: data.__delitem__(slice(len(data) // 2, None)), "it may be cut short"),
        (lambda data: data.__delitem__(slice(0, 40)), "is no checkpoint of torch.save"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change, sentence):
    patched(change)
    with pytest.raises(FileError, match=sentence), open_torch_file("a.pt", "thing") as file:
        file.read(file.tensor(file.content["a"]).storage)


def test_entries_that_overlap_are_no_way_to_hold_more_than_the_file(monkeypatch):
    """Two entries for the same bytes, each as long as nearly all of the file."""
    write([("archive/data.pkl", b"N."), ("archive/data/0", bytes(5_000)), ("archive/data/1", b"x")])
    data = bytearray(Path("a.pt").read_bytes())
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    third = data.index(b"PK\x01\x02", second + 4)
    data[third + 16 : third + 28] = data[second + 16 : second + 28]
    Path("a.pt").write_bytes(data)
    with pytest.raises(FileError, match=r"more than the .* of the whole file"), open_torch_file("a.pt", "thing"):
        pass


def test_a_list_of_entries_has_a_limit(monkeypatch):
    entries()
    monkeypatch.setattr(torch_file, "DIRECTORY_BYTES", 100)
    with pytest.raises(FileError, match="takes more than 100 bytes"), open_torch_file("a.pt", "thing"):
        pass


class Storage:
    """How torch names one, as a tuple of ours."""

    def __init__(self, *name):
        self.name = name


def tensor(*arguments, storage=("storage", torch.FloatStorage, "0", "cpu", 6), function="_rebuild_tensor_v2"):
    """A pickle of one tensor with these arguments behind its storage."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.name if isinstance(value, Storage) else None

    class Rebuilt:
        def __reduce__(self):
            return getattr(torch._utils, function), (Storage(*storage), *arguments)

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"a": Rebuilt()})
    return buffer.getvalue()


SOUND = (0, (2, 3), (3, 1), False, {})
WRONG = {
    "beyond the end": tensor(1, (2, 3), (3, 1), False, {}),
    "strides too long": tensor(0, (2, 3), (4, 1), False, {}),
    "more than there are": tensor(0, (4, 3), (1, 1), False, {}),
    "numbers used twice": tensor(0, (7,), (0,), False, {}),
    "strides backwards": tensor(5, (2,), (-1,), False, {}),
    "offset backwards": tensor(-1, (2,), (1,), False, {}),
    "huge": tensor(0, (2**40, 2**40), (1, 1), False, {}),
    "shape and strides": tensor(0, (2, 3), (1,), False, {}),
    "no shape": tensor(0, "23", "31", False, {}),
    "shape of texts": tensor(0, ("2", 3), (3, 1), False, {}),
    "too deep": tensor(0, (1,) * 17, (1,) * 17, False, {}),
    "another count": tensor(*SOUND, storage=("storage", torch.FloatStorage, "0", "cpu", 7)),
    "another kind": tensor(*SOUND, storage=("storage", torch.DoubleStorage, "0", "cpu", 6)),
    "unknown kind": tensor(*SOUND, storage=("storage", torch.ComplexFloatStorage, "0", "cpu", 3)),
    "no kind": tensor(*SOUND, storage=("storage", "float", "0", "cpu", 6)),
    "not there": tensor(*SOUND, storage=("storage", torch.FloatStorage, "9", "cpu", 6)),
    "elsewhere": tensor(*SOUND, storage=("storage", torch.FloatStorage, "../data.pkl", "cpu", 6)),
    "no name": tensor(*SOUND, storage=("storage", torch.FloatStorage, 0, "cpu", 6)),
    "no storage": tensor(*SOUND, storage=("module", torch.FloatStorage, "0", "cpu", 6)),
    "no arguments": tensor(),
}


@pytest.mark.parametrize("pickled", WRONG.values(), ids=WRONG)
def test_tensors_that_are_not_in_the_file_are_refused(pickled):
    found = entries()
    assert numbers_of(found, tensor(*SOUND)).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ContentError):
        numbers_of(found, pickled)


def numbers_of(found, pickled):
    folder = next(name for name in found if name.endswith("data.pkl")).removesuffix("data.pkl")
    write({**found, f"{folder}data.pkl": pickled}.items())
    with open_torch_file("a.pt", "thing") as file:
        return numbers(file, file.content["a"])


def test_other_orders_of_bytes_and_other_files_are_named():
    found = entries()
    order = next(name for name in found if name.endswith("byteorder"))
    write({**found, order: b"big"}.items())
    with pytest.raises(FileError, match="another order of bytes"), open_torch_file("a.pt", "thing"):
        pass
    write([("a.npy", b"x")])
    with (
        pytest.raises(FileError, match=r"but none of torch's: expected one data.pkl, got a.npy"),
        open_torch_file("a.pt", ""),
    ):
        pass
    import safetensors.torch

    safetensors.torch.save_file({"a": torch.ones(3)}, "a.pt")
    with pytest.raises(FileError, match="is a safetensors file"), open_torch_file("a.pt", "thing"):
        pass

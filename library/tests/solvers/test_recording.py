"""Recordings: a file keeps everything, and a broken one is refused."""

import json
import os
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import safetensors.numpy

from blockcache import Block, Fingerprint, Recording, solve
from blockcache.errors import FileError, RecordingError
from blockcache.solvers.recording import METRICS

BLOCKS = (Block("layers.0.SA", "SA", 0, 10), Block("layers.0.FFN", "FFN", 1, 20))
FINGERPRINT = Fingerprint("dp-t", ("layers.0.SA", "layers.0.FFN"), {"width": 16}, 5, {"type": "ddpm"}, "ab" * 32)


def recorded(steps=5, **changes):
    rng = np.random.default_rng(0)
    values = {
        "blocks": BLOCKS,
        "matrices": {name: rng.normal(size=(2, steps, steps)) for name in METRICS},
        "scores": rng.normal(size=2),
        "input_change": rng.normal(size=(3, steps - 1)),
        "output_change": rng.normal(size=(3, steps - 1)),
        "generations": 2,
        "fingerprint": replace(FINGERPRINT, steps=steps),
        "origin": {"seed": 0, "samples": 3},
    }
    return Recording(**values | changes)


def rewrite(path, header=None, tensors=None):
    """Change a saved recording: entries of its header, or tensors (None takes one away)."""
    data = path.read_bytes()
    arrays = safetensors.numpy.load(data) | (tensors or {})
    length = int.from_bytes(data[:8], "little")
    old = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["blockcache"])
    value = {key: item for key, item in {**old, **(header or {})}.items() if item != "gone"}
    kept = {name: array for name, array in arrays.items() if array is not None}
    path.write_bytes(safetensors.numpy.save(kept, metadata={"blockcache": json.dumps(value)}))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.safetensors"
    recorded().save(path)
    return path


@pytest.mark.parametrize("steps", [1, 5])
def test_save_and_load(tmp_path, steps):
    recording = recorded(steps)
    recording.save(tmp_path / "r.safetensors")
    loaded = Recording.load(tmp_path / "r.safetensors")
    assert loaded.blocks == recording.blocks
    assert loaded.fingerprint == recording.fingerprint
    assert loaded.origin == recording.origin
    assert (loaded.generations, loaded.samples, loaded.steps) == (2, 3, steps)
    for name in METRICS:
        np.testing.assert_array_equal(loaded.matrices[name], recording.matrices[name])
    for name in ("scores", "input_change", "output_change"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(recording, name))
        assert getattr(loaded, name).dtype == np.float64


def test_the_file_says_what_it_is(file):
    header = file.read_bytes()[8:1000].decode(errors="ignore")
    for words in ("blockcache.recording", "made_by", "version"):
        assert words in header


def test_every_kind_of_truncation_is_refused(file):
    whole = file.read_bytes()
    for length in (*range(0, 64, 7), len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"is empty|cut short"):
            Recording.load(file)


@pytest.mark.parametrize("content", [b"hello, I am no safetensors file", b"{}", b"\x00" * 100])
def test_another_file_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(FileError):
        Recording.load(file)


def test_a_safetensors_file_of_something_else_is_refused(file):
    file.write_bytes(safetensors.numpy.save({"weight": np.zeros(3)}))
    with pytest.raises(FileError, match="is not a recording: its format is None"):
        Recording.load(file)


@pytest.mark.parametrize(
    ("header", "error", "sentence"),
    [
        ({"version": 2}, FileError, "format version 2, this blockcache reads version 1"),
        ({"version": 0}, FileError, "format version 0"),
        ({"format": "blockcache.schedule"}, FileError, "is not a recording"),
        ({"colour": "red"}, FileError, "missing or unknown keys: colour"),
        ({"blocks": "gone"}, FileError, "missing or unknown keys: blocks"),
        ({"blocks": [{"name": "x"}]}, FileError, "garbled"),
        ({"blocks": [3]}, FileError, "garbled"),
        ({"blocks": []}, RecordingError, "holds blocks and generations"),
        ({"generations": 0}, RecordingError, "holds blocks and generations"),
        ({"generations": "2"}, RecordingError, "holds blocks and generations"),
        (
            {"fingerprint": {}},
            FileError,
            "the recording .* is garbled .missing or unknown keys under 'fingerprint': blocks",
        ),
        ({"origin": None}, FileError, "needs an object under 'origin', got None"),
        ({"blocks": {}}, FileError, "needs a list under 'blocks'"),
    ],
)
def test_another_header_is_refused(file, header, error, sentence):
    rewrite(file, header)
    with pytest.raises(error, match=sentence) as caught:
        Recording.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "error", "sentence"),
    [
        ({"scores": None}, FileError, "missing or unknown keys: scores"),
        ({"extra": np.zeros(2)}, FileError, "missing or unknown keys: extra"),
        (dict.fromkeys(f"matrices.{name}" for name in METRICS), RecordingError, "one metric at least, got none"),
        ({"scores": np.zeros(3)}, RecordingError, r"scores has shape \(3,\), expected \(2,\)"),
        ({"matrices.mse": np.zeros((2, 5, 4))}, RecordingError, "mse has shape"),
        ({"matrices.cosine": np.array(1.0)}, FileError, "garbled"),
        ({"input_change": np.zeros((3, 5))}, RecordingError, "input_change has shape"),
        ({"output_change": np.zeros((2, 4))}, RecordingError, "output_change has shape"),
        ({"input_change": np.array(1.0)}, FileError, "garbled"),
        ({"matrices.cosine": np.full((2, 5, 5), np.nan)}, RecordingError, "cosine holds NaN or infinity"),
        ({"scores": np.array([1.0, np.inf])}, RecordingError, "scores holds NaN or infinity"),
    ],
)
def test_other_tensors_are_refused(file, tensors, error, sentence):
    rewrite(file, tensors=tensors)
    with pytest.raises(error, match=sentence) as caught:
        Recording.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["scores", "input_change", "output_change"])
def test_nan_is_refused_when_made(name):
    array = getattr(recorded(), name).copy()
    array.flat[1] = np.nan
    with pytest.raises(RecordingError, match=f"{name} holds NaN or infinity; calibrate again"):
        recorded(**{name: array})


def test_one_metric_at_least_is_needed():
    with pytest.raises(RecordingError, match="the matrices of one metric at least, got none"):
        recorded(matrices={})


@pytest.mark.parametrize("metric", METRICS)
def test_a_recording_that_lacks_a_metric_is_refused_only_to_those_who_ask_for_it(file, metric):
    rewrite(file, tensors={f"matrices.{metric}": None})
    loaded = Recording.load(file)
    assert set(loaded.matrices) == set(METRICS) - {metric}
    assert loaded.steps == 5
    for other in loaded.matrices:
        solve(loaded, 3, 1, other)
    with pytest.raises(
        RecordingError, match=f"lacks the metric {metric}, .*again with 'blockcache calibrate'"
    ) as caught:
        solve(loaded, 3, 1, metric)
    assert str(caught.value).count("\n") == 0


def test_a_recording_keeps_metrics_that_this_code_does_not_know(file):
    newer = np.arange(50.0).reshape(2, 5, 5)
    rewrite(file, tensors={"matrices.angle": newer})
    Recording.load(file).save(file)
    loaded = Recording.load(file)
    assert set(loaded.matrices) == {*METRICS, "angle"}
    np.testing.assert_array_equal(loaded.matrix("angle", "layers.0.FFN"), newer[1])
    rewrite(file, tensors={"matrices.angle": np.zeros((2, 5, 4))})
    with pytest.raises(RecordingError, match="angle has shape"):
        Recording.load(file)


def test_a_failed_save_keeps_the_old_file(file, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match="No space left"):
        recorded(7).save(file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_matrix_of_a_block():
    recording = recorded()
    np.testing.assert_array_equal(recording.matrix("l1", "layers.0.FFN"), recording.matrices["l1"][1])
    with pytest.raises(RecordingError, match="unknown metric 'l2'"):
        recording.matrix("l2", "layers.0.FFN")
    with pytest.raises(RecordingError, match=r"no block 'layers\.1\.FFN'"):
        recording.matrix("l1", "layers.1.FFN")


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        recorded().generations = 3

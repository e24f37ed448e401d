"""Types and sizes are checked before anything is built of a file: each thing that once loaded and failed later."""

import io
import itertools
import json
import zipfile
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import blockcache as bc
from blockcache.errors import BlockcacheError, FileError, PolicyError, RecordingError, ScheduleError
from blockcache.files import parse_arrays
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.samplers import DDPM, SamplerConfig
from file_formats import NAMES, load_observations, policy, write_observations, write_policy, write_recording

DEEP: Any = 1
for _ in range(400):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [float("inf"), float("nan"), np.float32(1), np.int64(3), np.zeros(2), {1, 2}, object(), DEEP, {3: 4}, 2**70, b"x"],
    ids=lambda value: type(value).__name__,
)
def test_an_origin_that_no_file_can_hold_is_refused_at_creation(tmp_path, value):
    with pytest.raises(ScheduleError, match="the origin is a record that a file can hold") as caught:
        bc.Schedule(4, {"a": [0]}, origin={"seed": value})
    assert len(str(caught.value)) < 500
    recording = bc.Recording.load(write_recording(tmp_path))
    with pytest.raises(RecordingError, match="the origin is a record that a file can hold"):
        bc.Recording(**{**vars(recording), "origin": {"seed": value}})
    with pytest.raises(ScheduleError, match="the origin"):
        bc.Schedule(4, {"a": [0]}, origin=[1])


def test_an_origin_is_what_its_file_gives_back(tmp_path):
    given = {"tuple": (1, 2), "inner": [1]}
    schedule = bc.Schedule(4, {"a": [0]}, origin=given)
    given["inner"].append(2)
    schedule.save(tmp_path / "s.json")
    assert bc.Schedule.load(tmp_path / "s.json").origin == schedule.origin == {"tuple": [1, 2], "inner": [1]}


def test_limits_on_steps_blocks_and_names():
    bc.Schedule(10_000, {"a": [0]})
    for steps, names in ((10_001, ["a"]), (10**12, ["a"]), (4, [f"b{i}" for i in range(10_001)]), (4, ["x" * 201])):
        with pytest.raises(ScheduleError, match="at most"):
            bc.Schedule(steps, {name: [0] for name in names})
    for settings in (
        {"num_inference_steps": 10_001},
        {"timesteps": list(range(10_001, 0, -1))},
        {"timesteps": [10**400]},
    ):
        with pytest.raises(bc.BlockcacheError, match="sampler setting") as caught:
            DDPM(num_train_timesteps=100_000, **settings)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "settings", [{"type": ["ddpm"]}, {"type": "ddpm", "timesteps": [float("inf")]}, {"type": DEEP}]
)
def test_odd_sampler_settings(settings):
    with pytest.raises(bc.BlockcacheError, match="sampler setting"):
        SamplerConfig.from_dict(settings)


def with_header(data, change):
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode()).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def metadata_of(text, value):
    header = json.loads(text)
    return json.dumps({**header, "__metadata__": value})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: metadata_of(text, None), "is not a recording: its format is None"),
        (lambda text: metadata_of(text, []), "it needs an object under '__metadata__'"),
        (lambda text: metadata_of(text, {"blockcache": 3}), "it needs a text under '__metadata__.blockcache'"),
        (lambda text: metadata_of(text, {"blockcache": "[" * 5_000}), "not valid JSON"),
        (lambda text: text.replace('"scores":{', '"scores":{"dtype":"F64",', 1), "key 'dtype' appears twice"),
        (lambda text: text.replace('"F64"', '"F99"', 1), "cannot be read .*cut short, calibrate again"),
        (lambda text: text.replace('"shape":[2]', '"shape":[1000000000000]', 1), "cannot be read"),
        (lambda text: text.replace('"shape":[2]', '"shape":["2"]', 1), "a whole number under 'scores.shape"),
        (lambda text: text.replace('"shape":[2]', '"shape":[-2]', 1), "it needs 0 or more under"),
    ],
)
def test_odd_headers_of_tensors(tmp_path, change, sentence):
    path = write_recording(tmp_path)
    path.write_bytes(with_header(path.read_bytes(), change))
    with pytest.raises(FileError, match=sentence) as caught:
        bc.Recording.load(path)
    assert str(path) in str(caught.value)


def test_policy_weights_without_metadata_load(tmp_path):
    path = write_policy("model.safetensors", tmp_path)
    path.write_bytes(with_header(path.read_bytes(), lambda text: metadata_of(text, None)))
    expected, found = policy().state_dict(), bc.load_policy(path.parent).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [["layers.0.SA"], 3, None, {}, "x" * 300])
def test_names_of_blocks_are_texts(tmp_path, name):
    path = write_recording(tmp_path)
    data = path.read_bytes()
    tensors, header = safetensors.numpy.load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content = json.loads(header["__metadata__"]["blockcache"])
    content["blocks"][0]["name"] = name
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"blockcache": json.dumps(content)}))
    with pytest.raises(FileError, match=r"under 'blocks\[0\].name', got"):
        bc.Recording.load(path)


def test_blocks_of_a_recording_have_names_of_their_own_and_its_arrays_hold_floats(tmp_path):
    recording = bc.Recording.load(write_recording(tmp_path))
    twice = (recording.blocks[0], bc.Block(NAMES[0], "FFN", 1, 20))
    with pytest.raises(RecordingError, match="blocks of different names"):
        bc.Recording(**{**vars(recording), "blocks": twice})
    with pytest.raises(RecordingError, match="scores holds int64, expected floats"):
        bc.Recording(**{**vars(recording), "scores": np.zeros(2, dtype=np.int64)})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(({name: 10**12}, f"at most under '{name}'") for name in ("n_emb", "n_layer", "horizon", "obs_dim")),
        ({"n_cond_layers": 10**12}, "under 'n_cond_layers'"),
        ({"n_cond_layers": True}, "under 'n_cond_layers'"),
        ({"n_emb": 65_536}, "the weights do not fit the policy's config: .* numbers, expected 2 layers"),
        ({"n_layer": 1_000}, "the weights do not fit the policy's config"),
        ({"n_cond_layers": 1_000}, "the weights do not fit the policy's config"),
        ({"horizon": 100_000}, "the weights do not fit the policy's config"),
        ({"n_obs_steps": 50_000, "horizon": 60_000}, "the weights do not fit the policy's config"),
        ({"obs_dim": 100_000, "n_emb": 1_000}, "the weights do not fit the policy's config"),
        ({"p_drop_attn": False}, "under 'p_drop_attn'"),
        ({"training": [1]}, "it needs an object under 'training'"),
        ({"training": {"x": DEEP}}, "lists within lists"),
        ({"task": ["pusht"]}, "it needs a text under 'task'"),
        ({"weights": 3}, "it needs a text under 'weights'"),
        ({"x" * 10_000: 1}, "unknown policy settings xxx"),
        ({"family": ["x"] * 10_000}, "this reads policies of family 'dp-t'"),
    ],
)
def test_a_config_is_refused_before_a_network_is_made_of_it(tmp_path, monkeypatch, changes, sentence):
    path = write_policy("config.json", tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    monkeypatch.setattr(DiffusionTransformerPolicy, "__init__", lambda *args: pytest.fail("a network was made"))
    with pytest.raises((PolicyError, FileError), match=sentence) as caught:
        bc.load_policy(path.parent)
    assert len(str(caught.value)) < 800


def npy(shape, dtype="<f8", data=b""):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def npz(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        npy((10**12,)),
        npz({"obs.npy": npy((10**12,))}),
        npz({"obs.npy": npy((10**30, 10**30))}),
        npz({"obs.npy": npy((-1,))}),
        npz({"obs.npy": npy((2,), "|O", b"x" * 16)}),
        npz({"obs.npy": npy((3,), data=b"x" * 16)}),
        npz({"obs.npy": b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65_535}),
        npz({"obs.npy": npy((2,), "<f8", b"x" * 16)}).replace(b"PK\x01\x02", b"PK\x09\x02"),
        b"PK",
        b"nothing",
    ],
    ids=itertools.count(),
)
def test_arrays_that_are_not_in_the_file(data):
    with pytest.raises(
        FileError, match=r"cannot read the observations x\.npz .*; expected an \.npz file of plain arrays"
    ) as e:
        parse_arrays(data, "observations", "x.npz")
    assert len(str(e.value)) < 500


def test_a_packed_file_that_unfolds_to_far_more_than_it_is(monkeypatch):
    monkeypatch.setattr("blockcache_runtime.arrays._UNPACKED", 10**6)
    zeros = npz({"obs.npy": npy((1_000_000,), data=bytes(8_000_000))})
    assert len(zeros) < 20_000
    with pytest.raises(FileError, match="8,000,128 bytes are packed into"):
        parse_arrays(zeros, "observations", "x.npz")
    small = npz({"obs.npy": npy((1_000,), data=bytes(8_000)), "b.npy": npy((), data=bytes(8))})
    assert {name: array.shape for name, array in parse_arrays(small, "o", "x").items()} == {"obs": (1_000,), "b": ()}


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.array(1.0), "have shape"),
        (np.full((4, 2, 5), 1e200), "hold NaN or infinity"),
        (np.array([1j]), "are no numbers but complex128"),
        (np.ones((0, 2, 5)), "have shape"),
    ],
)
def test_odd_observations(tmp_path, array, sentence):
    path = write_observations(tmp_path)
    np.savez(path, obs=array)
    with pytest.raises(BlockcacheError, match=sentence):
        load_observations(path)

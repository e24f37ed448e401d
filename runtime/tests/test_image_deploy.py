"""An export with cameras: frames in, actions out, and no frame is looked at twice."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch

import blockcache as bc
from blockcache.engines.build import build
from blockcache.engines.loop import Loop
from blockcache.errors import FileError, ObservationError
from blockcache.models.registry import port_of
from blockcache.schedule import Schedule
from blockcache_runtime import History, Player, export, open_export
from image_policies import ENCODERS, image_policy, observed
from onnx_files import with_header

pytestmark = pytest.mark.usefixtures("exports_stay_here")

BLOCKS = [f"layers.{index}.{kind}" for index in range(2) for kind in ("SA", "CA", "FFN")]
REDUCED = Schedule(6, dict.fromkeys(BLOCKS, (0, 2, 4)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("cameras")
    for encoder in ENCODERS:
        bc.export_policy(image_policy(encoder), REDUCED, place / f"{encoder}.onnx")
    return place


@pytest.fixture
def one_camera(files):
    return open_export(files / "one camera.onnx", threads=1)


@pytest.fixture
def looks(monkeypatch):
    """How many moments each run looked at."""
    counted, run = [], export.run_session

    def counting(session, outputs, feed, **how):
        counted.append((len(feed["kept_features"]), len(feed["image"])))
        return run(session, outputs, feed, **how)

    monkeypatch.setattr(export, "run_session", counting)
    return counted


def arrays(encoder="one camera", **how):
    return {name: value.numpy() for name, value in observed(encoder, **how).items()}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_frames_in_and_actions_out(files, encoder):
    policy, exported = image_policy(encoder), open_export(files / f"{encoder}.onnx", threads=1)
    noise = policy.draw_noise(3, torch.Generator().manual_seed(0))
    frames = arrays(encoder, batch=3)
    found = exported.predict_action(frames, noise=noise.numpy())
    with bc.accelerate(policy, REDUCED, "patched"):
        expected = policy.predict_action(observed(encoder, 3), noise=noise)
    np.testing.assert_allclose(found["action_pred"], expected["action_pred"], atol=1e-5)
    assert set(found) == {"action", "action_pred"}
    assert (exported.n_obs_steps, exported.cameras) == (2, policy.config.cameras)
    assert {name: exported.sizes[name][1:] for name in policy.config.inputs} == {
        name: list(shape) for name, shape in policy.config.inputs.items()
    }
    fractions = {name: value / np.float32(255) if value.dtype == np.uint8 else value for name, value in frames.items()}
    again = exported.predict_action(fractions, noise=noise.numpy())
    np.testing.assert_array_equal(found["action"], again["action"])


def film(moments, seed=0):
    """What a robot sees, one moment after the other."""
    generator = np.random.default_rng(seed)
    return [
        {"image": generator.integers(0, 256, (3, 44, 76), dtype=np.uint8), "hand": generator.standard_normal(2)}
        for _ in range(moments)
    ]


def test_no_frame_is_looked_at_twice(files, one_camera, looks):
    history, fresh = History(2), []
    for number, moment in enumerate(film(6)):
        seen = history.push(moment)
        found = one_camera.predict_action(seen, seed=number)["action"]
        fresh.append((found, seen))
    # at the start the first frame fills the history
    assert looks == [(0, 2), *[(1, 1)] * 5]
    looks.clear()
    for number, (found, seen) in enumerate(fresh):  # the same to the last bit as by somebody who knows no frame
        newly = open_export(files / "one camera.onnx", threads=1)
        np.testing.assert_array_equal(found, newly.predict_action(seen, seed=number)["action"])
    assert looks == [(0, 2)] * 6


def test_a_frame_that_is_another_is_looked_at(one_camera, looks):
    first, second, third = film(3)
    stacked = lambda *moments: {name: np.stack([m[name] for m in moments])[None] for name in first}  # noqa: E731
    one_camera.predict_action(stacked(first, second), seed=0)
    changed = {**second, "image": second["image"].copy()}
    changed["image"][2, 43, 75] ^= 1  # outside of the crop, and no matter
    for seen, expected in (
        (stacked(second, third), (1, 1)),
        (stacked(changed, third), (0, 2)),
        (stacked(third, changed), (2, 0)),
        (stacked(third, second), (1, 1)),
        (stacked({**third, "hand": np.zeros(2)}, second), (2, 0)),  # numbers are no part of a frame
    ):
        one_camera.predict_action(seen, seed=0)
        assert looks[-1] == expected
    one_camera.predict_action(
        {name: np.concatenate([value] * 2) for name, value in stacked(second, third).items()}, seed=0
    )
    assert looks[-1] == (0, 2)  # another batch


def test_frames_can_be_looked_at_before_an_action_is_asked_for(files, one_camera, looks):
    """While the robot executes a chunk: the newest frame is all that is left to look at, or none at all."""
    history, moments = History(2), film(5)
    for moment in moments[:4]:
        one_camera.encode_frames(history.push(moment))
    assert looks == [(0, 2), (1, 1), (1, 1), (1, 1)]
    last = history.push(moments[4])
    found = one_camera.predict_action(last, seed=0)["action"]
    assert looks[-1] == (1, 1)
    one_camera.encode_frames(last)
    assert len(looks) == 5
    np.testing.assert_array_equal(one_camera.predict_action(last, seed=0)["action"], found)
    assert looks[-1] == (2, 0)
    newly = open_export(files / "one camera.onnx", threads=1)
    np.testing.assert_array_equal(newly.predict_action(last, seed=0)["action"], found)
    with pytest.raises(ObservationError, match="has no key 'image'"):
        one_camera.encode_frames({"hand": last["hand"]})
    # what looks is the encoder alone
    assert {item.name for item in one_camera._encoder_session.get_inputs()} == {"image", "kept_features"}
    assert [item.name for item in one_camera._encoder_session.get_outputs()] == ["features"]


def test_who_looks_needs_the_file_that_was_opened(files, tmp_path):
    path, frames = tmp_path / "policy.onnx", arrays(batch=1)
    path.write_bytes((files / "one camera.onnx").read_bytes())
    policy = open_export(path, threads=1)
    path.write_bytes((files / "two cameras shared.onnx").read_bytes())
    with pytest.raises(FileError, match="is another one than it was when it was opened"):
        policy.encode_frames(frames)
    path.unlink()
    with pytest.raises(FileError, match="the file does not exist"):
        policy.encode_frames(frames)
    assert policy.predict_action(frames, seed=0)["action"].shape == (1, 4, 3)


def test_every_warm_up_encodes_a_new_frame_and_the_first_of_a_player_makes_the_encoder(files, tmp_path, looks):
    path = tmp_path / "policy.onnx"
    path.write_bytes((files / "one camera.onnx").read_bytes())
    policy = open_export(path, threads=1)
    with Player(policy, rate_hz=1, replan=2) as player:
        assert looks == [(0, 2), (0, 2), (1, 1), (1, 1)]  # the encoder alone, then one generation after the other
        path.unlink()
        policy.encode_frames(arrays(batch=1))
        assert player.counters["failed"] == 0


def test_a_policy_without_cameras_has_nothing_to_look_at(make_policy, tmp_path, monkeypatch):
    bc.export_policy(make_policy(), None, tmp_path / "policy.onnx")
    policy, seen = open_export(tmp_path / "policy.onnx", threads=1), np.zeros((1, 2, 5))
    expected = policy.predict_action(seen, seed=0)["action"]
    with monkeypatch.context() as patch:
        patch.setattr(export, "run_session", lambda *given: pytest.fail("something was run"))
        policy.encode_frames(seen)
    np.testing.assert_array_equal(policy.predict_action(seen, seed=0)["action"], expected)
    with pytest.raises(ObservationError):  # it is checked all the same
        policy.encode_frames(np.zeros((1, 2, 4)))


def test_who_writes_into_a_frame_afterwards_does_no_harm(files, one_camera):
    """Drivers hand out the same memory again and again."""
    frames = {name: value.astype(np.float32) for name, value in arrays(batch=1, dtype=torch.float32).items()}
    one_camera.predict_action(frames, seed=0)
    frames["image"][:] = frames["image"][:, ::-1].copy()
    found = one_camera.predict_action(frames, seed=0)["action"]
    newly = open_export(files / "one camera.onnx", threads=1)
    np.testing.assert_array_equal(found, newly.predict_action(frames, seed=0)["action"])


def test_a_run_that_fails_leaves_what_was_known(one_camera, looks):
    first, second, _ = film(3)
    stacked = lambda *moments: {name: np.stack([m[name] for m in moments])[None] for name in first}  # noqa: E731
    one_camera.predict_action(stacked(first, second), seed=0)
    with pytest.raises(ObservationError, match="noise has shape"):
        one_camera.predict_action(stacked(second, first), noise=np.zeros(3))
    one_camera.predict_action(stacked(second, first), seed=0)
    assert looks == [(0, 2), (2, 0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda image: np.moveaxis(image, 2, -1), "channels come before height and width"),
        (lambda image: image[..., :70], "resize the frames to 44 x 76"),
        (lambda image: image.astype(np.float32), "holds floats up to 25.*divide by 255"),
        (lambda image: image.astype(np.int64), "holds int64, expected uint8 from 0 to 255"),
        (lambda image: image * np.float32("nan"), "'image' holds NaN or infinity"),
        (lambda image: image[:1], r"one batch size for all its keys, got {'image': 1, 'hand': 2}"),
        (lambda image: "image", "is not an array of numbers"),
    ],
)
def test_wrong_frames_are_refused_with_one_sentence(one_camera, change, said):
    frames = arrays()
    with pytest.raises(ObservationError, match=said):
        one_camera.predict_action({**frames, "image": change(frames["image"])})
    with pytest.raises(ObservationError, match="has no key 'image'"):
        one_camera.predict_action({"hand": frames["hand"]})
    with pytest.raises(ObservationError, match="must be a mapping with the keys image, hand"):
        one_camera.predict_action(frames["image"])


def test_a_camera_s_bytes_stay_bytes_in_a_history():
    seen = History(2).push(film(1)[0])
    assert (seen["image"].dtype, seen["hand"].dtype) == (np.uint8, np.float32)
    assert seen["image"].shape == (1, 2, 3, 44, 76)


ROBOT = """
import json, sys
sys.modules["torch"] = None
import numpy as np
from blockcache_runtime import History, open_export
policy, history = open_export({path!r}, threads=1), History(2)
camera = np.random.default_rng(0)
for _ in range(3):
    moment = {{"image": camera.integers(0, 256, (3, 44, 76), dtype=np.uint8), "hand": [0.5, -0.5]}}
    action = policy.predict_action(history.push(moment), seed=3)["action"]
print(json.dumps(action.tolist()))
"""


def test_a_camera_policy_runs_where_torch_cannot_be_imported(files):
    path = str(files / "one camera.onnx")
    done = subprocess.run([sys.executable, "-c", ROBOT.format(path=path)], capture_output=True, text=True, check=True)
    camera = np.random.default_rng(0)
    frames = np.stack([camera.integers(0, 256, (3, 44, 76), dtype=np.uint8) for _ in range(3)])[None, 1:]
    seen = {"image": frames, "hand": np.array([[[0.5, -0.5]] * 2])}
    expected = open_export(path, threads=1).predict_action(seen, seed=3)["action"]
    np.testing.assert_array_equal(json.loads(done.stdout), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": None}, "encoder"),
        ({"encoder": {"cameras": ["image"], "n_obs_steps": 3, "features": 7}}, "does not turn observations and noise"),
        ({"encoder": {"cameras": ["hand"], "n_obs_steps": 2, "features": 7}}, "does not turn observations and noise"),
        ({"encoder": {"cameras": [], "n_obs_steps": 2, "features": 7}}, "length of 1 or more"),
        ({"encoder": {"cameras": ["image"], "n_obs_steps": 2}}, "features"),
    ],
)
def test_a_header_that_is_wrong_about_its_encoder_is_refused(files, tmp_path, change, said):
    path = tmp_path / "policy.onnx"
    path.write_bytes((files / "one camera.onnx").read_bytes())
    with_header(path, **change)
    with pytest.raises(FileError, match=said):
        open_export(path, threads=1)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("Conv", "strides", [0, 0]),
        ("Conv", "pads", [10**6] * 4),
        ("MaxPool", "kernel_shape", [65, 3]),
        ("Conv", "strides", [-1, 2]),
    ],
)
def test_windows_that_do_harm_are_refused(files, tmp_path, kind, name, value):
    from onnx_files import hashed

    model = onnx.load(files / "one camera.onnx")
    node = next(node for node in model.graph.node if node.op_type == kind)
    (attribute,) = [item for item in node.attribute if item.name == name]
    attribute.ints[:] = value
    (tmp_path / "policy.onnx").write_bytes(hashed(model))
    with pytest.raises(FileError, match=f"its {kind} has {name}"):
        open_export(tmp_path / "policy.onnx", threads=1)


def test_the_graph_gives_the_features_of_all_moments(files):
    """For whoever runs it without us."""
    import onnxruntime

    policy, frames = image_policy(), observed(batch=1)
    session = onnxruntime.InferenceSession((files / "one camera.onnx").read_bytes())
    noise = policy.draw_noise(1, torch.Generator().manual_seed(0)).numpy()
    image = (frames["image"].float() / 255).numpy().swapaxes(0, 1)
    feed = {"image": image, "hand": frames["hand"].numpy(), "noise": noise}
    whole = dict(
        zip(
            ["action", "features"],
            session.run(["action", "features"], {**feed, "kept_features": image[:0, :, 0, 0, :7]}),
            strict=True,
        )
    )
    assert whole["features"].shape == (2, 1, 7)
    later = session.run(["action", "features"], {**feed, "image": image[1:], "kept_features": whole["features"][:1]})
    np.testing.assert_array_equal(later[0], whole["action"])
    np.testing.assert_array_equal(later[1], whole["features"])
    built = build(port_of(policy), REDUCED, "loop")
    loop = Loop(built.program, built.plan, built.sampler)
    found = loop.unchecked({"image": torch.tensor(image).transpose(0, 1), "hand": frames["hand"]}, torch.tensor(noise))
    np.testing.assert_allclose(found["features"], whole["features"], atol=1e-5)

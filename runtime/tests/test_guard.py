"""An export with a guard: what it finds outside, what repeated, and what is refused."""

import json

import numpy as np
import pytest

import blockcache as bc
from blockcache.observations.guard import fit
from blockcache_runtime import open_export
from blockcache_runtime.errors import ContentError, ObservationError
from blockcache_runtime.fields import read
from blockcache_runtime.guard import Guard, GuardWatch

SHAPES = {"obs": (2, 3)}


def moments(count, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    place = rng.normal(size=(count, 1, 3)) + offset
    return {"obs": (place + 0.1 * rng.normal(size=(count, 2, 3))).astype(np.float32)}


def test_fresh_observations_are_inside_and_shifted_ones_outside():
    guard = fit(moments(400), SHAPES, ())
    assert GuardWatch(guard).judge(moments(1000, seed=1)).outside.mean() < 0.03
    assert GuardWatch(guard).judge(moments(100, seed=1, offset=8)).outside.all()
    jumped = moments(100, seed=1)
    jumped["obs"][:, 0] += 3  # each moment is usual, the change is not
    assert GuardWatch(guard).judge(jumped).outside.mean() > 0.9


def test_a_sensor_that_stands_still_is_repeated():
    watch = GuardWatch(fit(moments(64), SHAPES, ()))
    first, second = moments(1, seed=1), moments(1, seed=2)
    assert [bool(watch.judge(one).repeated[0]) for one in (first, second, second)] == [False, False, True]
    assert watch.counts["repeated"] == 1
    assert watch.counts["judged"] == 3


def test_frames_are_looked_at():
    rng = np.random.default_rng(0)
    frames = rng.uniform(0.3, 0.5, size=(64, 1, 3, 20, 12)).astype(np.float32)
    watch = GuardWatch(fit({"image": frames}, {"image": (1, 3, 20, 12)}, ("image",)))
    assert not watch.judge({"image": rng.uniform(0.3, 0.5, size=(4, 1, 3, 20, 12)).astype(np.float32)}).outside.any()
    assert watch.judge({"image": np.full((1, 1, 3, 20, 12), 0.9, np.float32)}).outside.all()


@pytest.mark.parametrize(
    ("key", "value"), [("action", "stop"), ("inputs", {"obs": [2, 4]}), ("motion", None), ("newest", {"mean": []})]
)
def test_a_damaged_guard_is_refused(key, value):
    held = json.loads(json.dumps(fit(moments(64), SHAPES, ()).to_dict()))
    assert read(Guard, held).to_dict()["inputs"]["obs"] == (2, 3)
    with pytest.raises(ContentError):
        read(Guard, {**held, key: value})


def test_an_export_judges_and_acts_as_before(tmp_path, caplog):
    policy = bc.load_policy("pusht/tuned")
    seen = np.random.default_rng(0).uniform(100, 400, size=(64, 2, 20)).astype(np.float32)
    with pytest.raises(ObservationError, match="got none"):
        bc.export_policy(policy, None, tmp_path / "none.onnx", guard="warn")
    bc.export_policy(policy, None, tmp_path / "plain.onnx")
    bc.export_policy(policy, None, tmp_path / "guarded.onnx", guard="warn", observations=seen)
    plain, guarded = (open_export(tmp_path / f"{name}.onnx", threads=1) for name in ("plain", "guarded"))
    assert plain.watch is None
    usual, odd = guarded.predict_action(seen[:1], seed=0), guarded.predict_action(seen[1:2] + 5000, seed=0)
    np.testing.assert_array_equal(usual["action"], plain.predict_action(seen[:1], seed=0)["action"])
    assert usual["guard_score"][0] < 1 < odd["guard_score"][0]
    assert guarded.watch.counts == {"judged": 2, "outside": 1, "repeated": 0}
    assert "outside of what the policy was tuned on" in caplog.text

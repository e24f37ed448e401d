"""An export without torch: what a robot program gets from `blockcache_runtime`, against the policy it was made from."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blockcache as bc
from blockcache.errors import EngineError, FileError, ObservationError
from blockcache_runtime import History, open_export
from engine_comparison import SAMPLERS
from onnx_files import hashed, two_inputs


@pytest.fixture(scope="module")
def path(make_policy, schedule, tmp_path_factory):
    path = tmp_path_factory.mktemp("deploy") / "policy.onnx"
    bc.export_policy(make_policy(), schedule, path)
    return path


@pytest.fixture(scope="module")
def exported(path):
    return open_export(path, threads=1)


def toy(path, **changes):
    path.write_bytes(hashed(two_inputs(**changes)))
    return path


# -- without torch

ROBOT = """
import json, sys
sys.modules["torch"] = None
import numpy as np
from blockcache_runtime import History, open_export
policy = open_export({path!r})
seen = History(policy.n_obs_steps).push(np.arange(5))
found = {{name: array.tolist() for name, array in policy.predict_action(seen, seed=3).items()}}
assert "diffusers" not in sys.modules and "blockcache.engines" not in sys.modules
print(json.dumps(found))
"""


def test_a_generation_where_torch_cannot_be_imported(policy, schedule, path):
    code = ROBOT.format(path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    noise = np.random.default_rng(3).standard_normal((6, 1, 6, 3), dtype=np.float32)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = policy.predict_action(torch.arange(5.0).expand(1, 2, 5), noise=torch.from_numpy(noise))
    found = json.loads(done.stdout)
    assert set(found) == {"action", "action_pred"}
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_torch_really_cannot_be_imported_there(path):
    """Or the test above could not fail."""
    code = ROBOT.format(path=str(path)).replace("from blockcache_runtime", "import torch\nfrom blockcache_runtime")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
# -- what it says of itself


def test_a_robot_program_finds_what_it_needs(policy, exported, tmp_path):
    assert (exported.n_obs_steps, exported.n_action_steps, exported.horizon, exported.action_dim) == (2, 4, 6, 3)
    assert exported.sizes == {"obs": ["batch", 2, 5], "noise": [6, "batch", 6, 3]}
    assert exported.executed == (1, 5)
    assert exported.threads == 1
    assert exported.header["made_by"] == f"blockcache {bc.__version__}"
    assert exported.fingerprint.family == "dp-t"
    bc.export_policy(policy, None, tmp_path / "short.onnx", output="action")
    short = open_export(tmp_path / "short.onnx", threads=1)
    assert (short.n_action_steps, short.horizon) == (4, 6)
    assert set(short.predict_action(np.zeros((1, 2, 5)), seed=0)) == {"action"}


# -- noise


@given(batch=st.integers(1, 4), seed=st.integers(0, 2**64))
def test_noise_is_drawn_start_first_then_step_by_step(exported, batch, seed):
    rng = np.random.default_rng(seed)
    tensors = [rng.standard_normal((batch, 6, 3), dtype=np.float32) for _ in range(6)]
    np.testing.assert_array_equal(exported.draw_noise(batch, np.random.default_rng(seed)), tensors)


def test_noise_comes_from_a_seed_a_generator_the_caller_or_anew(exported):
    obs = np.zeros((2, 2, 5))
    act = lambda **how: exported.predict_action(obs, **how)["action"]  # noqa: E731
    generator = np.random.default_rng(7)
    expected = act(seed=7)
    np.testing.assert_array_equal(act(generator=generator), expected)
    assert not np.array_equal(act(generator=generator), expected), "a generator goes on where it was"
    np.testing.assert_array_equal(act(seed=7), expected)
    np.testing.assert_array_equal(act(noise=exported.draw_noise(2, np.random.default_rng(7))), expected)
    assert not np.array_equal(act(), act())
    assert not np.array_equal(exported.draw_noise(1), exported.draw_noise(1))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"seed": -1}, "a seed is a whole number, 0 or more, got -1"),
        ({"seed": "a"}, "a seed is a whole number, 0 or more, got 'a'"),
        ({"generator": torch.Generator()}, "from a generator of numpy .*, got Generator"),
        ({"generator": 5}, "from a generator of numpy .*, got int"),
        ({"generator": np.random.default_rng(0), "seed": 0}, "got both, with seed 0"),
        ({"noise": np.zeros((5, 1, 6, 3))}, r"noise has shape \(5, 1, 6, 3\), expected \(6, 1, 6, 3\); draw_noise"),
        ({"noise": np.full((6, 1, 6, 3), np.nan)}, "noise holds NaN or infinity; draw_noise makes it"),
        ({"noise": "a"}, "noise is not an array of numbers: its type is <U1"),
    ],
    ids=itertools.count(),
)
def test_noise_that_is_refused(exported, how, sentence):
    with pytest.raises(ObservationError, match=sentence):
        exported.predict_action(np.zeros((1, 2, 5)), **how)


# -- observations


def test_observations_of_any_numeric_kind(exported):
    obs = np.random.default_rng(0).integers(-3, 4, (1, 2, 5)).astype(np.float32)
    expected = exported.predict_action(obs, seed=0)["action"]
    assert expected.dtype == np.float32
    forms = [obs.astype(kind) for kind in ("f8", ">f4", ">f8", "f2", "i8", "i1")]
    forms += [
        obs.tolist(),
        obs[:, ::-1][:, ::-1],
        np.asfortranarray(obs),
        torch.from_numpy(obs),
        {"obs": obs, "more": 0},
    ]
    for form in forms:
        np.testing.assert_array_equal(exported.predict_action(form, seed=0)["action"], expected)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (np.zeros((1, 3, 5)), r"the observation has shape \(1, 3, 5\), expected \(batch, 2, 5\)"),
        (np.zeros((2, 5)), r"the observation has shape \(2, 5\), expected \(batch, 2, 5\)"),
        (np.zeros((0, 2, 5)), r"the observation has shape \(0, 2, 5\), expected"),
        (np.float32(1), r"the observation has shape \(\), expected"),
        (np.full((1, 2, 5), np.nan), "the observation holds NaN or infinity; check the sensor"),
        (np.full((1, 2, 5), 1e300), "the observation holds NaN or infinity; check the sensor"),
        (np.zeros((1, 2, 5), dtype=complex), "the observation is not an array of numbers: its type is complex128"),
        ([["a"], ["b"]], "the observation is not an array of numbers: its type is <U1"),
        ([[1, 2], [3]], "the observation is not an array of numbers: "),
        (None, "the observation is not an array of numbers: its type is object"),
        (torch.zeros(1, 2, 5, requires_grad=True), "the observation is not an array of numbers: Can't call numpy"),
        ({"state": np.zeros((1, 2, 5))}, r"the observation has no key 'obs', got \['state'\]"),
        ({"obs": {"obs": np.zeros((1, 2, 5))}}, "the observation is not an array of numbers: its type is object"),
    ],
    ids=itertools.count(),
)
def test_observations_that_are_refused(exported, wrong, sentence):
    with pytest.raises(ObservationError, match=sentence) as caught:
        exported.predict_action(wrong)
    assert "\n" not in str(caught.value)


def test_several_inputs_go_by_name(tmp_path):
    policy = open_export(toy(tmp_path / "toy.onnx"), threads=1)
    arm, ball = np.arange(8).reshape(2, 2, 2), np.array([[[10], [20]], [[30], [50]]])
    found = policy.predict_action({"ball": ball, "arm": arm}, noise=np.full((1, 2, 1, 3), 0.5))
    np.testing.assert_array_equal(found["action"], [[[1.5, 2.5, 15.5]], [[5.5, 6.5, 40.5]]])
    assert (policy.n_obs_steps, policy.n_action_steps) == (2, 1)
    history = History(2)
    history.push({"arm": [0, 0], "ball": [0]})
    found = policy.predict_action(history.push({"arm": [2, 4], "ball": [6]}), noise=np.zeros((1, 1, 1, 3)))
    np.testing.assert_array_equal(found["action"], [[[1, 2, 3]]])
    for wrong, sentence in (
        (arm, "must be a mapping with the keys arm, ball, got ndarray"),
        ({"arm": arm}, r"the observation has no key 'ball', got \['arm'\]"),
        ({"arm": arm, "ball": arm}, r"the observation 'ball' has shape \(2, 2, 2\), expected \(batch, 2, 1\)"),
        ({"arm": arm, "ball": ball[:1]}, "one batch size for all its keys, got {'arm': 2, 'ball': 1}"),
    ):
        with pytest.raises(ObservationError, match=sentence):
            policy.predict_action(wrong)


# -- files and threads


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"fingerprint": None},
            r"the ONNX file .*toy.onnx is garbled \(it needs an object under 'fingerprint', got None",
        ),
        ({"executed": [1]}, r"toy.onnx is garbled \(it needs a length of 2 .*under 'executed'.*export it again"),
        ({"executed": None}, r"toy.onnx is garbled \(it needs a list under 'executed', got None"),
        ({"executed": [1, 1]}, "executed is the first action and the one behind the last, got"),
        ({"executed": [0, True]}, r"it needs a whole number under 'executed\[1\]', got True"),
        ({"output": "all"}, "its output is 'all', expected 'chunk' or 'action'"),
        ({"version": 1}, "has format version 1, this blockcache reads version 3; .*make the file again"),
    ],
    ids=str,
)
def test_a_broken_header_is_refused(tmp_path, changes, sentence):
    with pytest.raises(FileError, match=sentence):
        open_export(toy(tmp_path / "toy.onnx", **changes), threads=1)


def test_threads_may_call_at_once(exported):
    rng = np.random.default_rng(0)
    cases = [(rng.standard_normal((1 + seed % 3, 2, 5)), seed) for seed in range(40)]
    act = lambda case: exported.predict_action(case[0], seed=case[1])["action"]  # noqa: E731
    expected = [act(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(act, cases), expected, strict=True):
            np.testing.assert_array_equal(found, alone)


def test_at_least_one_thread(path):
    with pytest.raises(EngineError, match="one thread at least, got 0"):
        open_export(path, threads=0)


# -- the torch face


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["ddpm", "ddpm, trailing", "ddim", "ddim, eta 0.7", "dpmsolver++, order 2"])
def test_the_same_generator_gives_the_policys_own_action(make_policy, observe, name, tmp_path, batch):
    policy = make_policy(sampler=SAMPLERS[name])
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    runner = bc.open_export(tmp_path / "policy.onnx", policy, threads=1)
    ours, theirs = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    for seed in range(2):  # the second chunk goes on where the first stopped
        found = runner.predict_action(observe(batch, seed), generator=ours)
        expected = policy.predict_action(observe(batch, seed), generator=theirs)
        for name in ("action", "action_pred"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)
    torch.manual_seed(5)
    found = runner.predict_action(observe(batch))["action"]
    torch.manual_seed(5)
    torch.testing.assert_close(found, policy.predict_action(observe(batch))["action"], atol=1e-5, rtol=0)


def test_the_torch_face_takes_what_torch_has(exported, path, observe):
    runner, obs = bc.open_export(path, threads=1), observe().bfloat16().requires_grad_()
    noise = runner.draw_noise(1, torch.Generator().manual_seed(0))
    expected = exported.predict_action(obs.detach().float().numpy(), noise=noise.numpy())["action"]
    for form in (obs, {"obs": obs.double()}, obs.detach().float().numpy()):
        np.testing.assert_array_equal(runner.predict_action(form, noise=noise)["action"], expected)

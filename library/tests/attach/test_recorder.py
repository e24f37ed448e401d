"""Calibration: the matrices are those of the features, the policy comes back unchanged, memory stays small."""

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.attach import recorder
from blockcache.errors import ObservationError, PolicyError, RecordingError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM
from blockcache.solvers.recording import METRICS
from engine_comparison import snapshot


def calibrate(policy, observations, *args, **options):
    return bc.calibrate(policy, observations, *args, progress=False, **options)


class Features:
    """Every block's residual at every step, (K, B, F), caught with forward hooks during a generation."""

    def __init__(self, policy):
        self.found = {}
        self.hooks = []
        decoder = policy.model.decoder is not None
        for index, layer in enumerate((policy.model.decoder if decoder else policy.model.encoder).layers):
            last = layer.dropout3 if decoder else layer.dropout2
            modules = {"SA": layer.dropout1, "FFN": last} | ({"CA": layer.dropout2} if decoder else {})
            for kind, module in modules.items():
                self.hooks.append(module.register_forward_hook(self._hook(f"layers.{index}.{kind}")))

    def _hook(self, name):
        return lambda module, args, out: self.found.setdefault(name, []).append(out.flatten(1).double().numpy())

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def pairwise_mean(features, distance):
    """Mean over samples of distance(step i, step j), by loops."""
    steps, samples, _ = features.shape
    matrix = np.zeros((steps, steps))
    for i in range(steps):
        for j in range(steps):
            matrix[i, j] = np.mean([distance(features[i, b], features[j, b]) for b in range(samples)])
    return matrix


DISTANCES = {
    "cosine": lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "mse": lambda a, b: np.mean((a - b) ** 2),
    "l1": lambda a, b: np.mean(np.abs(a - b)),
    "wasserstein": lambda a, b: np.mean(np.abs(np.sort(a) - np.sort(b))),
}


def test_matrices_and_scores_are_those_of_the_features(make_policy, observe, form):
    policy = make_policy(**form)
    features = Features(policy)
    recording = calibrate(policy, [observe(2), observe(1, seed=1), observe(3, seed=2)])
    parts = {}
    for name, steps in features.found.items():  # K steps of each part of each batch, one part behind the other
        chunks = [np.stack(steps[start : start + 6]) for start in range(0, len(steps), 6)]
        parts[name] = np.concatenate(chunks, axis=1)
    features.remove()
    assert [block.name for block in recording.blocks] == [block.name for block in port_of(policy).adapter.blocks]
    assert (recording.samples, recording.generations, recording.steps) == (6, 3, 6)
    for index, block in enumerate(recording.blocks):
        found = parts[block.name]
        assert found.shape[:2] == (6, 6)
        for metric, distance in DISTANCES.items():
            expected = pairwise_mean(found, distance)
            np.testing.assert_allclose(recording.matrix(metric, block.name), expected, rtol=1e-6, atol=1e-9)
        score = pairwise_mean(found, lambda a, b: np.sum(np.abs(a - b))).mean()
        assert recording.scores[index] == pytest.approx(score, rel=1e-6)
    assert set(DISTANCES) == set(METRICS)


def test_output_change_is_that_of_the_stack(make_policy, observe, form):
    policy = make_policy(**form)
    stack = (policy.model.decoder or policy.model.encoder).layers
    ends = []
    stack[0].register_forward_pre_hook(lambda module, args: ends.append([args[0].double()]))
    stack[-1].register_forward_hook(lambda module, args, out: ends[-1].append(out.double()))
    recording = calibrate(policy, [observe(1)])
    residuals = [(out - x).flatten() for x, out in ends]
    changes = [float((m - b).abs().mean() / b.abs().mean()) for b, m in itertools.pairwise(residuals)]
    np.testing.assert_allclose(recording.output_change, [changes], rtol=1e-4)
    assert recording.input_change.shape == recording.output_change.shape == (1, 5)


def test_it_is_the_full_policy_that_is_recorded(policy, observe, run):
    """The recorded generation is the plain one: same noise, same action."""
    seen = []
    hook = policy.model.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    calibrate(policy, [observe(1)], seed=2)
    recorded = list(seen)
    seen.clear()
    policy.predict_action(observe(1), noise=policy.draw_noise(1, torch.Generator().manual_seed(3 * 1_000_003)))
    hook.remove()
    assert len(recorded) == len(seen) == 6
    for one, other in zip(recorded, seen, strict=True):
        assert torch.equal(one, other)


def close(one, other, tolerance=1e-6):
    for metric in METRICS:
        np.testing.assert_allclose(one.matrices[metric], other.matrices[metric], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(one.scores, other.scores, rtol=tolerance)
    np.testing.assert_allclose(one.input_change, other.input_change, rtol=1e-4, atol=tolerance)
    np.testing.assert_allclose(one.output_change, other.output_change, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("held", [1, 20_000, 10**9])
def test_parts_of_any_size_give_the_same_recording(policy, observe, monkeypatch, held):
    """One sample at a time, a few, all at once. (Rounding differs with the batch size, hence not bit by bit.)"""
    expected = calibrate(policy, [observe(5), observe(3, seed=1)])
    sizes = []
    policy.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    monkeypatch.setattr(recorder, "FEATURE_BYTES", held)
    recording = calibrate(policy, [observe(5), observe(3, seed=1)])
    assert sum(sizes) == 8 * 6
    assert max(sizes) == {1: 1, 20_000: 1, 10**9: 4}[held] or held == 20_000
    close(recording, expected)


def test_a_recording_depends_on_the_seed_alone(policy, observe):
    first, again, other = (calibrate(policy, [observe(2)], seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.matrices["l1"], again.matrices["l1"])
    assert not np.allclose(first.matrices["l1"], other.matrices["l1"])
    assert first.origin["seed"] == 1


def test_torchs_generator_is_left_alone(policy, observe):
    before = torch.get_rng_state()
    calibrate(policy, [observe(2)])
    assert torch.equal(torch.get_rng_state(), before)


def test_observations_in_any_container(policy, observe):
    batches = [observe(2), observe(1, seed=1)]
    expected = calibrate(policy, batches)
    kinds = [
        tuple(batches),
        iter(batches),
        (batch for batch in batches),
        [{"obs": batch} for batch in batches],
        [{"obs": batch, "note": "a text is not one value per sample"} for batch in batches],
        [batch.numpy() for batch in batches],
    ]
    for observations in kinds:
        close(calibrate(policy, observations), expected, tolerance=0)


def test_a_single_batch_is_not_taken_for_a_list_of_them(policy, observe):
    for single in (observe(4), observe(4).numpy(), {"obs": observe(4)}):
        with pytest.raises(ObservationError, match=r"needs a list of batches.*given as obs.split\(1\)"):
            bc.calibrate(policy, single)
    listed, stacked = (
        bc.calibrate(policy, form, progress=False) for form in (observe(4).split(1), observe(4)[:, None])
    )
    assert listed.generations == stacked.generations == 4


def test_generations_limits_the_observations(policy, observe):
    drawn = []

    def endless():
        while True:
            drawn.append(observe(1, seed=len(drawn)))
            yield drawn[-1]

    recording = calibrate(policy, endless(), generations=3)
    assert (recording.generations, len(drawn)) == (3, 3)
    assert calibrate(policy, [observe(1)] * 2, 5).generations == 2


@pytest.mark.parametrize("observations", [[], iter(())])
def test_no_observations(policy, observations):
    with pytest.raises(RecordingError, match="at least one observation, got none"):
        calibrate(policy, observations)
    assert "predict_action" not in vars(policy)


@pytest.mark.parametrize("generations", [0, -1])
def test_no_generations(policy, observe, generations):
    with pytest.raises(RecordingError, match="at least one generation"):
        calibrate(policy, [observe()], generations)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.full((1, 2, 5), float("nan")), "NaN or infinity"),
        (torch.zeros(1, 2, 4), "expected"),
        (torch.zeros(0, 2, 5), "must be a tensor"),
        (torch.zeros(5), "must be a tensor"),
        ("obs", "must be a tensor .* got str"),
        ({}, "must be a tensor"),
        ({"obs": torch.zeros(2, 2, 5), "image": torch.zeros(3, 4)}, "mixes batches of 2 and 3 samples"),
    ],
)
def test_wrong_observations(policy, observe, run, batch, sentence):
    plain = run(policy, observe())
    with pytest.raises(ObservationError, match=sentence):
        calibrate(policy, [observe(), batch])
    assert "predict_action" not in vars(policy)
    assert torch.equal(run(policy, observe()), plain)


@pytest.mark.parametrize("fails", [False, True])
def test_the_policy_comes_back_unchanged(make_policy, observe, run, form, fails):
    policy = make_policy(**form)
    plain, state = run(policy, observe(2)), {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    before = snapshot(policy)

    def observations():
        yield observe(2)
        if fails:
            raise RuntimeError("the data ran out")

    if fails:
        with pytest.raises(RuntimeError, match="the data ran out"):
            calibrate(policy, observations())
    else:
        calibrate(policy, observations())
    for (module, were), (_, are) in zip(before, snapshot(policy), strict=True):
        assert were.keys() == are.keys(), module
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    assert torch.equal(run(policy, observe(2)), plain)


def test_an_error_in_the_middle_of_a_generation(policy, observe, run):
    plain, calls = run(policy, observe()), []
    hook = policy.model.head.register_forward_hook(lambda *args: calls.append(1) or (len(calls) == 4 and 1 / 0) or None)
    with pytest.raises(ZeroDivisionError):
        calibrate(policy, [observe(2)])
    hook.remove()
    assert "predict_action" not in vars(policy)
    assert torch.equal(run(policy, observe()), plain)


def test_weights_with_nan_are_refused(policy, observe):
    with torch.no_grad():
        policy.model.decoder.layers[1].linear2.bias[0] = float("nan")
    with pytest.raises(RecordingError, match=r"layers\.[01]\..* gave NaN or infinity; check the policy's weights"):
        calibrate(policy, [observe()])


def test_train_mode_is_refused(make_policy, observe):
    with pytest.raises(PolicyError, match="train mode"):
        calibrate(make_policy(p_drop_attn=0.1).train(), [observe()])


def test_somebody_else_using_the_policy_meanwhile_is_not_recorded(policy, observe, run):
    """Another thread generates in the middle of each recorded generation; neither sees the other."""
    expected, plain, guests = calibrate(policy, [observe(2)]), run(policy, observe(3, seed=7)), []
    main = threading.get_ident()

    def visit(*args):
        if threading.get_ident() == main:
            guest = threading.Thread(target=lambda: guests.append(run(policy, observe(3, seed=7))))
            guest.start()
            guest.join()

    hook = policy.model.head.register_forward_hook(visit)
    recording = calibrate(policy, [observe(2)])
    hook.remove()
    assert recording.samples == 2
    close(recording, expected, tolerance=0)
    assert len(guests) == 12
    assert all((guest - plain).abs().max() < 1e-5 for guest in guests)


def test_one_step_is_a_recording_too(make_policy, observe):
    policy = make_policy(sampler=DDIM(num_inference_steps=1))
    recording = calibrate(policy, [observe(2)])
    assert recording.steps == 1
    assert bc.solve(recording, updates=1).reused_share == 0.0


def test_the_whole_way(policy, observe, run, tmp_path):
    """Record, save, load, solve, save, load, accelerate."""
    calibrate(policy, [observe(4)]).save(tmp_path / "r.safetensors")
    recording = bc.Recording.load(tmp_path / "r.safetensors")
    for updates, method in ((6, "bac"), (3, "bac"), (2, "unified"), (2, "uniform"), (2, "blockwise")):
        bc.solve(recording, updates=updates, union=2, method=method).save(tmp_path / "s.json")
        schedule, plain = bc.Schedule.load(tmp_path / "s.json"), run(policy, observe(2))
        with bc.accelerate(policy, schedule, engine="patched") as fast:
            assert torch.equal(run(fast, observe(2)), plain) == (updates == 6)
            assert fast.stats().notes == ()
            assert fast.stats().reused_share == pytest.approx(schedule.reused_share)


MEMORY = """
import torch
import blockcache as bc
from blockcache.attach import recorder
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig

class Enough(Exception): pass

def peak():  # of this process alone: getrusage's peak begins at that of the parent
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def first_part_and_more(name, metric, calls=[]):
    def call(features):
        calls.append(name)
        if len(calls) > 24 * 4 + 24 * 2:
            raise Enough
        return metric(features)
    return call

torch.set_num_threads(1)
config = DPTConfig(obs_dim=20, action_dim=2, horizon=16, n_obs_steps=2, n_action_steps=8)
policy = DiffusionTransformerPolicy(config).eval()
obs = torch.randn(8, 2, 20)
policy.predict_action(obs)  # whatever one plain generation takes is not ours
recorder.METRICS = {name: first_part_and_more(name, metric) for name, metric in recorder.METRICS.items()}
before = peak()
try:
    bc.calibrate(policy, [obs], progress=False)
except Enough:
    print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_peak_memory():
    """24 blocks, K = 100, width 256, a batch of 8, of which all features at once would be 314 MB in float32.

    Most of the time goes into reducing them, of which the peak needs no more than the beginning: the first sample, by
    itself, and some of the first part of full size.
    """
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert 20 < int(done.stdout) / 1024 < 300

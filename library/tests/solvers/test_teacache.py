"""TeaCache: the whole stack is computed again when its input has drifted far enough, for each sample by itself."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache import TeaCacheRule
from blockcache.errors import EngineError, RecordingError, ScheduleError
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM

STEPS = 12
INPUT_CHANGE = (1.0, 0.0)  # the estimate is the input's change itself


@pytest.fixture
def policy(make_policy):
    return make_policy(sampler=DDPM(num_inference_steps=STEPS))


@pytest.fixture
def recording(policy, observe):
    return bc.calibrate(policy, [observe(3), observe(2, seed=1)], progress=False)


def changes(policy, obs, noise):
    """mean|m_t - m_(t-1)| / mean|m_(t-1)| of the first norm's output in a full run: (K - 1, B)."""
    seen = []
    layer = (policy.model.decoder or policy.model.encoder).layers[0]
    hook = layer.norm1.register_forward_hook(lambda module, args, out: seen.append(out.double().flatten(1)))
    policy.predict_action(obs, noise=noise)
    hook.remove()
    ratios = [(m - b).abs().mean(1) / b.abs().mean(1) for b, m in itertools.pairwise(seen)]
    return torch.stack(ratios)


@pytest.mark.parametrize("coefficients", [(0.0,), (0.0, 0.0, 0.0, 0.0, 0.0), INPUT_CHANGE])
def test_threshold_zero_computes_everything_bit_identically(policy, observe, run, coefficients):
    """Even where the estimated change is 0."""
    plain = run(policy, observe(3))
    with bc.accelerate(policy, TeaCacheRule(coefficients, 0.0, STEPS)) as fast:
        assert torch.equal(run(fast, observe(3)), plain)
        assert fast.stats().reused_share == 0.0


def test_threshold_zero_in_every_form(make_policy, observe, run, form):
    """The layers' own forward runs, so the encoder-only form keeps torch's fast path and is bit-identical too."""
    policy = make_policy(**form)
    plain = run(policy, observe(3))
    with bc.accelerate(policy, TeaCacheRule(INPUT_CHANGE, 0.0, 6)):
        assert torch.equal(run(policy, observe(3)), plain)
    assert torch.equal(run(policy, observe(3)), plain)


def test_a_huge_threshold_computes_the_first_and_the_last_step(policy, observe, run):
    calls = []
    with bc.accelerate(policy, TeaCacheRule(INPUT_CHANGE, 1e9, STEPS)) as fast:
        policy.model.decoder.layers[1].linear1.register_forward_hook(lambda *args: calls.append(1))
        run(fast, observe(3))
    assert len(calls) == 2
    assert set(fast.stats().computed.values()) == {2 * 3}
    assert set(fast.stats().reused.values()) == {(STEPS - 2) * 3}


def test_the_stack_residual_is_added_again(policy, observe, run):
    streams = []
    layers = policy.model.decoder.layers
    layers[0].register_forward_pre_hook(lambda module, args: streams.append([args[0].clone()]))
    layers[-1].register_forward_hook(lambda module, args, out: streams[-1].append(out.clone()))
    with bc.accelerate(policy, TeaCacheRule(INPUT_CHANGE, 1e9, STEPS)):
        run(policy, observe(2))
    residual = streams[0][1] - streams[0][0]
    for x, out in streams[1:-1]:
        assert torch.equal(out, x + residual)
    assert not torch.equal(streams[-1][1], streams[-1][0] + residual)


def test_the_decision_follows_the_rule(policy, observe):
    """Recomputed by hand, step by step, from the inputs that the accelerated run really had."""
    rule = TeaCacheRule((0.5, 0.1, 0.02), 0.3, STEPS)
    obs, noise = observe(1), policy.draw_noise(1, torch.Generator().manual_seed(3))
    inputs, computed = [], []
    layer = policy.model.decoder.layers[0]
    policy.model.register_forward_pre_hook(lambda *args: computed.append(False))
    layer.self_attn.register_forward_hook(lambda *args: computed.__setitem__(-1, True))
    layer.register_forward_pre_hook(lambda module, args: inputs.append(layer.norm1(args[0]).double()))
    with bc.accelerate(policy, rule) as fast:
        policy.predict_action(obs, noise=noise)
    drift, expected = 0.0, [True]
    for before, value in itertools.pairwise(inputs):
        change = float((value - before).abs().mean() / before.abs().mean())
        drift += abs(0.5 * change**2 + 0.1 * change + 0.02)
        expected.append(drift >= 0.3)
        drift = 0.0 if expected[-1] else drift
    expected[-1] = True
    assert computed == expected
    assert 2 < sum(expected) < STEPS
    assert set(fast.stats().computed.values()) == {sum(expected)}


def test_each_sample_decides_for_itself(policy, observe):
    """In company or alone: the same decisions and the same action."""
    obs, noise = observe(4), policy.draw_noise(4, torch.Generator().manual_seed(1))
    rule = TeaCacheRule(INPUT_CHANGE, 0.35, STEPS)
    with bc.accelerate(policy, rule) as fast:
        together = policy.predict_action(obs, noise=noise)["action_pred"]
        total = fast.stats().computed["layers.0.SA"]
    alone = []
    for b in range(4):
        with bc.accelerate(policy, rule) as fast:
            action = policy.predict_action(obs[b : b + 1], noise=noise[:, b : b + 1])["action_pred"]
            torch.testing.assert_close(action[0], together[b], rtol=1e-4, atol=1e-4)
            alone.append(fast.stats().computed["layers.0.SA"])
    assert sum(alone) == total
    assert len(set(alone)) > 1, "the samples of this test should not all decide alike"


def test_disable_and_errors(policy, observe, run):
    plain = run(policy, observe(2))
    rule = TeaCacheRule(INPUT_CHANGE, 0.3, STEPS)
    with bc.accelerate(policy, rule) as fast:
        right = run(fast, observe(2))
        hook = policy.model.ln_f.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(fast, observe(5))
        hook.remove()
        assert torch.equal(run(fast, observe(2)), right)
        assert fast.engine == "patched"
    assert torch.equal(run(policy, observe(2)), plain)


@pytest.mark.parametrize("options", [{"engine": "loop"}, {"engine": "onnx"}])
def test_only_the_patched_engine_can_follow_a_rule(policy, options):
    with pytest.raises(EngineError):
        bc.accelerate(policy, TeaCacheRule(INPUT_CHANGE, 0.3, STEPS), **options)
    assert "predict_action" not in vars(policy)


def test_a_rule_for_another_number_of_steps_is_refused(policy):
    with pytest.raises(ScheduleError, match="steps 12 instead of 10"):
        bc.accelerate(policy, TeaCacheRule(INPUT_CHANGE, 0.3, 10))


def test_a_rule_for_other_weights_is_refused(policy, recording, make_policy):
    other = make_policy(seed=1, sampler=policy.config.sampler)
    rule = bc.fit_teacache(recording, 0.3)
    with pytest.raises(ScheduleError, match="weights"):
        bc.accelerate(other, rule)
    with bc.accelerate(other, rule, check="shape") as fast:
        assert fast.stats().notes == ("the schedule was made for other weights",)


@pytest.mark.parametrize("threshold", [-0.1, np.nan, np.inf])
def test_wrong_thresholds(recording, threshold):
    with pytest.raises(RecordingError, match="finite number of at least 0"):
        bc.fit_teacache(recording, threshold)


@pytest.mark.parametrize("coefficients", [(), (1.0, np.nan), (np.inf,)])
def test_wrong_coefficients(coefficients):
    with pytest.raises(RecordingError, match="coefficients must be finite"):
        TeaCacheRule(coefficients, 0.1, 10)


def test_the_recorded_changes(policy, observe):
    """What the rule is fitted to: per sample, of the first block's normalised input."""
    obs = observe(1)
    recording = bc.calibrate(policy, [obs], seed=4, progress=False)
    noise = policy.draw_noise(1, torch.Generator().manual_seed(5 * 1_000_003))
    expected = changes(policy, obs, noise).T.numpy()
    np.testing.assert_allclose(recording.input_change, expected, rtol=1e-5)


def test_fit_finds_a_polynomial(recording):
    """Output change made from the input change by a known polynomial comes back."""
    x = np.linspace(0.1, 2.0, recording.input_change.size).reshape(recording.input_change.shape)
    truth = np.array([0.2, -0.5, 0.3, 1.0, 0.05])
    made = replace(recording, input_change=x, output_change=np.polyval(truth, x))
    rule = bc.fit_teacache(made, 0.3)
    np.testing.assert_allclose(rule.coefficients, truth, rtol=1e-6)
    assert (rule.threshold, rule.steps) == (0.3, STEPS)
    assert rule.fingerprint.weights == recording.fingerprint.weights


def test_fit_pads_a_flat_polynomial(recording):
    x = np.linspace(0.1, 2.0, recording.input_change.size).reshape(recording.input_change.shape)
    rule = bc.fit_teacache(replace(recording, input_change=x, output_change=0 * x), 0.3)
    assert len(rule.coefficients) == 5
    np.testing.assert_allclose(rule.coefficients, 0, atol=1e-12)


def test_fit_refuses_too_little(recording):
    flat = replace(recording, input_change=np.ones_like(recording.input_change))
    with pytest.raises(RecordingError, match="more than 4 different recorded changes, got 1"):
        bc.fit_teacache(flat, 0.3)


def test_a_fitted_rule_saves_something(policy, recording, observe, run):
    assert port_of(policy).adapter.family == recording.fingerprint.family
    shares = []
    for threshold in (0.0, 0.5, 5.0):
        with bc.accelerate(policy, bc.fit_teacache(recording, threshold)) as fast:
            run(fast, observe(2, seed=9))
            shares.append(fast.stats().reused_share)
    assert shares[0] == 0.0
    assert shares[0] < shares[1] <= shares[2] <= (STEPS - 2) / STEPS

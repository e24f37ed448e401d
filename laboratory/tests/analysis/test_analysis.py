"""The analyses on policies whose answers are known: a stack of arithmetic, and DP-T against torch's own derivatives."""

import numpy as np
import pytest
import torch

from blockcache import Schedule
from blockcache.attach.recorder import calibrate
from blockcache.models.registry import port_of
from blockcache.observations import batch_size
from blockcache.solvers import solve
from blockcache_lab.analysis.caching import caching_errors, error_correlation, feature_maps, weaker_policy
from blockcache_lab.analysis.feed_forward import (
    ffn_response,
    linear_response,
    parts_of,
    stages,
    sublayer_errors,
    weight_norms,
)
from blockcache_lab.analysis.homogeneity import homogeneity, sample_matrices, schedule_stability
from blockcache_lab.analysis.recorded import action_costs, similarity
from blockcache_lab.analysis.residuals import every_step, in_parts
from blockcache_lab.analysis.section import AnalysisError
from toy_stack import SIZES, STEPS, TOKENS, WIDTH, nothing_seen, stack

UPSTREAM, DOWNSTREAM = "layers.0.FFN", "layers.1.FFN"


def every(**changes):
    """All blocks at all steps, but for those that are named."""
    full = every_step(stack())
    return Schedule(STEPS, {**full.updates, **{name.replace("_", "."): steps for name, steps in changes.items()}})


def test_similarity_curves_are_the_diagonals_beside_the_main_one():
    found = similarity(calibrate(stack(), [torch.ones(1, 1, WIDTH)], progress=False))
    assert found.lags == (1, 5)  # of those that six steps allow
    np.testing.assert_allclose(found.cosine, 1, atol=1e-6)  # all multiples of one vector
    assert found.curve(0, 5).shape == (1,)
    marked = similarity(calibrate(stack(), [torch.ones(1, 1, WIDTH)], progress=False), lags=(2,)).curve(1, 2)
    assert marked.shape == (STEPS - 2,)


def test_caching_error_of_a_known_block_under_two_schedules():
    """The upstream FFN adds 1, 2, 4, 8 and reuses the 2 of step 1 at steps 2 and 3: half and a quarter of the truth."""
    schedules = {"full": every(), "late": every(layers_0_FFN=(0, 1, 4, 5))}
    found = caching_errors(stack(), schedules, [nothing_seen(2)])
    assert not found.of("full")[0].any()
    errors, updates = found.of("late")
    np.testing.assert_allclose(errors[1], [0, 0, 0.5, 0.75, 0, 0], atol=1e-6)
    np.testing.assert_allclose(errors[2], errors[1], atol=1e-6)  # half the stream is as wrong as the stream
    assert updates[1].tolist() == [True, True, False, False, True, True]
    assert found.reuse_induced("late") == pytest.approx((0.5 + 0.75) / 2)
    assert found.update_induced("late") == pytest.approx((0.5 + 0.75) / 16)  # downstream; the others are 0
    with pytest.raises(AnalysisError, match="no schedule 'other' here, there are full, late"):
        found.of("other")
    with pytest.raises(AnalysisError, match="and there is none"):
        caching_errors(stack(), {}, [nothing_seen()])


def test_errors_correlate_fully_where_the_downstream_is_linear():
    found = error_correlation(stack(), [nothing_seen(2)], betas=(0.0, 0.5, 1.0, 2.0), step=2)
    assert (found.upstream, found.downstream) == (UPSTREAM, DOWNSTREAM)
    expected = [abs(SIZES[0] - size) / size for size in SIZES[1:]]
    np.testing.assert_allclose(found.upstream_errors, expected, rtol=1e-6)
    np.testing.assert_allclose(found.downstream_errors, expected, rtol=1e-6)
    assert found.r == pytest.approx(1)
    np.testing.assert_allclose(found.beta_upstream, np.array([0, 0.5, 1, 2]) * 0.75, atol=1e-6)
    np.testing.assert_allclose(found.beta_downstream, found.beta_upstream, atol=1e-6)
    assert found.beta_r == pytest.approx(1)
    with pytest.raises(AnalysisError, match="the step must be from 1 to 5, got 0"):
        error_correlation(stack(), [nothing_seen()], step=0)
    with pytest.raises(AnalysisError, match="no block"):
        error_correlation(stack(), [nothing_seen()], upstream="layers.9.FFN")


def test_feature_maps_show_what_was_reused_and_where_it_was_computed():
    found = feature_maps(stack(), every(layers_0_FFN=(0, 3)), [UPSTREAM], nothing_seen(2), named="late")
    assert found.truth.shape == (1, STEPS, WIDTH)
    np.testing.assert_allclose(found.truth[0, :, 0], SIZES)
    np.testing.assert_allclose(found.cached[0, :, 0], [1, 1, 1, 8, 8, 8])
    np.testing.assert_allclose(found.difference[0, :, 0], [0, 1, 3, 0, 8, 24])
    assert found.updates[0].tolist() == [True, False, False, True, False, False]
    with pytest.raises(AnalysisError, match="no block 'nothing'"):
        feature_maps(stack(), every(), ["nothing"], nothing_seen())


def test_homogeneity_of_known_observations():
    """layers.0.SA adds the observation: of four, two are alike and two are at a right angle to those and to one another."""
    seen = np.zeros((4, 1, WIDTH), dtype=np.float32)
    seen[[0, 1, 2, 3], 0, [0, 0, 1, 2]] = 1
    found = homogeneity(stack(), [seen[:3], seen[3:]], separate=True)
    assert found.at == (0, 1, 2, 3, 4, 5)
    np.testing.assert_allclose(found.mean[0], 1 / 6, atol=1e-6)  # one pair of six
    np.testing.assert_allclose(found.std[0], np.std([1, 0, 0, 0, 0, 0]), atol=1e-6)
    np.testing.assert_allclose(found.every_step[0], 1 / 6, atol=1e-6)
    np.testing.assert_allclose(found.one_noise, found.every_step, atol=1e-6)  # the sample has no part in it
    np.testing.assert_allclose(found.mean[1], 1, atol=1e-6)  # the FFN adds the same to all
    assert found.statistics["MinMean"] == pytest.approx(1 / 6, abs=1e-6)
    assert found.statistics["AvgMean"] == pytest.approx(float(found.mean.mean()))
    np.testing.assert_allclose(found.every_step, found.mean, atol=1e-6)  # all steps are among the evenly spaced
    assert (found.block, found.step, found.episodes) == (DOWNSTREAM, 5, 4)
    np.testing.assert_allclose(np.diag(found.between), 1, atol=1e-6)
    assert found.between[0, 1] == pytest.approx(1, abs=1e-6)
    one, other = (32 + seen[place, 0] for place in (0, 2))  # the stream: half of it points where all of it does
    assert found.between[0, 2] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other), abs=1e-6)
    assert found.two.shape == (2, STEPS, STEPS)
    with pytest.raises(AnalysisError, match="compares episodes, and there is 1"):
        homogeneity(stack(), [nothing_seen(1)])
    with pytest.raises(AnalysisError, match="no block 'nothing'"):
        homogeneity(stack(), [seen], block="nothing")


@pytest.mark.parametrize("takes_noise", [True, False])
def test_with_one_noise_the_same_observation_gives_the_same_features(port, observe, takes_noise, monkeypatch):
    monkeypatch.setattr(type(port), "takes_noise", takes_noise)
    same = observe(1).repeat(3, 1, 1)
    found = homogeneity(port, [same[:2], same[2:]])
    np.testing.assert_allclose(found.one_noise, 1, atol=1e-6)
    assert found.every_step.mean() < 0.99
    different = homogeneity(port, [observe(3)])
    assert found.one_noise.mean() > different.one_noise.mean()


def test_homogeneity_is_the_same_however_few_blocks_are_held_at_once(monkeypatch):
    seen = np.random.default_rng(0).normal(size=(5, 1, WIDTH)).astype(np.float32)
    whole = homogeneity(stack(), [seen])
    monkeypatch.setattr("blockcache_lab.analysis.homogeneity.HELD_BYTES", 1)
    found = homogeneity(stack(), [seen])
    np.testing.assert_array_equal(found.mean, whole.mean)
    np.testing.assert_array_equal(found.two, whole.two)


def test_schedules_of_equal_samples_are_stable_and_those_of_a_mixture_are_not():
    steps = np.arange(12)
    early, late = (np.exp(-np.abs(np.subtract.outer(place, place))) for place in (np.sqrt(steps), steps**2 / 20))
    equal = schedule_stability(np.stack([np.stack([early, late])] * 5), updates=3)
    assert equal.counts == (1, 2, 4)
    assert (equal.shared == 1).all()
    np.testing.assert_allclose(equal.excess, 0, atol=1e-9)
    mixed = schedule_stability(np.stack([[early]] * 3 + [[late]] * 3), updates=3)
    assert mixed.counts == (1, 2, 4)
    assert mixed.shared[0].mean() < 1
    assert mixed.excess.min() > -1e-9
    assert mixed.excess[0].mean() > mixed.excess[-1].mean()
    with pytest.raises(AnalysisError, match="and there is 1"):
        schedule_stability(np.stack([[early]]), updates=3)


def test_each_sample_has_matrices_of_its_own():
    seen = np.ones((3, 1, WIDTH), dtype=np.float32)
    found = sample_matrices(stack(), [seen[:2], seen[2:]])
    assert found.shape == (3, 3, STEPS, STEPS)
    np.testing.assert_allclose(found, 1, atol=1e-6)
    with pytest.raises(AnalysisError, match="at least one observation"):
        sample_matrices(stack(), [])


def test_batches_are_cut_to_what_fits(monkeypatch):
    one = 3 * STEPS * TOKENS * WIDTH * 4  # bytes of a sample's residuals
    monkeypatch.setattr("blockcache_lab.analysis.residuals.HELD_BYTES", 2 * one)
    assert [batch_size(batch) for batch in in_parts(stack(), nothing_seen(5))] == [2, 2, 1]


def test_the_response_operator_is_the_derivative(port, observe):
    parts = parts_of(port, "layers.1.FFN")
    generator = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(2, 6, 16, generator=generator) for _ in range(2))

    def whole(value):
        return parts.second(parts.activation(parts.first(parts.norm(value))))

    _, expected = torch.autograd.functional.jvp(whole, x, delta)
    torch.testing.assert_close(linear_response(parts, x, delta), expected, rtol=1e-4, atol=1e-4)
    found = ffn_response(port, "layers.1.FFN", 3, observe(2))
    assert found.order == pytest.approx(2, abs=0.05)
    assert found.difference_order == pytest.approx(1, abs=0.05)
    assert (found.remainders < found.differences).all()


def test_the_last_stage_of_an_ffn_is_what_it_adds(port, observe, random_updates):
    """Behind W2 the error is the block's caching error, and where everything is computed there is none at all."""
    names = [block.name for block in port.adapter.blocks]
    schedule = Schedule(6, {**random_updates(names, 6, share=0.3), "layers.1.FFN": (0, 2, 5)})
    found = sublayer_errors(port, schedule, "layers.1.FFN", (2, 5), observe(3), seed=4)
    errors, _ = caching_errors(port, {"it": schedule}, [observe(3)], seed=4).of("it")
    np.testing.assert_allclose(found.errors[:, -1], errors[-1, [2, 5]], rtol=1e-4)
    assert found.errors.min() > 0
    assert not sublayer_errors(port, every_step(port), "layers.1.FFN", (2,), observe(3)).errors.any()
    with pytest.raises(AnalysisError, match=r"not computed at step 3; its update steps are 0, 2, 5"):
        sublayer_errors(port, schedule, "layers.1.FFN", (3,), observe(3))


def test_stages_are_those_of_the_layer(port):
    layer, parts = port.adapter.layers[0].module, parts_of(port, "layers.0.FFN")
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    given, normed, hidden, active, out = stages(parts, x)
    assert given is x
    torch.testing.assert_close(normed, layer.norm3(x))
    torch.testing.assert_close(hidden, layer.linear1(layer.norm3(x)))
    assert (active.shape, out.shape) == ((1, 6, 64), (1, 6, 16))


def test_looking_inside_leaves_nothing_behind(port, observe):
    ffn_response(port, "layers.0.FFN", 1, observe(1))
    assert not any(module._forward_pre_hooks for module in port.policy.modules())
    assert "predict_action" not in vars(port.policy)


def test_norms_of_known_weights(port):
    for layer in port.adapter.denoiser.decoder.layers:
        layer.linear1.weight.data.fill_(2.0)
        layer.linear2.weight.data.fill_(3.0)
        for attention in (layer.self_attn, layer.multihead_attn):
            attention.in_proj_weight.data[:32] = 100.0  # W_Q and W_K
            attention.in_proj_weight.data[32:] = 1.0
    found = weight_norms(port)
    assert found.layers == ("layers.0", "layers.1")
    assert found.matrices == ("W1", "W2", "SA W_V", "CA W_V")
    np.testing.assert_allclose(found.norms[:, 0], [2 * 32, 3 * 32, 16, 16], rtol=1e-6)
    assert found.elements[:, 1].tolist() == [1024, 1024, 256, 256]
    np.testing.assert_allclose(found.per_element[:, 0], [2, 3, 1, 1], rtol=1e-6)


def test_the_encoder_only_form_has_one_kind_of_attention(make_policy):
    found = weight_norms(port_of(make_policy(time_as_cond=False, obs_as_cond=False)))
    assert found.matrices == ("W1", "W2", "SA W_V")


def test_a_family_without_such_parts_says_so():
    with pytest.raises(AnalysisError, match="The family toy-stack does not say that"):
        parts_of(stack(), UPSTREAM)
    with pytest.raises(AnalysisError, match="The family toy-stack does not say which weights"):
        weight_norms(stack())


def test_action_costs_are_read_off_at_their_lags(port, observe):
    recording = calibrate(port, observe(3).split(1), action_costs=True, progress=False)
    found = action_costs(recording)
    assert found.lags == (1, 5)
    assert found.costs[0, 2, 1] == pytest.approx(np.sqrt(recording.action_costs[2, 1, 2]), rel=1e-5)
    assert found.costs[1, 2, 3] == pytest.approx(np.sqrt(recording.action_costs[2, 3, 5]), rel=1e-5)  # to the end
    assert found.cosine[0, 2, 1] == pytest.approx(recording.matrices["cosine"][2, 1, 2], rel=1e-5)
    assert not found.costs[:, :, 5].any()  # nothing is left to reuse it for
    with pytest.raises(AnalysisError, match="no action costs; 'blockcache calibrate POLICY --action-costs' makes one"):
        action_costs(calibrate(port, observe(1).split(1), progress=False))


def test_harm_is_counted_in_the_own_noise_floor(make_policy, observe):
    good, weak = port_of(make_policy()), port_of(make_policy(seed=1))
    seen = [observe(4)]
    schedules = [solve(calibrate(port, seen[0].split(1), progress=False), 3) for port in (good, weak)]
    full = every_step(good)
    same = weaker_policy([("a", good, schedules[0]), ("b", good, full)], seen, method="bac")
    assert same.errors[0] > 0 == same.errors[1]
    assert same.floors[0] == same.floors[1] > 0
    found = weaker_policy([("good", good, schedules[0]), ("weak", weak, schedules[1])], seen, method="bac")
    np.testing.assert_allclose(found.relative, found.errors / found.floors)
    assert found.errors[0] == same.errors[0] != found.errors[1]
    other = port_of(make_policy(obs_dim=7))
    with pytest.raises(AnalysisError, match="takes other observations"):
        weaker_policy([("good", good, full), ("weak", other, every_step(other))], seen, method="bac")
    with pytest.raises(AnalysisError, match="got 1"):
        weaker_policy([("good", good, full)], seen, method="bac")

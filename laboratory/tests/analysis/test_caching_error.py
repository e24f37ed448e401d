"""Caching error by hand."""

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.errors import ObservationError
from blockcache.models.registry import port_of
from blockcache_lab.analysis.caching import caching_error, caching_errors
from blockcache_lab.analysis.residuals import residuals
from foreign_policy import BLOCKS, OBS, SEEN, STEPS, Policy


@pytest.fixture
def blocks(policy):
    return tuple(block.name for block in port_of(policy).adapter.blocks)


def steps(policy):
    return policy.num_inference_steps


def test_nothing_reused_is_no_error(policy, blocks, observe):
    every = bc.Schedule.every_step(steps(policy), blocks)
    found = caching_errors(policy, {"every": every}, [observe(2), observe(1)])
    errors, _ = found.of("every")
    assert errors.shape == (len(blocks), steps(policy))
    assert not errors.any()
    assert (found.update_induced("every"), found.reuse_induced("every")) == (0.0, 0.0)


def test_one_block_reused_once(policy, blocks, observe):
    """At step 1 the last block adds what it added at step 0; until then everything is as in the full run."""
    every, last = range(steps(policy)), blocks[-1]
    schedule = bc.Schedule(steps(policy), {name: [s for s in every if (name, s) != (last, 1)] for name in blocks})
    batch = observe(3)
    found = caching_errors(policy, {"once": schedule}, [batch], seed=5)
    errors, _ = found.of("once")
    true = residuals(port_of(policy), bc.Schedule.every_step(steps(policy), blocks), batch, 5)[last]  # (K, B, T, d)
    expected = (true[0] - true[1]).flatten(1).norm(dim=1) / true[1].flatten(1).norm(dim=1)
    assert errors[-1, 1] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert found.reuse_induced("once") == errors[-1, 1]
    assert not errors[:, 0].any()
    assert not errors[:-1, 1].any()
    assert errors[:, 2:].min() > 0  # the sample is another one from here on
    assert found.update_induced("once") > 0


def test_samples_count_alike_however_they_are_batched(policy, blocks, observe, random_updates):
    schedule = bc.Schedule(steps(policy), random_updates(blocks, steps(policy)))
    parts = [caching_error(policy, schedule, [observe(size)], seed=seed) for seed, size in enumerate((1, 3))]
    both = caching_error(policy, schedule, [observe(1), observe(3)])
    np.testing.assert_allclose(both, (parts[0] + 3 * parts[1]) / 4, rtol=1e-9)


def test_no_gradients_are_kept_and_the_policy_comes_back(policy, blocks, observe):
    every = bc.Schedule.every_step(steps(policy), blocks)
    for found in residuals(port_of(policy), every, observe(), 0).values():
        assert not found.requires_grad
    assert "predict_action" not in vars(policy)
    with pytest.raises(ObservationError, match="at least one batch"):
        caching_error(policy, every, [])


def test_caching_errors_of_a_foreign_policy():
    observations = torch.randn(2, SEEN, OBS, generator=torch.Generator().manual_seed(0))
    schedule = bc.Schedule(STEPS, {name: [0, 2] for name in BLOCKS})
    full = caching_error(Policy(), bc.Schedule.every_step(STEPS, BLOCKS), [observations])
    reduced = caching_error(Policy(), schedule, [observations])
    assert full.max() == 0.0
    assert (reduced[:, 0].max(), reduced[:, 1].min() > 0) == (0.0, True)

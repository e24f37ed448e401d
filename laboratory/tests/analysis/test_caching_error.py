"""Caching error by hand, and the study and page that are made of it."""

import json
from pathlib import Path

import numpy as np
import pytest

import blockcache as bc
from blockcache.errors import ObservationError
from blockcache.models.registry import port_of
from blockcache_lab.analysis.caching import caching_error
from blockcache_lab.analysis.residuals import residuals
from blockcache_lab.pages.caching import FORMAT


@pytest.fixture
def blocks(policy):
    return tuple(block.name for block in port_of(policy).adapter.blocks)


def steps(policy):
    return policy.num_inference_steps


def test_nothing_reused_is_no_error(policy, blocks, observe):
    found = caching_error(policy, bc.Schedule.every_step(steps(policy), blocks), [observe(2), observe(1)])
    assert found.errors.shape == (len(blocks), steps(policy))
    assert not found.errors.any()
    assert (found.update_induced, found.reuse_induced) == (0.0, 0.0)


def test_one_block_reused_once(policy, blocks, observe):
    """At step 1 the last block adds what it added at step 0; until then everything is as in the full run."""
    every, last = range(steps(policy)), blocks[-1]
    schedule = bc.Schedule(steps(policy), {name: [s for s in every if (name, s) != (last, 1)] for name in blocks})
    batch = observe(3)
    found = caching_error(policy, schedule, [batch], seed=5)
    true = residuals(port_of(policy), bc.Schedule.every_step(steps(policy), blocks), batch, 5)[last]  # (K, B, T, d)
    expected = (true[0] - true[1]).flatten(1).norm(dim=1) / true[1].flatten(1).norm(dim=1)
    assert found.errors[-1, 1] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert found.reuse_induced == found.errors[-1, 1]
    assert not found.errors[:, 0].any()
    assert not found.errors[:-1, 1].any()
    assert found.errors[:, 2:].min() > 0  # the sample is another one from here on
    assert found.update_induced > 0


def test_samples_count_alike_however_they_are_batched(policy, blocks, observe, random_updates):
    schedule = bc.Schedule(steps(policy), random_updates(blocks, steps(policy)))
    parts = [caching_error(policy, schedule, [observe(size)], seed=seed) for seed, size in enumerate((1, 3))]
    both = caching_error(policy, schedule, [observe(1), observe(3)])
    np.testing.assert_allclose(both.errors, (parts[0].errors + 3 * parts[1].errors) / 4, rtol=1e-9)


def test_no_gradients_are_kept_and_the_policy_comes_back(policy, blocks, observe):
    every = bc.Schedule.every_step(steps(policy), blocks)
    for found in residuals(port_of(policy), every, observe(), 0).values():
        assert not found.requires_grad
    assert "predict_action" not in vars(policy)
    with pytest.raises(ObservationError, match="at least one batch"):
        caching_error(policy, every, [])


@pytest.mark.usefixtures("in_an_empty_directory")
def test_the_verb_writes_figures_and_a_page_that_says_what_made_them(blockcache, refused, policy_directory):
    blockcache("paper", "errors", policy_directory, "--generations", 6, "-o", "there")
    found, text = json.loads(Path("there/caching-error.json").read_text()), Path("there/caching-error.md").read_text()
    assert f"Made by `blockcache paper errors {policy_directory} -o there --generations 6`: calibrated on 6" in text
    assert "compared on 2 other observations" in text
    assert FORMAT.load("there/caching-error.json")["rows"] == found["rows"]
    assert found["made_by"].startswith("blockcache ")
    for row in found["rows"]:
        assert f"| {row['method']} | {row['updates']} | {row['gflop']:.2f} | {row['caching_error']:.3f} |" in text
    Path("there/caching-error.md").unlink()
    Path("there/caching-error.json").write_text(json.dumps({**found, "command": "blockcache errors pusht -o docs"}))
    blockcache("paper", "errors", "-o", "there", "--render-only")
    written = Path("there/caching-error.md").read_text()
    assert written.splitlines()[4:] == text.splitlines()[4:]
    assert "Made by `blockcache paper errors pusht -o docs`: calibrated on 6" in written  # what one would type today
    for words in ([], [policy_directory, "--render-only"]):
        assert "name either a POLICY to measure, or --render-only" in refused("paper", "errors", *words)
    sentence = "8 generations to calibrate on leave nothing of 8 observations to compare on"
    assert sentence in refused("paper", "errors", policy_directory, "--generations", 8)

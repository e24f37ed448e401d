"""examples/halving.py: the two kinds of execution that it has and the library has not, and its way through the rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from blockcache.compare.candidates import Candidate
from blockcache.compare.paired import Setting
from blockcache.compare.parts import MethodError
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM, Fitted, table
from blockcache_runtime.execution import Execution
from repository import load_example
from toy_task import SPEC, Toy


@pytest.fixture(scope="module")
def halving():
    return load_example("halving")


@pytest.fixture
def setting(make_policy):
    return Setting(port_of(make_policy(sampler=Fitted.of(DDPM(num_inference_steps=4)))), None, Toy)


@pytest.mark.parametrize("replan", [None, 5])
def test_a_warm_start_without_an_overlap_is_refused(halving, setting, replan):
    group = halving.WarmGroup(Candidate(engine="loop", execution=Execution(replan)), (0,), steps=2)
    with pytest.raises(MethodError, match=r"what is left of the chunk before: replan must be below 5, got (None|5)"):
        group.run(setting)


def test_a_warm_start_changes_every_chunk_but_the_first(halving, setting):
    def scores(setting):
        candidate = Candidate(engine="loop", execution=Execution(replan=2))
        groups = halving.Group(candidate, (0, 1)), halving.WarmGroup(candidate, (0, 1), steps=1)
        return [[item["score"] for item in group.run(setting)["records"]] for group in groups]

    cold, warm = scores(setting)
    assert cold != warm
    cold, warm = scores(replace(setting, make_task=lambda: Toy(replace(SPEC, max_steps=2))))
    assert cold == warm


def test_the_last_steps_of_a_sampler_end_as_the_whole(halving, setting):
    whole = replace(setting.port.sampler, c=(0.0, 0.1, 0.2, 0.3))
    last = halving.last_steps(whole, 2)
    made, end = table(whole), table(last)
    assert np.array_equal(made.timesteps[-2:], end.timesteps)
    assert (end.b[0], end.c[0]) == (pytest.approx(made.b[-2] + 0.2), 0.0)
    assert (end.b[1], end.c[1]) == (made.b[-1], made.c[-1])


def test_constant_noise_is_the_same_for_every_chunk_and_rollout(halving):
    one = halving.ConstantNoise(seed=3)
    first, other = one.noise(torch.zeros(4, 2, 6, 3)), one.noise(torch.ones(4, 5, 6, 3))
    assert first.shape == (4, 2, 6, 3)
    assert torch.equal(first[:, 0], first[:, 1])
    assert torch.equal(first[:, 0], other[:, 4])
    assert not torch.equal(first, halving.ConstantNoise(seed=4).noise(torch.zeros(4, 2, 6, 3)))
    assert not one.keeps_noise

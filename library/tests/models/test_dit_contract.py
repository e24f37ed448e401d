"""The contract over the adaLN DiT: ours and a live policy of LeRobot's shape, by DDPM and by flow matching."""

import pytest
import torch

from blockcache.testing import PolicyContract
from dit_policies import SAMPLERS, LivePolicy, live_observation, tiny_dit, tiny_observation

pytestmark = pytest.mark.usefixtures("exports_stay_here")


class TestOwnDDPM(PolicyContract):
    def policy(self):
        return tiny_dit()

    def observation(self, batch):
        return tiny_observation(batch)


class TestOwnEuler(TestOwnDDPM):
    def policy(self):
        return tiny_dit(sampler=SAMPLERS["euler"], use_rope=False, use_positional_encoding=True)


class TestLiveDDPM(PolicyContract):
    def policy(self):
        return LivePolicy("ddpm", rope=False, positions=True)

    def observation(self, batch):
        return live_observation(batch)


class TestLiveEuler(TestLiveDDPM):
    def policy(self):
        return LivePolicy("euler")


class TestLiveRungeKutta(TestLiveDDPM):
    """Four calls of the denoiser in a step: no program knows that, and patched need not."""

    engines = ("patched",)

    def policy(self):
        return LivePolicy("rk4")


def test_the_suite_is_of_this_family():
    from blockcache.models.registry import port_of

    for kind in (TestOwnDDPM, TestOwnEuler, TestLiveDDPM, TestLiveEuler, TestLiveRungeKutta):
        assert port_of(kind().policy()).adapter.family == "dit"
    assert torch.is_tensor(LivePolicy()._generate_actions(live_observation(1)))

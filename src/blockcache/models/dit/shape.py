"""DiT policies of LeRobot's default size with random weights, for `blockcache bench`: speed does not depend on them."""

from __future__ import annotations

import torch

from blockcache.models.dit.config import DiTConfig
from blockcache.models.dit.policy import DiTPolicy
from blockcache.samplers import DDPM, Euler, SamplerConfig

_MOMENT = {"obs": 14 + 768 + 512}
"""Numbers of a moment: a state of two arms, what CLIP makes of one camera, and of the words."""


def ddpm() -> DiTPolicy:
    """6 layers x 512, 32 tokens, 100 DDPM steps; the program begins where LeRobot's encoders end."""
    return _random(DDPM(num_inference_steps=100))


def euler() -> DiTPolicy:
    """The same by flow matching: 100 Euler steps, as LeRobot takes them where nothing else is said."""
    return _random(Euler(num_inference_steps=100))


def euler10() -> DiTPolicy:
    """The same in 10 Euler steps."""
    return _random(Euler(num_inference_steps=10))


def _random(sampler: SamplerConfig) -> DiTPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DiTPolicy(DiTConfig(state=_MOMENT, action_dim=14, sampler=sampler)).eval()

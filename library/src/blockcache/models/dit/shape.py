"""DiT policies of LeRobot's default size with random weights, for `blockcache bench`: speed does not depend on them."""

from __future__ import annotations

from typing import Any

from blockcache.models.dit.policy import DiTConfig, DiTPolicy
from blockcache.samplers import DDPM, Euler, SamplerConfig

_MOMENT = {"obs": 14 + 768 + 512}
"""Numbers of a moment: a state of two arms, what CLIP makes of one camera, and of the words."""


def ddpm() -> DiTPolicy:
    """6 layers x 512, 32 tokens, 100 DDPM steps; the program begins where LeRobot's encoders end."""
    return _lerobots(DDPM(num_inference_steps=100))


def euler() -> DiTPolicy:
    """The same by flow matching: 100 Euler steps, as LeRobot takes them where nothing else is said."""
    return _lerobots(Euler(num_inference_steps=100))


def small(sampler: SamplerConfig | None = None, **changes: Any) -> DiTPolicy:
    """A small one with random weights, to try something on; `changes` are settings of its config."""
    sizes = {
        "horizon": 4,
        "n_action_steps": 2,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "timestep_embed_dim": 4,
    }
    settings = {"state": {"obs": 4}, "action_dim": 2, "sampler": sampler or DDPM(num_inference_steps=2), **sizes}
    return DiTPolicy.random(DiTConfig(**{**settings, **changes}))


def _lerobots(sampler: SamplerConfig) -> DiTPolicy:
    return DiTPolicy.random(DiTConfig(state=_MOMENT, action_dim=14, sampler=sampler))

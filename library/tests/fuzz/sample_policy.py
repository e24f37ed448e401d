"""A policy as small as one can be, what it sees and what was recorded of it: what the samples are made from."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import blockcache as bc
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM
from blockcache.solvers.recording import Recording

torch.set_num_threads(1)
STEPS, SEEN, OBS, ACTION = 3, 2, 3, 2


@functools.cache
def policy(obs_dim: int = OBS, action_dim: int = ACTION) -> DiffusionTransformerPolicy:
    """One layer of width 4: a whole generation takes a millisecond."""
    config = DPTConfig(
        obs_dim=obs_dim, action_dim=action_dim, horizon=3, n_obs_steps=SEEN, n_action_steps=2, n_layer=1, n_head=1, n_emb=4,
        sampler=DDPM(num_inference_steps=STEPS), task="toy",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = DiffusionTransformerPolicy(config).eval()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


@functools.cache
def camera_policy(width: int = 16) -> DiffusionTransformerPolicy:
    """One camera of 33 x 33 and a number: a trunk of a quarter of its usual width.

    Narrower than a group of its norms, it can be made and exported, but not loaded: the groups are as narrow as it is.
    """
    with torch.random.fork_rng(), mock.patch(f"{EncoderConfig.__module__}.GROUP", min(width, 16)):
        torch.manual_seed(0)
        encoder = EncoderConfig((Input("eye", (1, 33, 33)), Input("arm", (1,))), width=width, keypoints=2, features=2)
        return DiffusionTransformerPolicy(replace(policy().config, obs_dim=encoder.size, encoder=encoder)).eval()


def frames() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    eye = rng.integers(0, 256, (2, SEEN, 1, 33, 33), dtype=np.uint8)
    return {"eye": eye, "arm": rng.standard_normal((2, SEEN, 1)).astype(np.float32)}


@functools.cache
def port() -> Port:
    return port_of(policy())


@functools.cache
def observations() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((4, SEEN, OBS)).astype(np.float32)


@functools.cache
def recording() -> Recording:
    return bc.calibrate(policy(), [observations()], progress=False)


def schedule() -> bc.Schedule:
    return bc.solve(recording(), updates=2, union=1)


def again(path: Path) -> Path:
    return path.with_name(f"again{path.suffix}")

"""How an observation enters the program of a DP-T policy: normaliser, encoder and observation embedding, folded.

Numbers are multiplied by one matrix, in which their normaliser is. Frames become features first, where the encoder is one
that we know; where it is not, its features are what comes in. Knows nothing of denoisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockcache.models.dpt.camera_network import CameraNetwork
from blockcache.models.dpt.encoder_parts import EncoderParts, parts_of
from blockcache.models.program import UnsupportedError

FEATURES = "features"
Field = Callable[[str, int], list[Tensor]]
"""(name of an input, its numbers) -> its normaliser's scale and offset."""


@dataclass(frozen=True, eq=False)
class ProgramInputs:
    """`entries` names the matrix of what each part is multiplied by, `bias` (d,) is what all of them have in common."""

    inputs: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, str]
    weights: Mapping[str, Tensor]
    bias: Tensor
    networks: tuple[CameraNetwork, ...] = field(default=())


def fold_inputs(policy: Any, normalizer: Field, w: Tensor, b: Tensor) -> ProgramInputs:
    """Fold what stands before the observation tokens.

    policy      the policy object
    normalizer  gives its scales and offsets
    w, b        the observation embedding, (inputs, d) and (d,)
    """
    moments, encoder = int(policy.n_obs_steps), getattr(policy, "obs_encoder", None)
    if encoder is None:
        scale, offset = normalizer("obs", len(w))
        inputs = {"obs": (moments, int(policy.obs_dim))}
        return ProgramInputs(inputs, {"obs": "obs_w"}, {"obs_w": scale[:, None] * w}, b + offset @ w)
    parts = known_parts(encoder)
    if parts is None:
        return ProgramInputs({FEATURES: (moments, len(w))}, {FEATURES: "obs_w"}, {"obs_w": w}, b)
    return _with_cameras(parts, moments, normalizer, w, b)


def known_parts(encoder: Any) -> EncoderParts | None:
    """The parts of an encoder that can be part of a program; None for another one."""
    try:
        parts = parts_of(encoder)
        parts.networks()
    except UnsupportedError:
        return None
    return parts


def _with_cameras(parts: EncoderParts, moments: int, normalizer: Field, w: Tensor, b: Tensor) -> ProgramInputs:
    networks, constants = parts.networks()
    sizes = {network.camera: network.features for network in networks}
    weights = {name: tensor.to(torch.float64) for name, tensor in constants.items()}
    entries, rows = {FEATURES: "obs_w"}, list[Tensor]()
    at = 0
    for item in parts.inputs:
        size = sizes.get(item.name, item.shape[0])
        share, at = w[at : at + size], at + size
        if item.is_camera:
            scale, offset = normalizer(item.name, 1)
            weights |= {f"obs.{item.name}_scale": scale, f"obs.{item.name}_offset": offset}
            rows.append(share)
        else:
            scale, offset = normalizer(item.name, size)
            entries[item.name] = f"obs.{item.name}_w"
            weights[entries[item.name]] = scale[:, None] * share
            b = b + offset @ share
    if at != len(w):
        raise UnsupportedError(f"an obs_encoder that makes {at} numbers where the denoiser takes {len(w)}")
    weights["obs_w"] = torch.cat(rows)
    inputs = {item.name: (moments, *item.shape) for item in parts.inputs}
    return ProgramInputs(inputs, entries, weights, b, networks)

"""Which policies are DP-T, and their ports: this package's own, and foreign ones, which are known by their shape.

Of foreign policies with cameras there are two kinds: an encoder of the public code's shape becomes part of the program; any
other one runs as it is, and engines stand behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import BlockcacheError, EngineError, ObservationError, PolicyError, in_one_line
from blockcache.models.dpt.adapter import find
from blockcache.models.dpt.encoder import Input
from blockcache.models.dpt.encoder_parts import EncoderParts, inputs_of, parts_of
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.dpt.program_inputs import FEATURES, known_parts
from blockcache.models.own_port import OwnPort
from blockcache.models.port import Port
from blockcache.models.public import PublicPort, denoiser_of
from blockcache.observations.tensors import as_tensor, reach
from blockcache_runtime.checks import BYTE, check_frames, shape_text


def claim(policy: Any) -> Port | str:
    """The port of a DP-T policy, or what it lacks to be one."""
    denoiser = denoiser_of(policy)
    if isinstance(denoiser, str):
        return denoiser
    adapter = find(denoiser)
    if isinstance(adapter, str):
        return f"the denoiser {type(denoiser).__name__} {adapter}"
    if isinstance(policy, DiffusionTransformerPolicy):
        return DPTPort(policy, adapter)
    encoder = getattr(policy, "obs_encoder", None)
    if encoder is None:
        return PublicPort(policy, adapter)
    return (OtherCameraPort if known_parts(encoder) is None else KnownCameraPort)(policy, adapter)


class DPTPort(OwnPort):
    """This package's own policy, cameras included: the program holds all of it."""

    policy: DiffusionTransformerPolicy

    @property
    def action_scale(self) -> NDArray[np.float64]:
        return self.policy.normalizer.action.scale.detach().cpu().double().numpy()

    @property
    def action_offset(self) -> NDArray[np.float64]:
        return self.policy.normalizer.action.offset.detach().cpu().double().numpy()

    @cached_property
    def encoder_flops(self) -> int:
        encoder = self.policy.obs_encoder
        return 0 if encoder is None else self.n_obs_steps * parts_of(encoder).flops


class CameraPort(PublicPort):
    """Looks through cameras; frames are floats from 0 to 1, as the public code takes them."""

    @cached_property
    def observed(self) -> tuple[Input, ...]:
        """Its inputs, as they are at one moment."""
        return inputs_of(self.policy.obs_encoder)

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        if not self.observed:
            raise PolicyError(
                f"{type(self.policy).__name__} does not say what it observes, which files of observations and rollouts "
                "need; set policy.obs_encoder.obs_shapes, shapes by name"
            )
        return {item.name: (self.n_obs_steps, *item.shape) for item in self.observed}

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.observed if item.is_camera)

    def prepare_observation(self, obs: Any) -> Any:
        """A file or a rollout has a camera's bytes."""
        made = super().prepare_observation(obs)
        return {name: value / BYTE if value.dtype == torch.uint8 else value for name, value in made.items()}

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        made = super().synthetic_observations(count)
        return made | {name: torch.rand(made[name].shape) for name in self.cameras}

    def check_observation(self, obs: Any) -> None:
        for name in self.cameras if isinstance(obs, Mapping) else ():
            if isinstance(value := obs.get(name), Tensor):
                self._inspect(name, value)

    def _inspect(self, camera: str, value: Tensor) -> None:
        """Of a longer history the public code looks at the first `n_obs_steps`."""
        seen = value[:, : self.n_obs_steps] if value.ndim > 1 else value
        what, dtype = f"the observation {camera!r}", str(value.dtype).removeprefix("torch.")
        if value.dtype == torch.uint8:
            raise ObservationError(
                f"{what} holds uint8, expected floats from 0 to 1, as {type(self.policy).__name__} takes them; divide by 255"
            )
        check_frames(what, tuple(seen.shape), dtype, tuple(self.inputs[camera]), lambda: reach(seen))

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        self.check_observation(obs)
        return super().read_observation(obs, like)

    def explain(self, error: Exception, obs: Any) -> BlockcacheError | None:
        if not self.observed or isinstance(error, BlockcacheError):
            return super().explain(error, obs)
        if isinstance(obs, Mapping) and all(isinstance(obs.get(item.name), Tensor) for item in self.observed):
            return None
        return self._misgiven(obs, f" ({in_one_line(error)})")

    def _wanted(self) -> str:
        if not self.observed:
            return " by name"
        return ": " + " and ".join(f"{name!r} {shape_text(shape)}" for name, shape in self.inputs.items())


class KnownCameraPort(CameraPort):
    """The public code's encoder: part of the program."""

    @cached_property
    def parts(self) -> EncoderParts:
        parts = known_parts(self.policy.obs_encoder)
        assert parts is not None
        return parts

    @property
    def scratch_attributes(self) -> list[tuple[nn.Module, str]]:
        return self.parts.scratch_attributes

    @cached_property
    def encoder_flops(self) -> int:
        return self.n_obs_steps * self.parts.flops

    def settings(self) -> list[Any]:
        crops = [
            (name, *(getattr(part, side, None) for side in ("crop_height", "crop_width")))
            for name, part in _randomizers(self.policy).items()
        ]
        return [*super().settings(), dict(self.inputs), crops]


def _randomizers(policy: Any) -> dict[str, Any]:
    return dict(getattr(policy.obs_encoder, "obs_randomizers", {}).items())


class OtherCameraPort(CameraPort):
    """Any other encoder: the policy's own code runs up to its denoiser, and engines get what that is handed."""

    begins_after_encoder = True

    @property
    def parts_outside_program(self) -> tuple[nn.Module, ...]:
        return (self.policy.obs_encoder,)

    def inputs_from_call(
        self, sample: Tensor, timestep: Any, cond: Any = None, **others: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        fits = isinstance(cond, Tensor) and cond.ndim == 3 and cond.shape[1] == self.n_obs_steps
        if not fits or any(value is not None for value in others.values()):
            raise EngineError(
                "the denoiser is handed something else than a sample, a timestep and the features of the last "
                f'{self.n_obs_steps} moments (batch, moments, features); use engine="patched"'
            )
        return {FEATURES: as_tensor(cond).detach()}, sample.detach()

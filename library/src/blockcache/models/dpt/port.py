"""Which policies are DP-T, and their ports: this package's own, and foreign ones, which are known by their shape.

A foreign policy has the interface of the public Diffusion Policy code: `model`, `noise_scheduler` (of diffusers),
`num_inference_steps` and `predict_action(dict) -> dict`. Sizes are looked up where that code keeps them: `n_obs_steps`,
`n_action_steps`, `horizon`, `obs_dim`, and the normaliser's tensors. Nothing of it is imported. Of those with cameras there
are two kinds: an encoder of the public code's shape becomes part of the program; any other one runs as it is, and engines
begin behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import BlockcacheError, EngineError, ObservationError, PolicyError, in_one_line
from blockcache.models.dpt.cameras import inputs_of, known_encoder, networks_of, or_none
from blockcache.models.dpt.denoiser import find
from blockcache.models.dpt.encoder import Input
from blockcache.models.dpt.fold import FEATURES
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.modules import check_action_scale, check_not_compiled
from blockcache.models.own_policy import OwnPort
from blockcache.models.port import Port, required
from blockcache.models.sampling import Sampling, make_scheduler, scheduler_settings
from blockcache.observations.tensors import as_tensor, check_camera, check_finite, listed
from blockcache.samplers import SamplerConfig
from blockcache_runtime.checks import BYTE

NEEDED = ("model", "noise_scheduler", "num_inference_steps", "predict_action")


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
    return (OtherCameraPort if or_none(encoder) is None else KnownCameraPort)(policy, adapter)


def denoiser_of(policy: Any) -> nn.Module | str:
    """The denoiser of a policy with the public interface, or what the policy lacks of it."""
    missing = [name for name in NEEDED if getattr(policy, name, None) is None]
    if missing:
        return f"it lacks {', '.join(missing)}; expected {', '.join(NEEDED[:-1])} and {NEEDED[-1]}"
    if not isinstance(policy.model, nn.Module):
        return f"its model must be a torch module, got {type(policy.model).__name__}"
    check_not_compiled(policy.model, "policy.model")
    return policy.model


class PublicPort(Port):
    """A foreign policy, see above."""

    @cached_property
    def sampling(self) -> Sampling:
        policy = self.policy
        return Sampling.of_scheduler(policy.noise_scheduler, policy.num_inference_steps, self._step_arguments)

    @property
    def _step_arguments(self) -> dict[str, Any]:
        """The public code hands these to the scheduler's step, DDIM's eta for one."""
        given = getattr(self.policy, "kwargs", None)
        return dict(given) if isinstance(given, Mapping) else {}

    def with_sampler(self, sampler: SamplerConfig) -> PublicPort:
        other = copy.copy(self.policy)
        other.noise_scheduler = make_scheduler(sampler)
        other.num_inference_steps = sampler.num_inference_steps
        other.kwargs = {"eta": getattr(sampler, "eta")} if hasattr(sampler, "eta") else {}  # noqa: B009
        return self._sharing_weights(other)

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"obs": (self.n_obs_steps, required(self.policy, "obs_dim"))}

    @property
    def action_scale(self) -> NDArray[np.float64]:
        return self._affine("action")[0].expand(required(self.policy, "action_dim")).clone().numpy()

    @property
    def action_offset(self) -> NDArray[np.float64]:
        return self._affine("action")[1].expand(required(self.policy, "action_dim")).clone().numpy()

    def _affine(self, name: str) -> list[Tensor]:
        """The normaliser's scale and offset; an identity has one number for all, a policy without a normaliser none."""
        normalizer = getattr(self.policy, "normalizer", None)
        state = normalizer.state_dict() if isinstance(normalizer, nn.Module) else {}
        found = (state.get(f"params_dict.{name}.{part}") for part in ("scale", "offset"))
        known = (torch.tensor([other]) if part is None else part for part, other in zip(found, (1.0, 0.0), strict=True))
        return [part.detach().to("cpu", torch.float64) for part in known]

    def check_weights(self) -> None:
        super().check_weights()
        check_action_scale(self._affine("action")[0])

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        """Within the normaliser's range: beyond it all actions may be clipped alike, which would hide a difference."""
        made = super().synthetic_observations(count)
        for name in self.inputs:
            scale, offset = self._affine(name)
            made[name] = ((made[name].double() - offset) / scale).to(made[name])
        return made

    @property
    def task(self) -> str | None:
        named = getattr(self.policy, "task", None)
        return named if isinstance(named, str) else None

    def prepare_observation(self, obs: Any) -> Any:
        return super().prepare_observation(obs if isinstance(obs, Mapping) else {"obs": obs})

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        """Of a longer history the public code looks at the first `n_obs_steps`."""
        found = {}
        for name, shape in self.inputs.items():
            if not isinstance(obs, Mapping) or isinstance(obs.get(name, {}), Mapping):  # none, or nested
                raise self._misgiven(obs)
            tensor = as_tensor(obs[name])
            steps, *rest = shape
            sizes = tensor.shape
            if len(sizes) != 1 + len(shape) or sizes[0] < 1 or sizes[1] < steps or list(sizes[2:]) != rest:
                raise ObservationError(
                    f"the observation {name!r} has shape {tuple(sizes)}, expected (batch, {', '.join(map(str, shape))})"
                )
            found[name] = tensor[:, :steps].to(device=like.device, dtype=like.dtype)
            check_finite(found[name])
        return found

    def explain(self, error: Exception, obs: Any) -> BlockcacheError | None:
        if isinstance(error, BlockcacheError):
            return None
        if isinstance(obs, Mapping) and all(isinstance(value, Tensor) for value in obs.values()):
            needed = {"obs"} if hasattr(self.policy, "obs_dim") else set()
            if needed.union(error.args if type(error) is KeyError else ()) <= obs.keys():
                return None
        return self._misgiven(obs, error)

    def _misgiven(self, obs: Any, error: Exception | None = None) -> ObservationError:
        held = {str(name): type(value).__name__ for name, value in obs.items()} if isinstance(obs, Mapping) else ""
        got = f"{type(obs).__name__} {held}".rstrip() + (f" ({in_one_line(error)})" if error else "")
        return ObservationError(f"{type(self.policy).__name__} takes a mapping of tensors{self._wanted()}, got {got}")

    def _wanted(self) -> str:
        return " such as {'obs': (batch, n_obs_steps, obs_dim)}" if hasattr(self.policy, "obs_dim") else " by name"

    def settings(self) -> list[Any]:
        names = ("num_inference_steps", "horizon", "n_obs_steps", "n_action_steps", "pred_action_steps_only")
        own = [getattr(self.policy, name, None) for name in names]
        return [*own, *scheduler_settings(self.policy.noise_scheduler), self._step_arguments]


class DPTPort(OwnPort):
    """This package's own policy, cameras included: the program holds all of it."""

    policy: DiffusionTransformerPolicy

    @cached_property
    def encoder_flops(self) -> int:
        encoder = self.policy.obs_encoder
        networks = () if encoder is None else networks_of(encoder)[0]
        return self.n_obs_steps * sum(network.flops for network in networks)


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
        """Of a longer history the public code looks at the first `n_obs_steps`."""
        for name in self.cameras if isinstance(obs, Mapping) else ():
            if not isinstance(value := obs.get(name), Tensor):
                continue
            if value.dtype == torch.uint8:
                raise ObservationError(
                    f"the observation {name!r} holds uint8, expected floats from 0 to 1, as "
                    f"{type(self.policy).__name__} takes them; divide by 255"
                )
            seen = value[:, : self.n_obs_steps] if value.ndim > 1 else value
            check_camera(seen, f"the observation {name!r}", tuple(self.inputs[name]))

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        self.check_observation(obs)
        return super().read_observation(obs, like)

    def explain(self, error: Exception, obs: Any) -> BlockcacheError | None:
        if not self.observed or isinstance(error, BlockcacheError):
            return super().explain(error, obs)
        if isinstance(obs, Mapping) and all(isinstance(obs.get(item.name), Tensor) for item in self.observed):
            return None
        return self._misgiven(obs, error)

    def _wanted(self) -> str:
        return f": {listed(self.inputs)}" if self.observed else " by name"


class KnownCameraPort(CameraPort):
    """The public code's encoder: part of the program."""

    @property
    def scratch_attributes(self) -> list[tuple[nn.Module, str]]:
        """The last keypoints."""
        return [(net.pool, "kps") for net in self.policy.obs_encoder.obs_nets.values() if net is not None]

    @cached_property
    def encoder_flops(self) -> int:
        networks, _ = networks_of(known_encoder(self.policy.obs_encoder))
        return self.n_obs_steps * sum(network.flops for network in networks)

    def settings(self) -> list[Any]:
        randomizers = getattr(self.policy.obs_encoder, "obs_randomizers", {})
        crops = [
            (name, *(getattr(part, side, None) for side in ("crop_height", "crop_width")))
            for name, part in randomizers.items()
        ]
        return [*super().settings(), dict(self.inputs), crops]


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

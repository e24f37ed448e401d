"""Which policies are adaLN DiTs, and the ports of this package's own; a live one of LeRobot's is in `live`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import ObservationError
from blockcache.models.dit.adapter import find
from blockcache.models.dit.clip import MASK, TOKENS
from blockcache.models.dit.live import LivePort, horizon_of, objective_of
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dit.program import CONDITIONING
from blockcache.models.dit.program_inputs import ProgramInputs, inputs_after_encoder, inputs_of_policy
from blockcache.models.modules import check_not_compiled
from blockcache.models.own_port import OwnPort
from blockcache.models.port import Port

_CONSTANT = 1e6  # scales beyond this are those of numbers that never changed in the data


def claim(policy: Any) -> Port | str:
    """The port of an adaLN DiT policy, or what it lacks to be one."""
    denoiser = getattr(policy, "noise_predictor", None)
    if not isinstance(denoiser, nn.Module):
        return "it lacks a noise_predictor"
    check_not_compiled(denoiser, "policy.noise_predictor")
    horizon = policy.horizon if isinstance(policy, DiTPolicy) else horizon_of(policy)
    if isinstance(horizon, str):
        return horizon
    adapter = find(denoiser, horizon)
    if isinstance(adapter, str):
        return f"the noise_predictor {type(denoiser).__name__} {adapter}"
    if isinstance(policy, DiTPolicy):
        return (DiTPort if policy.observation_encoder is None else EncodedDiTPort)(policy, adapter)
    objective = objective_of(policy)
    return objective if isinstance(objective, str) else LivePort(policy, adapter)


class DiTPort(OwnPort):
    """A policy without an encoder: the program holds all of it."""

    policy: DiTPolicy

    @property
    def program_inputs(self) -> ProgramInputs:
        """Where the program begins."""
        return inputs_of_policy(self.policy)

    @cached_property
    def action_scale(self) -> NDArray[np.float64]:
        """A number that never changed has no range to be measured by: it counts as it is."""
        scale = self.policy.normalizer.action.scale.detach().cpu().double()
        return torch.where(scale.abs() > _CONSTANT, torch.ones_like(scale), scale).numpy()

    @cached_property
    def action_offset(self) -> NDArray[np.float64]:
        action = self.policy.normalizer.action
        shift, base = (part.detach().cpu().double().numpy() for part in (action.shift, action.base))
        return np.asarray(base - shift * self.action_scale)

    def is_normalised(self, name: str) -> bool:
        return name in {**self.policy.config.state, **self.policy.config.vectors}


class EncodedDiTPort(DiTPort):
    """A policy with CLIP encoders, which run as they are: the program begins at the conditioning vector."""

    begins_after_encoder = True

    @property
    def program_inputs(self) -> ProgramInputs:
        return inputs_after_encoder(self.policy.config.cond_dim, self.policy.normalizer.action)

    @property
    def parts_outside_program(self) -> tuple[nn.Module, ...]:
        assert self.policy.observation_encoder is not None
        return (self.policy.observation_encoder,)

    def inputs_from_call(self, x: Tensor, timestep: Any, conditioning_vec: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {CONDITIONING: conditioning_vec.detach()}, x.detach()

    def explain(self, error: Exception, obs: Any) -> ObservationError | None:
        """The policy explains itself: what it says of an observation is what counts, whoever looks ahead with it."""
        return ObservationError(str(error)) if isinstance(error, ObservationError) else None

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        found, encoder = super().synthetic_observations(count), self.policy.config.encoder
        assert encoder is not None
        tokens = torch.randint(encoder.words, (count, encoder.tokens))
        return {**found, TOKENS: tokens.to(self.policy.like), MASK: torch.ones(count, encoder.tokens)}

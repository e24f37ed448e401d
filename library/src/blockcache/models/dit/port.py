"""Which policies are adaLN DiTs, and their ports: this package's own, and live ones of LeRobot's `multi_task_dit`.

A live policy is known by its parts; nothing of LeRobot is imported. Its `observation_encoder` makes one conditioning vector,
at which the program begins; its `objective` holds a scheduler of diffusers', or integrates a flow. Actions are normalised,
as that policy gives them: its processors are outside.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import EngineError, ObservationError, PolicyError, in_one_line, short
from blockcache.models.dit.adapter import find
from blockcache.models.dit.clip import FEATURE, MASK, TOKENS
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dit.program import CONDITIONING, DiTProgram
from blockcache.models.dit.vision import with_encoders
from blockcache.models.modules import check_not_compiled, check_program
from blockcache.models.normalizer import ShiftedField
from blockcache.models.own_policy import OwnPort
from blockcache.models.port import Port
from blockcache.models.program import Program, UnsupportedError
from blockcache.models.sampling import Sampling, denoise, scheduler_settings
from blockcache.observations.tensors import as_tensor
from blockcache.samplers import Euler, SamplerConfig
from blockcache_runtime.checks import shape_text

STATE, IMAGES = "observation.state", "observation.images"
_ENTRIES = ("_generate_actions", "predict_action_chunk")
"""LeRobot's `predict_action_chunk` looks into queues that `select_action` fills, and hands what it finds there to the
first of these, which looks at its argument alone; so that is one generation, whoever calls for it."""


def claim(policy: Any) -> Port | str:
    """The port of an adaLN DiT policy, or what it lacks to be one."""
    denoiser = getattr(policy, "noise_predictor", None)
    if not isinstance(denoiser, nn.Module):
        return "it lacks a noise_predictor"
    check_not_compiled(denoiser, "policy.noise_predictor")
    horizon = policy.horizon if isinstance(policy, DiTPolicy) else _horizon_of(policy)
    if horizon is None:
        return "it does not say its horizon"
    adapter = find(denoiser, horizon)
    if isinstance(adapter, str):
        return f"the noise_predictor {type(denoiser).__name__} {adapter}"
    if isinstance(policy, DiTPolicy):
        return (DiTPort if policy.observation_encoder is None else EncodedDiTPort)(policy, adapter)
    return _lacks(policy) or LivePort(policy, adapter)


class DiTPort(OwnPort):
    """A policy without an encoder: the program holds all of it."""

    policy: DiTPolicy

    def normalizer_field(self, name: str) -> ShiftedField:
        """How an input, or the action, is normalised within the program."""
        return self.policy.normalizer.field(name)


class _AfterEncoder(Port):
    """The policy's encoder runs as it is, and the program begins at the conditioning vector."""

    begins_after_encoder = True

    @property
    def parts_outside_program(self) -> tuple[nn.Module, ...]:
        encoder = getattr(self.policy, "observation_encoder", None)
        return (encoder,) if isinstance(encoder, nn.Module) else ()

    def inputs_from_call(
        self, x: Tensor, timestep: Any, conditioning_vec: Any = None, **others: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        if not isinstance(conditioning_vec, Tensor) or conditioning_vec.ndim != 2 or others:
            raise EngineError(
                "the denoiser is handed something else than a sample, a timestep and one conditioning vector (batch, "
                'numbers); use engine="patched"'
            )
        return {CONDITIONING: conditioning_vec.detach()}, x.detach()


class EncodedDiTPort(_AfterEncoder, DiTPort):
    """A policy with CLIP encoders. Engines stand behind them; a file holds the vision encoder, and takes what the text
    encoder makes of the words, or has it as a constant."""

    def file_program(self, fixed: Mapping[str, Any]) -> Program:
        program = self.program()
        assert isinstance(program, DiTProgram)
        if not fixed:
            return check_program(with_encoders(program, self.policy, None))
        if set(fixed) != {TOKENS, MASK}:
            names = ", ".join(map(str, fixed))
            raise EngineError(f"{names} cannot be constants of a file; the words can, {TOKENS} and {MASK} together")
        given = {name: as_tensor(fixed[name], f"the input {name!r}") for name in (TOKENS, MASK)}
        said = self.policy.language_feature(*(ids[None] if ids.ndim == 1 else ids for ids in given.values()))
        if len(said) != 1:
            raise EngineError(
                f"a file has the words of one task as constants, or takes their feature; got {len(said)} tasks"
            )
        kept = {name: ids.flatten().tolist() for name, ids in given.items()}
        return check_program(replace(with_encoders(program, self.policy, said), fixed=kept))

    def file_inputs(self, obs: Any) -> dict[str, Tensor]:
        found = self.policy.check(obs)
        found[FEATURE] = self.policy.language_feature(found.pop(TOKENS), found.pop(MASK))
        return found

    def explain(self, error: Exception, obs: Any) -> ObservationError | None:
        """The policy explains itself: what it says of an observation is what counts, whoever looks ahead with it."""
        return ObservationError(str(error)) if isinstance(error, ObservationError) else None

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        found, encoder = super().synthetic_observations(count), self.policy.config.encoder
        assert encoder is not None
        tokens = torch.randint(encoder.words, (count, encoder.tokens))
        return {**found, TOKENS: tokens.to(self.policy.like), MASK: torch.ones(count, encoder.tokens)}


# -- live policies


def _horizon_of(policy: Any) -> int | None:
    """Tokens of a chunk, where the policy says so."""
    for place in (getattr(policy, "config", None), policy, getattr(policy, "objective", None)):
        found = getattr(place, "horizon", None)
        if isinstance(found, Integral) and not isinstance(found, bool):
            return int(found)
    return None


def _lacks(policy: Any) -> str:
    """What a policy lacks to be run; "" if nothing."""
    objective = getattr(policy, "objective", None)
    if not any(hasattr(policy, name) for name in _ENTRIES):
        return f"it lacks {_ENTRIES[-1]}"
    needed = ("noise_scheduler", "num_inference_steps")
    if (
        isinstance(objective, Sampled)
        or _flow_of(objective)
        or all(getattr(objective, name, None) is not None for name in needed)
    ):
        return ""
    return "its objective has neither noise_scheduler and num_inference_steps nor config.num_integration_steps"


def _flow_of(objective: Any) -> tuple[int, str] | None:
    """Steps and method of a flow; None where a scheduler is at work."""
    if getattr(objective, "noise_scheduler", None) is not None:
        return None
    config = getattr(objective, "config", objective)
    steps = getattr(config, "num_integration_steps", None)
    return None if steps is None else (int(steps), str(getattr(config, "integration_method", "euler")))


class Sampled(nn.Module):
    """An objective that draws by any sampler: what `with_sampler` puts in the place of the policy's own."""

    def __init__(self, sampler: SamplerConfig, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.sampler, self.horizon, self.action_dim = sampler, horizon, action_dim

    def conditional_sample(self, model: nn.Module, batch_size: int, conditioning_vec: Tensor) -> Tensor:
        chunk, like = (batch_size, self.horizon, self.action_dim), next(model.parameters())

        def output(x: Tensor, t: Tensor) -> Tensor:
            return model(x, t.to(x.device).expand(len(x)), conditioning_vec=conditioning_vec)

        return denoise(self.sampler, output, chunk, like)


class LivePort(_AfterEncoder):
    """A policy of LeRobot's own code, or of that shape."""

    file_remedy = "save policy and processors as a directory with LeRobot (save_pretrained), and export that"

    def __init__(self, policy: Any, adapter: Any) -> None:
        # an attribute of the instance: which of the two a policy has is known only now
        self.entry = next(name for name in _ENTRIES if hasattr(policy, name))  # type: ignore[misc]
        super().__init__(policy, adapter)

    # -- the sampler

    @cached_property
    def sampling(self) -> Sampling:
        objective = self.policy.objective
        if isinstance(objective, Sampled):
            return Sampling.of(objective.sampler)
        if (flow := _flow_of(objective)) is None:
            return Sampling.of_scheduler(objective.noise_scheduler, objective.num_inference_steps, {})
        steps, method = flow
        if method == "euler":
            return Sampling.of(Euler(num_inference_steps=steps))
        if method != "rk4":
            raise PolicyError(f"flow matching by {short(method)} is not known; known are euler and rk4")
        stages = ((t, (t + after) / 2, (t + after) / 2, after) for t, after in pairwise(np.linspace(0, 1, steps + 1)))
        return Sampling(
            tuple(float(t) for step in stages for t in step),
            {"type": method, "num_inference_steps": steps},
            unknown=f"flow matching by {method}, which calls the denoiser several times in a step",
        )

    def with_sampler(self, sampler: SamplerConfig) -> LivePort:
        other = copy.copy(self.policy)
        if isinstance(other, nn.Module):
            other._modules = dict(other._modules)  # torch's copy has the very same table of parts
        other.objective = Sampled(sampler, self.horizon, self.sample_dim)
        return self._sharing_weights(other)

    # -- sizes

    @property
    def sizes_at(self) -> Any:
        return getattr(self.policy, "config", self.policy)

    @property
    def horizon(self) -> int:  # type: ignore[override]
        return self.adapter.widths["tokens"]

    @cached_property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """As `entry` takes them: state and stacked frames by moment, token ids and their mask."""
        config, steps = self.sizes_at, self.n_obs_steps
        state, frames = getattr(config, "robot_state_feature", None), getattr(config, "image_features", None) or {}
        found: dict[str, tuple[int, ...]] = {}
        if state is not None:
            found[STATE] = (steps, int(state.shape[0]))
        if frames:
            found[IMAGES] = (steps, len(frames), *next(iter(frames.values())).shape)
        if getattr(getattr(self.policy, "observation_encoder", None), "text_encoder", None) is not None:
            found |= dict.fromkeys((TOKENS, MASK), (int(getattr(config, "tokenizer_max_length", 77)),))
        return found

    @property
    def action_scale(self) -> NDArray[np.float64]:
        return np.ones(self.adapter.widths["input_dim"])

    # -- observations and actions

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        raise UnsupportedError("observations ahead of the policy's own encoder")

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        found = super().synthetic_observations(count)
        if TOKENS in found:
            found[TOKENS] = torch.randint(1, 100, found[TOKENS].shape)
            found[MASK] = torch.ones(found[MASK].shape, dtype=torch.int64)
        return found

    def explain(self, error: Exception, obs: Any) -> ObservationError | None:
        if isinstance(obs, Mapping) and not isinstance(error, KeyError):
            return None
        held = ", ".join(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
        wanted = ", ".join(f"{name} {shape_text(shape)}" for name, shape in self.inputs.items())
        return ObservationError(
            f"{type(self.policy).__name__}.{self.entry} takes a mapping of tensors, {wanted}; got {held} "
            f"({in_one_line(error)})"
        )

    def action_of(self, returned: Any) -> Tensor:
        return returned if isinstance(returned, Tensor) else super().action_of(returned)

    def entry_result(self, found: dict[str, Tensor]) -> Tensor:
        return found["action"]

    # -- weights

    def normalizer_field(self, name: str) -> ShiftedField:
        """The program ends at normalised actions."""
        return ShiftedField(self.sample_dim).to(next(self.adapter.denoiser.parameters()).device)

    def program(self) -> Program:
        if not isinstance(self.policy, nn.Module):
            raise UnsupportedError("a policy that is no torch module")
        return super().program()

    def settings(self) -> list[Any]:
        objective, config = self.policy.objective, self.sizes_at
        return [
            *(getattr(config, name, None) for name in ("n_obs_steps", "n_action_steps", "horizon")),
            _flow_of(objective),
            getattr(objective, "num_inference_steps", None),
            *scheduler_settings(getattr(objective, "noise_scheduler", None)),
            getattr(objective, "sampler", None),
        ]

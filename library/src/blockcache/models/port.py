"""The port: what blockcache needs of a policy, and all that it sees of one. Every engine and study speaks to this.

A family makes a port of a policy that it recognises (see `registry`); `PublicPort` serves whatever has the interface of the
public Diffusion Policy code. Knows nothing of schedules, engines or tasks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockcache.errors import BlockcacheError, EngineError, PolicyError
from blockcache.files import PathLike
from blockcache.models.adapter import Adapter
from blockcache.models.identity import Identified
from blockcache.models.modules import (
    ModeCheck,
    check_denoiser,
    check_entry_not_compiled,
    check_not_compiled,
    check_program,
)
from blockcache.models.program import Program, UnsupportedError
from blockcache.models.sampling import draw_all
from blockcache.observations.tensors import as_tensor
from blockcache.samplers import SamplerConfig, table

P = TypeVar("P", bound="Port")


def _size(name: str) -> Any:
    return property(lambda port: required(port.sizes_at, name))


class Port(Identified):
    """A policy under the names that blockcache uses. Subclasses say where each is found; `policy` stays the user's object.

    Only what a verb really asks for must be there: a policy without `n_obs_steps` can be accelerated, not rolled out.
    """

    entry: ClassVar[str] = "predict_action"
    """The method that makes one generation: observation in, a dict with `action` out."""
    reentrant: ClassVar[bool] = False
    """Whether several threads may generate at once."""
    begins_after_encoder: ClassVar[bool] = False
    """Whether the program takes the features of an encoder that it does not hold; `inputs_from_call` then finds them."""
    file_remedy: ClassVar[str] = (
        'accelerate the policy, with engine="onnx" behind its encoder, or give it the encoder of the public hybrid image '
        "policies"
    )
    """What to do where an encoder cannot be part of a file."""
    takes_noise: ClassVar[bool] = False
    """Whether `entry` takes `noise`, all of it, (1 + draws, B, T, D); else it draws from torch's global generator."""

    def __init__(self, policy: Any, adapter: Adapter) -> None:
        super().__init__(policy, adapter)
        check_not_compiled(self.module, "policy" if self.module is policy else "denoiser")
        check_entry_not_compiled(policy, self.entry)
        self.mode = ModeCheck(self.module)
        self.mode.check()

    # -- the sampler

    @property
    def sampler(self) -> SamplerConfig | None:
        return self.sampling.sampler

    @abstractmethod
    def with_sampler(self: P, sampler: SamplerConfig) -> P:
        """The same weights (shared, not copied) behind another sampler.

        Args:
            sampler: In place of the policy's own.
        """

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, T, D), for policies whose sampler is known.

        Args:
            batch: B, the number of observations.
            generator: Draws it; without one, torch's global generator.
        """
        assert self.sampler is not None, self.sampling.unknown
        like = next(self.adapter.denoiser.parameters())
        return draw_all(table(self.sampler), (batch, self.horizon, self.sample_dim), like, generator)

    # -- sizes

    @property
    def sizes_at(self) -> Any:
        """What says `n_obs_steps`, `n_action_steps` and `horizon`: the policy."""
        return self.policy

    n_obs_steps: int = _size("n_obs_steps")
    n_action_steps: int = _size("n_action_steps")
    horizon: int = _size("horizon")

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """The observation: shapes by name, without the batch, as far as the policy tells them."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Which of the inputs are frames, (n_obs_steps, channels, height, width)."""
        return ()

    @property
    @abstractmethod
    def action_scale(self) -> NDArray[np.float64]:
        """(A,) what turns robot units into normalised ones; its length is the number of an action's values."""

    @property
    def action_offset(self) -> NDArray[np.float64]:
        """(A,) what is added then: normalised = action * scale + offset."""
        return np.zeros(len(self.action_scale))

    @property
    def sample_dim(self) -> int:
        """Numbers per token of the noise: the action's, unless observations are in-painted."""
        return len(self.action_scale)

    def action_mask(self, *args: Any, **kwargs: Any) -> Tensor | float:
        """What the clean sample is multiplied by to be the action, from what the denoiser is called with: a mask, where a
        robot lacks some of an action's numbers.

        Args:
            args: The denoiser's positional arguments.
            kwargs: Those by name.
        """
        return 1.0

    @property
    def executed(self) -> tuple[int, int]:
        """First and one behind the last token that the robot executes."""
        return self.n_obs_steps - 1, self.n_obs_steps - 1 + self.n_action_steps

    def executing(self: P, actions: int) -> P:
        """The same weights (shared, not copied), executing so many actions of each chunk.

        Args:
            actions: How many, `n_action_steps`.
        """
        if actions != self.n_action_steps:
            raise PolicyError(
                f"{type(self.policy).__name__} executes {self.n_action_steps} actions of each chunk, and was tuned to "
                f"execute {actions}; only its own code can change that: set its n_action_steps to {actions}"
            )
        return self

    @property
    def task(self) -> str | None:
        """What the policy says it was trained for."""
        return None

    # -- observations

    def prepare_observation(self, obs: Any) -> Any:
        """An observation as a rollout or a file has it (an array or a mapping of arrays), as `entry` takes it.

        Args:
            obs: A batch of them.
        """
        return {name: as_tensor(value) for name, value in obs.items()} if isinstance(obs, Mapping) else obs

    @abstractmethod
    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        """An observation as it was given to `entry`, checked, by the names of `inputs`; for engines that replace it.

        Args:
            obs: What `entry` was given.
            like: A tensor of the device and the dtype that are wanted.
        """

    def check_observation(self, obs: Any) -> None:
        """Refuse what `entry` would silently answer wrongly, such as bytes where it takes fractions.

        Args:
            obs: What `entry` was given.
        """
        return

    def inputs_from_call(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The program's inputs and the start of the noise, from the arguments of the denoiser's first call.

        Needed only where `begins_after_encoder`.

        Args:
            args: The denoiser's positional arguments.
            kwargs: Those by name.
        """
        raise NotImplementedError

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        """Made-up observations over the range that the policy was trained on, from torch's global generator.

        Args:
            count: How many, in one batch.
        """
        return {name: 2 * torch.rand(count, *shape) - 1 for name, shape in self.inputs.items()}

    def explain(self, error: Exception, obs: Any) -> BlockcacheError | None:
        """One sentence for what the policy raised, if the observation is to blame.

        Args:
            error: What it raised.
            obs: What `entry` was given.
        """
        return None

    @property
    def encoder_flops(self) -> int:
        """FLOPs of the cameras' networks, as far as they are known: done once in a generation."""
        return 0

    # -- actions

    def action_of(self, returned: Any) -> Tensor:
        """The executed actions (B, n_action_steps, A) in what `entry` returned.

        Args:
            returned: By one call of `entry`.
        """
        if not isinstance(returned, Mapping) or "action" not in returned:
            held = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
            raise PolicyError(
                f"{type(self.policy).__name__}.{self.entry} must return a mapping with 'action', got "
                f"{type(returned).__name__}{held}"
            )
        return returned["action"]

    def chunk_of(self, returned: Any) -> Tensor:
        """What `entry` returned from the first executed action on, (B, actions, A): to the chunk's end, if that is told.

        Args:
            returned: By one call of `entry`.
        """
        if isinstance(returned, Mapping) and "action_pred" in returned:
            return returned["action_pred"][:, self.executed[0] :]
        return self.action_of(returned)

    def entry_result(self, found: dict[str, Tensor]) -> Any:
        """What `entry` would return, from an engine's `action` and `action_pred`.

        Args:
            found: The engine's tensors under these two names.
        """
        return found

    # -- weights

    @property
    def trusted(self) -> bool:
        """Whether a generation runs nothing but code of this package and torch, so that what it does is known."""
        return False

    def program(self) -> Program:
        """The denoiser, folded; `UnsupportedError` says what cannot be."""
        if self.sampler is None:
            raise UnsupportedError(self.sampling.unknown)
        if self.adapter.fold is None:
            raise UnsupportedError(f"the family {self.adapter.family}")
        return check_program(self.adapter.fold(self))

    def file_program(self, fixed: Mapping[str, Any]) -> Program:
        """The program of a file, which has to hold the encoders too.

        Args:
            fixed: inputs of the policy that never change, by name, such as the words of its one task: they, and what is
                made of them alone, become constants.
        """
        if fixed:
            raise EngineError(
                f"{', '.join(map(str, fixed))} cannot be constants of a file: no input of this policy can"
            )
        if self.begins_after_encoder:
            raise EngineError(
                f"the encoder of {type(self.policy).__name__} is not one that can be part of a file; {self.file_remedy}"
            )
        return self.program()

    def file_inputs(self, obs: Any) -> dict[str, Tensor]:
        """What an export of the policy takes of an observation; more than that, where some of it became constants.

        Args:
            obs: As `entry` takes it.
        """
        return self.read_observation(obs, next(self.adapter.denoiser.parameters()))

    def check_weights(self) -> None:
        """Refuse weights that no action can come of; asked for before the policy runs."""
        check_denoiser(self.adapter.denoiser)

    @property
    def parts_outside_program(self) -> tuple[nn.Module, ...]:
        """Parts that every engine runs as they are, so that no engine need notice a change of their weights."""
        return ()

    @property
    def scratch_attributes(self) -> list[tuple[nn.Module, str]]:
        """Attributes in which parts write something down while they run, and never read it."""
        return []

    def settings(self) -> list[Any]:
        """What `entry` looks up in every call and a whole-loop engine only once, to notice a change."""
        return []

    def save(self, directory: PathLike) -> bool:
        """Write a directory that `load_policy` opens; False if only the policy's own code can save it.

        Args:
            directory: Made where it is missing.
        """
        return False


def required(policy: Any, name: str) -> int:
    """A size that only some verbs need."""
    value = getattr(policy, name, None)
    if not isinstance(value, Integral) or isinstance(value, bool):  # numpy's whole numbers too
        raise PolicyError(
            f"{type(policy).__name__} does not say its {name}, which rollouts and whole-loop engines need; set policy.{name}"
        )
    return int(value)

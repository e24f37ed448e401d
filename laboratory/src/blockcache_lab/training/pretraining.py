"""A camera policy out of one that sees numbers: an encoder learns to tell these from frames, the denoiser is taken over.

One linear layer reads the numbers from what the encoder makes of a moment. The denoiser begins with a linear layer too, so
both become one in the policy that comes out. Frames are drawn anew for every step, from states at random: there are as many
labels as one likes, and demonstrations are not needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from blockcache.files import PathLike
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.loading import load_policy
from blockcache.models.registry import port_of
from blockcache_lab.tasks.pusht_image import PushTImage
from blockcache_lab.training.config import TrainConfig
from blockcache_lab.training.data import TrainingError
from blockcache_lab.training.loop import carry_out
from blockcache_lab.training.run import TrainingRun
from blockcache_runtime.checks import BYTE

TASKS = {"pusht-image": ("pusht", PushTImage)}
"""Tasks that can be drawn in any state: the task that shows the same as numbers, and the simulator."""
EPOCH = 100  # steps between two validations
_VALIDATED = 256
_VALIDATION = (2**32 - 1, 0)  # seed of the states of a validation; steps have those of the run


class Pretraining(TrainingRun):
    """`taught` is the policy whose numbers the encoder learns to tell, and whose denoiser the new policy has."""

    def __init__(self, config: TrainConfig, taught: DiffusionTransformerPolicy, identity: dict[str, Any]) -> None:
        self.config, self.identity, self.taught = config, identity, taught
        self.scene = TASKS[config.task][1](config.spec)
        self.scene.reset(0)
        self.policy = config.recipe.begin(config.policy_config())
        kept = {name: value for name, value in taught.model.state_dict().items() if "cond_obs_emb" not in name}
        self.policy.model.load_state_dict(kept, strict=False)
        self.policy.normalizer.action.load_state_dict(taught.normalizer.action.state_dict())
        for name, low_high in self.scene.ranges.items():
            self.policy.normalizer.field(name).fit(torch.tensor(low_high, dtype=torch.float32))
        self.read_out = nn.Linear(self.policy.config.obs_dim, taught.config.obs_dim)
        self.average, self.average_read_out = copy.deepcopy(self.policy).eval(), copy.deepcopy(self.read_out)
        self.follow(
            _learnt(self.policy.obs_encoder, self.read_out), _learnt(self.average.obs_encoder, self.average_read_out)
        )
        self.checked = self._drawn(np.random.default_rng(_VALIDATION), _VALIDATED)

    @property
    def batch(self) -> int:
        return self.config.batch

    @property
    def steps_per_epoch(self) -> int:
        return EPOCH

    @property
    def measure(self) -> str:
        return "MSE of the observation, normalised; validation: mean error in the task's units"

    def origin(self) -> dict[str, Any]:
        names = ("begins_with", "begins_with_weights")
        return {"data": "frames of states at random"} | {name: self.identity[name] for name in names}

    def step_loss(self, step: int) -> Tensor:
        seen, numbers = self._drawn(np.random.default_rng((self.config.seed, step)), self.batch)
        return mse_loss(self.read_out(self.policy.encode(seen)), self.taught.normalizer.obs.normalize(numbers))

    @torch.no_grad()
    def validate(self) -> float:
        seen, numbers = self.checked
        told = self.taught.normalizer.obs.unnormalize(self.average_read_out(self.average.encode(seen)))
        return float((told - numbers).abs().mean())

    def result(self) -> Any:
        """The averaged encoder, and the denoiser whose first layer reads its features as it read the numbers."""
        first: Any = self.taught.model.cond_obs_emb
        new, read_out = self.average.model.cond_obs_emb, self.average_read_out
        with torch.no_grad():
            new.weight.copy_(first.weight @ read_out.weight)
            new.bias.copy_(first.weight @ read_out.bias + first.bias)
        return super().result()

    def _drawn(self, rng: np.random.Generator, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Scenes at random: what the camera policy sees, (N, moments, ...) by name, and what the other one does."""
        moments = self.policy.config.n_obs_steps
        scenes = [self.scene.show(state) for state in self.scene.random_states(rng, count)]
        numbers = torch.from_numpy(np.stack([numbers for _, numbers in scenes]))
        seen = {}
        for name in self.config.spec.shapes:
            values = torch.from_numpy(np.stack([shown[name] for shown, _ in scenes]))
            values = values.float() / BYTE if values.dtype == torch.uint8 else values
            seen[name] = values.reshape(-1, moments, *values.shape[1:])
        return seen, numbers.reshape(-1, moments, numbers.shape[1])


def pretrain(
    task: str,
    taught: PathLike,
    out: PathLike,
    *,
    settings: Mapping[str, Any],
    threads: int | None = None,
    resume: bool = True,
    progress: bool = True,
) -> Path:
    """Make a camera policy for `task` and leave it in the directory `out`, which is returned; killed, it goes on.

    Args:
        task: one with a camera that can be drawn in any state: `TASKS`.
        taught: a dp-t policy of the task that shows the same as numbers.
        out: the policy directory to write.
        settings: of `TrainConfig`, those that are not the policy's sizes: epochs (of 100 steps), batch, lr, trunk, seed.
        threads: for torch.
        resume: go on from the state beside `out`.
        progress: whether to show it.
    """
    if task not in TASKS:
        raise TrainingError(f"task {task!r} cannot be drawn in any state; those that can: {', '.join(TASKS)}")
    policy, shown_as = load_policy(taught), TASKS[task][0]
    if not isinstance(policy, DiffusionTransformerPolicy) or policy.config.task != shown_as:
        raise TrainingError(
            f"an encoder for {task!r} learns what a dp-t policy of task {shown_as!r} sees, and {taught} is none; give one"
        )
    sizes = policy.config
    config = TrainConfig(
        task,
        width=sizes.n_emb,
        layers=sizes.n_layer,
        heads=sizes.n_head,
        horizon=sizes.horizon,
        n_obs_steps=sizes.n_obs_steps,
        n_action_steps=sizes.n_action_steps,
        crop=96,
        **settings,
    )
    if config.batch % sizes.n_obs_steps:
        raise TrainingError(
            f"the batch must be a multiple of {sizes.n_obs_steps}, the policy's moments; got {config.batch}"
        )
    identity = {**config.to_dict(), "begins_with": Path(taught).name, "begins_with_weights": port_of(policy).weights}
    how: Any = {"threads": threads, "resume": resume, "progress": progress}
    return carry_out(lambda: Pretraining(config, policy, identity), identity, Path(out), **how)


def _learnt(encoder: nn.Module, read_out: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {f"obs_encoder.{name}": weight for name, weight in encoder.named_parameters()}
    return named | {f"read_out.{name}": weight for name, weight in read_out.named_parameters()}

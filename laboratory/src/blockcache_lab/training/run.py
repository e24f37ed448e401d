"""One training run: its data, weights and averages, and a single step of it.

What differs between families is in their recipes. Knows nothing of files or clocks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from blockcache.errors import short
from blockcache_lab.training.config import TrainConfig
from blockcache_lab.training.data import Demonstrations, TrainingError, split
from blockcache_lab.training.objective import objective_of
from blockcache_lab.training.recipes.base import Windows
from blockcache_lab.training.state import Progress

_BETAS, _WEIGHT_DECAY, _EMA_DECAY, _EMA_POWER = (0.9, 0.95), 1e-3, 0.9995, 0.75

_FREE = ("task", "training", "weights", "sampler", "p_drop_emb", "p_drop_attn")
"""Settings in which a policy may differ from the one that its training begins with."""


class TrainingRun:
    """Everything a run holds in memory. `identity` tells its state file from those of other runs."""

    def __init__(
        self, config: TrainConfig, demos: Demonstrations, identity: dict[str, Any], data: str, begin: Any = None
    ) -> None:
        recipe, (kept, held_out) = config.recipe, split(demos)
        self.config, self.identity, self.data = config, identity, data
        self.policy = recipe.begin(config.policy_config(), config.start)
        if begin is None:
            recipe.fit(self.policy, demos, kept)
        else:
            take_over(self.policy, begin)
        self.average = copy.deepcopy(self.policy).eval()  # with a moving average of the weights: the one that is kept
        windows = [recipe.windows(self.policy, demos, episodes) for episodes in (kept, held_out)]
        self.train, self.held_out = (each.encoded(self.average) if config.frozen else each for each in windows)
        self.objective = objective_of(self.policy.config.sampler)
        self.follow(recipe.learnt(self.policy, config.frozen), recipe.learnt(self.average, config.frozen))

    def follow(self, weights: dict[str, Tensor], averages: dict[str, Tensor]) -> None:
        """Begin at step 0: these weights learn, and these are their averages."""
        self.weights, self.averages = weights, averages
        self.optimizer = _optimizer(list(weights.values()), self.config.lr)
        self.progress = Progress()

    @property
    def batch(self) -> int:
        return min(self.config.batch, len(self.train))

    @property
    def steps_per_epoch(self) -> int:
        # The incomplete last batch is left out; the shuffle leaves out other windows in each epoch.
        return len(self.train) // self.batch

    @property
    def total(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes from step to step, by name; copying into these tensors restores a run."""
        named: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            moments = self.optimizer.state[weight]
            named |= {
                f"weight.{name}": weight.detach(),
                f"average.{name}": self.averages[name].detach(),
                f"mean.{name}": moments["exp_avg"],
                f"square.{name}": moments["exp_avg_sq"],
                f"count.{name}": moments["step"],
            }
        return named

    def loss(self, policy: Any, windows: Windows, rows: Tensor, t: Tensor) -> Tensor:
        """Mean squared error of the denoiser's output, for windows `rows` at times `t`."""
        clean = windows.action[rows]
        noise = torch.randn_like(clean)
        noisy, target = self.objective.mix(clean, noise, t), self.objective.target(clean, noise)
        predicted = self.config.recipe.predict(policy, noisy, t, windows.conditions(policy, rows))
        if windows.counted is None:
            return mse_loss(predicted, target)
        counted = windows.counted[rows].expand_as(clean)
        return ((predicted - target).square() * counted).sum() / counted.sum().clamp(min=1)

    def rows(self, step: int) -> Tensor:
        """Which windows a step sees. Every epoch has a shuffle of its own; making it anew takes well below 1 ms."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self.train))
        return torch.from_numpy(order[position * self.batch : (position + 1) * self.batch])

    def step_loss(self, step: int) -> Tensor:
        return self.loss(self.policy, self.train, self.rows(step), self.objective.draw(self.batch))

    def step(self) -> None:
        """One update of the weights and of their average."""
        step = self.progress.step
        torch.manual_seed(_mix(self.config.seed, step))
        loss = self.step_loss(step)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.total, self.config)
        self.optimizer.step()
        keep = ema_decay(step)
        with torch.no_grad():
            for name, weight in self.weights.items():
                self.averages[name].lerp_(weight, 1 - keep)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss is {value} at step {step}; lower the learning rate ({self.config.lr})")
        smooth = value if self.progress.loss is None else 0.99 * self.progress.loss + 0.01 * value
        self.progress = replace(self.progress, step=step + 1, loss=smooth)

    @torch.no_grad()
    def validate(self) -> float:
        """The averaged weights' loss on held-out episodes; noise and times are the same every time."""
        torch.manual_seed(0)
        rows = self.held_out.validated
        return self.loss(self.average, self.held_out, rows, self.objective.spread(rows)).item()

    def result(self) -> Any:
        """The averaged policy, with the record of its training."""
        self.average.config = self.config.policy_config(self.record())
        return self.average

    @property
    def measure(self) -> str:
        return f"{self.objective.predicts} MSE"

    def origin(self) -> dict[str, Any]:
        """What the run learns from, and what it began with."""
        data = {"data": self.data, "data_sha256": self.identity["data_sha256"], "windows": len(self.train)}
        given = ("begins_with", "begins_with_weights", "frozen")
        return data | {name: self.identity[name] for name in given if name in self.identity}

    def record(self) -> dict[str, Any]:
        """What the policy's config says about its training."""
        config, done = self.config, self.progress
        return {
            **self.origin(),
            "batch": self.batch,
            "steps": done.step,
            "epochs": done.step // self.steps_per_epoch,
            "planned_epochs": config.epochs,
            "seed": config.seed,
            **({} if config.start == "public" else {"start": config.start}),
            "optimizer": f"AdamW(betas {_BETAS[0]}/{_BETAS[1]}, wd {_WEIGHT_DECAY:g} on matrices)",
            "lr": f"{config.lr:g}, {config.warmup} warm-up steps, cosine to 0",
            "ema": f"decay min({_EMA_DECAY}, 1-(1+step)^-{_EMA_POWER})",
            "loss": self.measure,
            "training_loss": done.loss,
            "validation_loss": done.validation_loss,
            "seconds": round(done.seconds, 3),
        }


def take_over(policy: Any, begin: Any) -> None:
    """Copy the weights and the normaliser of a policy of the same inputs and sizes; any other is refused."""
    needed, found = _sizes(policy.config), _sizes(begin.config)
    other = [
        f"{name} {short(found.get(name))} (needed {short(needed.get(name))})"
        for name in {**needed, **found}
        if needed.get(name) != found.get(name)
    ]
    if other:
        raise TrainingError(
            f"training cannot begin with that policy: {', '.join(other)}; give its settings to this run, or begin anew"
        )
    policy.load_state_dict(begin.state_dict())


def _sizes(config: Any) -> dict[str, Any]:
    """What decides the shape and the meaning of the weights."""
    sizes = {name: value for name, value in config.to_dict().items() if name not in _FREE}
    return sizes | {f"encoder's {name}": value for name, value in (sizes.pop("encoder", None) or {}).items()}


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine that reaches 0 after the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - config.warmup) / max(1, total - config.warmup)))


def ema_decay(step: int) -> float:
    return float(min(_EMA_DECAY, 1 - (1 + step) ** -_EMA_POWER))


def _optimizer(weights: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """AdamW with its moments in place from the start, so that a state can be copied into them."""
    # Two axes: the matrices of linear and attention layers. Biases and norms have one axis, embeddings three, filters four.
    decayed = [weight for weight in weights if weight.ndim == 2]
    others = [weight for weight in weights if weight.ndim != 2]
    groups = [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=_BETAS, foreach=True)
    for weight in weights:
        optimizer.state[weight] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return optimizer


def _mix(seed: int, step: int) -> int:
    """A seed for one step. Mixed down to 32 bits because torch's CPU generator ignores the bits above."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])

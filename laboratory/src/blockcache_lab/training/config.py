"""The settings of a training run, checked on creation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from blockcache.tasks import TaskSpec, task_spec
from blockcache_lab.training.data import TrainingError
from blockcache_lab.training.recipes.base import Recipe
from blockcache_lab.training.recipes.dit import DiTRecipe
from blockcache_lab.training.recipes.dpt import DPTRecipe
from blockcache_lab.training.recipes.rdt import RDTRecipe

RECIPES: dict[str, Recipe] = {"dpt": DPTRecipe(), "rdt": RDTRecipe(), "dit": DiTRecipe()}


@dataclass(frozen=True)
class TrainConfig:
    """What decides the outcome of a run, together with the data. The defaults are the paper's size.

    horizon, n_obs_steps: of the policy; the family's own where nothing else is said.
    trunk: width of the cameras' networks, for tasks with cameras: 64, ResNet18's, where nothing else is said.
    crop: side of what they look at, of a frame's pixels: four fifths of the frame's where nothing else is said.
    frozen: whether they stay as they are, those of the policy that the run begins with.
    family: one of `RECIPES`.
    objective: what the denoiser learns, of families that have a choice; their first where nothing else is said.
    dropout: share of the numbers behind attention and feed-forward layers that each training step leaves out.
    start: the weights that learning begins with, of families that have a choice: "public", as the public recipe draws them,
        or "scaled", by the width of each layer, with observations that are told apart from the first step on.
    """

    task: str
    width: int = 256
    layers: int = 8
    heads: int = 4
    horizon: int = field(default=None)  # type: ignore[assignment]  # filled in below
    n_obs_steps: int = field(default=None)  # type: ignore[assignment]
    n_action_steps: int = 8
    epochs: int = 60
    batch: int = 128
    lr: float = 6e-4
    warmup: int = 300
    seed: int = 0
    trunk: int | None = None
    crop: int | None = None
    frozen: bool = False
    family: str = "dpt"
    objective: str | None = None
    dropout: float = 0.0
    start: str = "public"

    def __post_init__(self) -> None:
        recipe = self.recipe
        defaults = (
            ("horizon", recipe.horizon),
            ("n_obs_steps", recipe.n_obs_steps),
            ("objective", recipe.objectives[0]),
        )
        for name, default in defaults:
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, least in (("epochs", 1), ("batch", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrainingError(
                    f"training setting {name} must be a whole number of at least {least}, got {value!r}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise TrainingError(f"training setting lr must be a positive number, got {self.lr!r}")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"training setting dropout must be from 0 to below 1, got {self.dropout!r}")
        recipe.check(self)
        self.policy_config()  # refuses widths and horizons that make no policy

    @property
    def spec(self) -> TaskSpec:
        return task_spec(self.task)

    @property
    def recipe(self) -> Recipe:
        if self.family not in RECIPES:
            known = ", ".join(RECIPES)
            raise TrainingError(f"policies of family {self.family!r} cannot be trained; known families are {known}")
        return RECIPES[self.family]

    def policy_config(self, training: dict[str, Any] | None = None) -> Any:
        """The config of the policy that this run makes, with `training` as its record."""
        return self.recipe.config(self, training)

    def to_dict(self) -> dict[str, Any]:
        """What tells runs apart. Settings that came later stand there only where they matter: older states go on."""
        absent: dict[str, Any] = {"trunk": None, "crop": None, "frozen": False, "family": "dpt", "objective": None}
        absent |= {"dropout": 0.0, "start": "public"}
        return {name: value for name, value in asdict(self).items() if name not in absent or value != absent[name]}

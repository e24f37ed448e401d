"""One recipe for each family that can be trained."""

from __future__ import annotations

from blockcache_lab.training.errors import TrainingError
from blockcache_lab.training.recipes.base import Recipe
from blockcache_lab.training.recipes.dit import DiTRecipe
from blockcache_lab.training.recipes.dpt import DPTRecipe
from blockcache_lab.training.recipes.rdt import RDTRecipe

RECIPES: dict[str, Recipe] = {"dpt": DPTRecipe(), "rdt": RDTRecipe(), "dit": DiTRecipe()}

__all__ = ["RECIPES", "Recipe", "recipe_of"]


def recipe_of(family: str) -> Recipe:
    if family not in RECIPES:
        raise TrainingError(f"policies of family {family!r} cannot be trained; known families are {', '.join(RECIPES)}")
    return RECIPES[family]

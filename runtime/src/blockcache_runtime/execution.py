"""How the chunks of a policy are asked for and drawn: what decides the actions besides the policy itself.

Knows nothing of policies, rollouts or exports, all of which read it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.errors import EngineError


@dataclass(frozen=True)
class Execution:
    """The default is a policy as it was trained.

    Args:
        replan: Actions executed of each chunk before the next is asked for; None for as many as the policy says.
        temperature: What all noise of a generation is multiplied by; 0 always gives the same chunk.
        candidates: Chunks drawn at once, of which the medoid is executed: the one nearest to all others.
    """

    replan: int | None = None
    temperature: float = 1.0
    candidates: int = 1

    def __post_init__(self) -> None:
        if (self.replan is not None and self.replan < 1) or self.candidates < 1:
            raise EngineError(f"replan and candidates are 1 or more, got {self.replan} and {self.candidates}")
        if not 0 <= self.temperature < math.inf:
            raise EngineError(
                f"a temperature is a number of 0 or more that noise is multiplied by, got {self.temperature}"
            )

    @property
    def keeps_noise(self) -> bool:
        """Whether a generation gets the noise that the policy would draw, and no other."""
        return self.temperature == 1 and self.candidates == 1

    def check(self, actions: int) -> None:
        """Refuse to execute more of a chunk than it has.

        Args:
            actions: Of a chunk, from the first that is due on.
        """
        if self.replan is not None and self.replan > actions:
            raise EngineError(
                f"replan={self.replan} executes so many actions of each chunk, and the horizon leaves {actions}; take "
                "that many at most"
            )

    def generations(self, actions: int) -> float:
        """How many generations there are for so many executed actions, `actions` being what the policy itself executes."""
        return self.candidates * actions / (self.replan or actions)

    def noise(self, drawn: Any) -> Any:
        """The noise that a generation gets, from what was drawn for it, (1 + draws, B, T, D); an array or a tensor."""
        return drawn if self.temperature == 1 else drawn * self.temperature

    def describe(self) -> dict[str, Any]:
        """What differs from the default, in JSON types."""
        default = asdict(AS_TRAINED)
        return {name: value for name, value in asdict(self).items() if value != default[name]}


AS_TRAINED = Execution()


def medoids(chunks: npt.NDArray[Any], candidates: int, scale: npt.NDArray[Any], actions: int) -> npt.NDArray[Any]:
    """Of the candidates for each observation, the one whose distances to all others have the least sum.

    Args:
        chunks: (B * candidates, T, A); those for one observation stand together.
        candidates: For each observation.
        scale: (A,) what turns actions into units that can be compared.
        actions: The first of each chunk, by which they are compared.
    """
    several = chunks.reshape(-1, candidates, *chunks.shape[1:])
    flat = (several * scale)[:, :, :actions].reshape(*several.shape[:2], -1)
    apart = np.linalg.norm(flat[:, :, None] - flat[:, None], axis=-1).sum(axis=-1)  # (B, candidates)
    chosen: npt.NDArray[Any] = several[np.arange(len(several)), apart.argmin(axis=1)]
    return chosen

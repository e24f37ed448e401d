"""Which numbers an action may come from: finite ones within a limit. One sentence each for those that are not.

Looking at the action alone is not enough: a clip, a norm or a softmax turns infinity, or a square that overflows, into
a number that looks like an action. Knows nothing of torch, policies or engines: the largest magnitude comes in, which is
NaN where a number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from blockcache_runtime.errors import NonFiniteError, ObservationError

LIMIT = 1e18
"""Of observations, weights, actions, and rows of the residual stream: beyond it a float32 square overflows."""
NOISE_LIMIT = 1e6
"""Of noise. It is standard normal: nothing that was drawn comes near."""
SENSOR = "check the sensor before asking for an action"
DRAW = "draw_noise makes it"


def within(largest: float, limit: float = LIMIT) -> bool:
    """Whether numbers up to this magnitude are usable; NaN is not."""
    return largest <= limit


def beyond(largest: float, limit: float = LIMIT) -> str:
    """What numbers hold that are not within the limit, for a sentence."""
    return f"values beyond {limit:g}" if math.isfinite(largest) else "NaN or infinity"


def check_input(largest: float, what: str = "the observation") -> None:
    """Refuse an observation, or noise (`what` is "noise"), that is not finite or absurdly large, and blame it alone."""
    limit, hint = (NOISE_LIMIT, DRAW) if what == "noise" else (LIMIT, SENSOR)
    if not within(largest, limit):
        raise ObservationError(f"{what} holds {beyond(largest, limit)}; {hint}")


def check_generation(largest: float, observed: Callable[[], float]) -> None:
    """Refuse an action that came out of something that was not finite, or is itself no number.

    largest   of the action, and of everything on its way where an overflow shows
    observed  finds the observation's largest magnitude, so that a reader can tell who is to blame
    """
    if not within(largest):
        raise NonFiniteError(
            f"no action is given, since the policy's numbers came to {beyond(largest)} on the way to it; the observation "
            f"reaches {observed():.3g}: check the sensor, or the policy's weights if that is as usual"
        )

"""From a recording to a schedule: ACS for each block, then the bubbling union, named after the paper; or action costs.

With action costs one budget serves all blocks. For each block the dynamic programme of ACS gives the best schedule for every
number of updates; the numbers are raised where an update gains most for its cost, among the raises that still fit into the
budget. Knows nothing of models or of how a schedule is run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import RecordingError, ScheduleError
from blockcache.schedule import Schedule, generation_flops
from blockcache.solvers.bac import Segments, adaptive, bubbling_union, consecutive, uniform
from blockcache.solvers.recording import METRICS, SIMILARITIES, Recording

UPDATES, UNION, BUDGET = 10, 5, 0.15
PAPER_METHODS = ("bac", "blockwise", "unified", "uniform")
METHODS = (*PAPER_METHODS, "action")
OBJECTIVES = ("anchor", "consecutive")
WORK = 25 * 10**9
"""Sums in the dynamic programme of a budget, half a minute's work; more than that is refused."""
Array = NDArray[np.float64]


def most_changing(recording: Recording, count: int) -> tuple[str, ...]:
    """The `count` blocks, of any kind, with the largest scores: those that the union is over."""
    order = np.argsort(-recording.scores, kind="stable")
    return tuple(recording.blocks[index].name for index in order[:count])


def solve(
    recording: Recording,
    updates: float | None = None,
    union: int | None = None,
    metric: str = "cosine",
    method: str = "bac",
    objective: str = "anchor",
    last: bool = False,
    *,
    budget: float | None = None,
    flops: float | None = None,
    costs: Mapping[str, float] | None = None,
) -> Schedule:
    """A schedule from a recording.

    Method "action" takes one of `updates`, `budget` and `flops`, 0.15 of the budget without any; others take `updates`.

    Args:
        recording: What `calibrate` gave; for method "action" with `action_costs=True`.
        updates: Update steps of each block, S in the paper, 10 unless given; with "action" on average over the blocks.
        union: How many blocks the bubbling union is over, n in the paper; 5 unless there are fewer blocks.
        metric: "cosine" as in the paper, "mse" (as a rule the better one), "l1" or "wasserstein".
        method: "bac" (ACS per block, then the union), "blockwise" (no union), "unified" (the first block's ACS steps for
            all), "uniform" (evenly spaced) or "action" (where the executed action needs it, within a budget).
        objective: "anchor", or for comparison "consecutive".
        last: Compute every block at the last step too, as the authors' released code does; the paper does not say so.
        budget: The share of the full generation's FLOPs, what is paid outside the blocks included; with `costs` the share
            of what all blocks cost at all steps.
        flops: FLOPs of one generation.
        costs: What one update of each block costs by its name, such as milliseconds; then `budget` counts in these.
    """
    _check_choice("method", method, METHODS)
    if method == "action":
        if last:
            raise ScheduleError(
                "last goes with the paper's methods; method 'action' computes the last step where it pays"
            )
        return _solve_action(recording, updates, budget, flops, costs)
    if any(given is not None for given in (budget, flops, costs)):
        raise ScheduleError(f"budget, flops and costs go with method 'action', got method {method!r}")
    count: Any = UPDATES if updates is None else updates  # whole: the solvers check it
    union = min(UNION, len(recording.blocks)) if union is None else union
    _check_choice("metric", metric, METRICS)
    _check_choice("objective", objective, OBJECTIVES)
    if not isinstance(union, int) or isinstance(union, bool) or union < 0:
        raise ScheduleError(f"union must be 0 or a positive number of blocks, got {union!r}")
    if union > len(recording.blocks):
        raise ScheduleError(f"union is over {union} blocks, but there are only {len(recording.blocks)}; ask for fewer")
    solver = adaptive if objective == "anchor" else consecutive
    names = [block.name for block in recording.blocks]

    def acs(name: str) -> tuple[int, ...]:
        return solver(recording.matrix(metric, name), count, maximise=metric in SIMILARITIES)

    origin: dict[str, Any] = {"method": method, "updates": count}
    if method == "uniform":
        steps = dict.fromkeys(names, uniform(recording.steps, count))
    else:
        origin |= {"metric": metric, "objective": objective, "generations": recording.generations}
        steps = dict.fromkeys(names, acs(names[0])) if method == "unified" else {name: acs(name) for name in names}
    if method == "bac":
        upstream = most_changing(recording, union)
        steps = bubbling_union(steps, upstream, recording.blocks)
        origin |= {"union": union, "union_blocks": list(upstream)}
    if last:
        steps = {name: tuple(sorted({*own, recording.steps - 1})) for name, own in steps.items()}
        origin |= {"last": True}
    return Schedule(recording.steps, steps, recording.fingerprint, origin)


def _solve_action(
    recording: Recording,
    updates: float | None,
    budget: float | None,
    flops: float | None,
    costs: Mapping[str, float] | None,
) -> Schedule:
    if recording.action_costs is None:
        raise RecordingError(
            "the recording has no action costs; make one that has with 'blockcache calibrate POLICY --action-costs', or "
            "calibrate(policy, observations, action_costs=True)"
        )
    asked = {"updates": updates, "budget": budget, "flops": flops}
    asked = {name: value for name, value in asked.items() if value is not None} or {"budget": BUDGET}
    if len(asked) > 1:
        raise ScheduleError(f"method 'action' takes one of updates, budget and flops, got {' and '.join(asked)}")
    ((what, value),) = asked.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ScheduleError(f"{what} must be a number, got {value!r}")
    prices, fixed, unit = _prices(recording, what, costs)
    steps, names = recording.steps, [block.name for block in recording.blocks]
    full, least = fixed + steps * sum(prices), fixed + sum(prices)
    # one of what was asked for, in the unit of the prices
    scale = {"updates": len(names), "budget": full, "flops": 1}[what]
    if value * scale < least * (1 - 1e-12) or value * scale > full * (1 + 1e-12):
        raise ScheduleError(
            f"{what} must be from {least / scale:.4g}, one update of each block and what every step costs besides, to "
            f"{full / scale:.4g}, everything, got {value!r}"
        )
    split = split_budget(recording.action_costs, prices, value * scale - fixed)
    origin = {
        "method": "action",
        what: value,
        "counted_in": unit,
        "share": (fixed + split.spent) / full,
        "expected_squared_error": split.error,
        "generations": recording.generations,
    }
    return Schedule(steps, dict(zip(names, split.steps, strict=True)), recording.fingerprint, origin)


def _prices(recording: Recording, what: str, costs: Mapping[str, float] | None) -> tuple[list[float], float, str]:
    """What an update of each block costs, what is paid in any case, and in which unit."""
    names = [block.name for block in recording.blocks]
    if costs is not None:
        if what != "budget":
            raise ScheduleError(f"costs go with a budget, the share of them that may be spent, got {what}")
        if set(costs) != set(names):
            odd = sorted(set(costs) ^ set(names))
            raise ScheduleError(
                f"costs must name each block once, {names[0]} to {names[-1]}; missing or unknown: {odd}"
            )
        bad = [name for name in names if not (np.isfinite(costs[name]) and costs[name] > 0)]
        if bad:
            raise ScheduleError(f"costs must be positive numbers, got {costs[bad[0]]!r} for {bad[0]}")
        return [float(costs[name]) for name in names], 0.0, "costs"
    if what == "updates":
        return [1.0] * len(names), 0.0, "updates"
    if recording.every_step is None or not all(block.cost > 0 for block in recording.blocks):
        raise ScheduleError(
            "the recording does not say the FLOPs of every block, so a budget of them means nothing; ask for updates, or "
            "give the blocks' costs"
        )
    fixed = generation_flops((), recording.every_step, recording.steps)
    return [float(block.cost) for block in recording.blocks], float(fixed), "flops"


@dataclass(frozen=True)
class Split:
    """Update steps by block, the error that is expected of them, and what they cost."""

    steps: tuple[tuple[int, ...], ...]
    error: float
    spent: float


def split_budget(costs: Array, prices: Sequence[float], limit: float) -> Split:
    """The schedules of all blocks with the least error, as far as the budget allows.

    Args:
        costs: (blocks, K, K): [b, s, e] is the error of computing block b at step s and reusing it up to step e.
        prices: What one update of each block costs, positive.
        limit: What all updates together may cost; one for each block at least.
    """
    blocks, steps = costs.shape[:2]
    if blocks * steps**3 > WORK:
        raise ScheduleError(
            f"{blocks} blocks of {steps} steps are more than this solver takes; calibrate with a sampler of fewer steps"
        )
    limit *= 1 + 1e-12  # a budget that is just enough must not fail by rounding
    solved = [_segments(block) for block in costs]
    errors = np.array([[-item.value(count) for count in range(1, steps + 1)] for item in solved])
    counts = split_counts(errors, prices, limit)
    chosen = tuple(item.choose(count) for item, count in zip(solved, counts, strict=True))
    error = sum(float(errors[block, count - 1]) for block, count in enumerate(counts))
    return Split(chosen, error, float(np.dot(counts, prices)))


def split_counts(errors: Array, prices: Sequence[float], limit: float) -> list[int]:
    """How often each block is computed; errors (blocks, K) are those of each block with 1, 2, ... K updates."""
    counts, left = [1] * len(errors), limit - sum(prices)
    while True:
        raises = [_best_raise(errors[block], counts[block], left / price) for block, price in enumerate(prices)]
        block = int(np.argmax([rate / price for (rate, _), price in zip(raises, prices, strict=True)]))
        rate, count = raises[block]
        if rate <= 0:
            return counts
        left -= prices[block] * (count - counts[block])
        counts[block] = count


def _best_raise(errors: Array, count: int, room: float) -> tuple[float, int]:
    """The largest gain per update that `room` more updates allow, and the number of updates that has it."""
    gains = errors[count - 1] - errors[count : count + int(room)]
    if not gains.size:
        return 0.0, count
    rates = gains / np.arange(1, len(gains) + 1)
    best = int(rates.argmax())
    return float(rates[best]), count + 1 + best


def _segments(costs: Array) -> Segments:
    steps = len(costs)
    gain = np.full((steps, steps + 1), -np.inf)
    upper = np.triu_indices(steps)
    gain[upper[0], upper[1] + 1] = -costs[upper]
    return Segments(gain, steps, float(costs[upper].max()))


def _check_choice(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ScheduleError(f"unknown {what} {value!r}, known are {', '.join(known)}")

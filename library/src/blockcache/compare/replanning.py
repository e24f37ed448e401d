"""Fewer actions executed of each chunk: what of it is rolled out, and when it is taken. Knows nothing of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from blockcache.compare.methods import parse_method
from blockcache.compare.reuse_parts import Executed
from blockcache.measure.statistics import Estimate
from blockcache.results.tuning import Goal, Point

PARTS = (2, 4)
"""Half and a quarter of the actions that the policy executes of a chunk."""


def replan(
    points: Sequence[Point],
    best: Point,
    goal: Goal,
    actions: int,
    rate_hz: float,
    differences: Callable[[Sequence[Point]], Mapping[str, Estimate]],
) -> tuple[list[Point], Point]:
    """All points, and what is chosen once the best was rolled out executing fewer actions of each chunk, too. That is taken
    only if the whole interval of its difference is above the best's estimate: what is chosen of several looks better than
    it is.

    Args:
        points: That were tried.
        best: Of those that were rolled out, executing as many actions as the policy says.
        goal: What is asked for; the fastest for a loss never replans.
        actions: That the policy executes of a chunk.
        rate_hz: How often a control loop asks for a chunk then: a call ends before the next one is due.
        differences: Gives points' paired differences of the score to the full policy, by the names of their methods.
    """
    more = []
    for part in PARTS if goal.deadline_ms is not None and goal.miss(best) == 0 else ():
        count = actions // part
        if count and best.p95_ms * rate_hz * actions / count <= 1e3:
            method = replace(parse_method(best.method), executed=Executed(count))
            # chunks of which fewer actions are executed are not those that losses were learnt on
            more.append(replace(best, method=method.name, calls=actions / count, rollouts=None, bound=1.0))
    found = differences(more) if more else {}
    more = [replace(point, rollouts=found.get(point.method)) for point in more]
    better = [point for point in more if point.rollouts and point.rollouts.low > -best.expected_loss]
    return [*points, *more], min([best, *better], key=goal.order)

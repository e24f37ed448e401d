"""What `blockcache tune` shows: what was chosen and why, the points by time, and their picture. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS
from blockcache.report.chart import Axis, Panel, Rule, Series
from blockcache.report.document import Block, Bullets, Chart, Paragraph, plain, table
from blockcache.report.methods import estimate
from blockcache.results.losses import shipped_model
from blockcache.results.rollouts import BASELINE
from blockcache.results.tuning import Point, Tuning

MS = Axis("ms per chunk", log=True)
_BOUND = "at most, 90 %"
_ROLLOUTS = "rollouts: difference, 95 %"
_REPLANS = (
    "With `replan=4` the next chunk is asked for after 4 actions: costs are those of all calls for as many actions as the policy executes of a chunk (2 x 1.50 ms), "
    "and each call must keep the deadline. It is taken only if its whole interval is above the same method's difference without it."
)


def _cells(found: Tuning, called: Callable[[str], str] = str) -> list[dict[str, str]]:
    """Every figure of each point by its column's head, the fastest point first; methods are `called` so by their names."""
    on_front = set(found.front)
    return [
        {
            "place": "chosen" if point == found.chosen else "front" if point in on_front else "",
            "method": plain(called(point.method)),
            "engine, threads": f"{plain(point.engine)}, {point.threads}",
            "p50 ms": _each(point, point.p50_ms),
            "p95 ms": _each(point, point.p95_ms),
            "over plain": f"{found.plain_ms / point.cost_ms:.0f}x",
            "GFLOP": f"{point.calls * point.flops / 1e9:.3f}",
            "predicted loss": f"{point.loss:.3f}",
            _BOUND: _bound(point),
            "centre shift": f"{point.distances.centre_shift.mean:.3f}",
            "beyond spread": f"{point.distances.beyond_spread.mean:.3f}",
            "spread": f"{point.distances.spread.mean:.2f}",
            _ROLLOUTS: estimate(point.rollouts, "{:+.3f}"),
        }
        for point in sorted(found.points, key=lambda point: point.cost_ms)
    ]


def _each(point: Point, ms: float) -> str:
    """Milliseconds of all calls for a chunk's actions: "2 x 1.50"."""
    return f"{ms:.2f}" if point.calls == 1 else f"{point.calls:g} x {ms:.2f}"


def _bound(point: Point) -> str:
    return "" if point.bound is None or point.bound >= 1 else f"{point.bound:.3f}"


def tuning_blocks(found: Tuning) -> tuple[Block, ...]:
    """A tuning, from the answer on.

    Args:
        found: What the tuning found.
    """
    hz = found.setting.get("rate_hz")
    rate = f"asked for {hz:g} times a second as a control loop does, " if isinstance(hz, int | float) else ""
    notes = [
        f"Milliseconds: one chunk, batch 1, {rate}all interleaved in one run with the plain policy, which takes "
        f"{found.plain_ms:.1f} ms.",
        "Predicted loss: from how far the actions are from the policy's own as distributions, and how rough they are (docs/tune-and-check.md); a prediction. "
        f"*{_BOUND}*: what a loss stays below with 90 % certainty; empty where nothing is promised; a loss to allow is judged by it where nothing is rolled out. Learnt on {plain(shipped_model().about)}. "
        f"{plain(shipped_model().judged)}",
        _sampler_note(found.chosen),
        *([_REPLANS] if any(point.calls > 1 for point in found.points) else []),
        *(plain(note) + "." for note in found.notes),
    ]
    cells = _cells(found)
    return (Paragraph(evidence(found)), table(list(cells[0]), cells, left=3), Bullets(tuple(notes)))


def evidence(found: Tuning) -> str:
    """What was chosen, for what, and what is known of its loss, as a few sentences."""
    chosen, goal = found.chosen, found.goal
    what = (
        f"**{plain(chosen.method)}** ({plain(chosen.engine)} engine, {chosen.threads} thread{'s' * (chosen.threads > 1)}): "
        f"{_each(chosen, chosen.p50_ms)} ms a chunk, {found.plain_ms / chosen.cost_ms:.0f}x the plain policy."
    )
    if not found.met:
        unit = "ms" if goal.deadline_ms is not None else "of the score"
        miss = goal.miss(chosen)
        return f"Nothing was found {goal.text()}; nearest is {what} It misses by {miss:.3g} {unit}. {_proof(found)}"
    return f"The best {goal.text()} is {what} {_proof(found)}"


def _proof(found: Tuning) -> str:
    if found.chosen.method == BASELINE:
        return "It computes every block at every step, and loses nothing."
    predicted = f"{found.chosen.loss:.3f} is predicted, {found.chosen.promise}"
    if found.fresh is None:
        return f"Not rolled out: a loss of {predicted}; `--task` measures it."
    allowed = -LOSSLESS if found.goal.loss is None else found.goal.loss
    return (
        f"On {found.fresh.n} fresh pairs of rollouts its score differs by {found.fresh.text('{:+.3f}')}: "
        f"a loss of {allowed:g} is {'' if found.fresh.low > -allowed else 'not '}ruled out. Without rollouts a loss of {predicted}."
    )


def _sampler_note(chosen: Point) -> str:
    method = replace(method_named(chosen.method), executed=None)
    if method.sampler is None:
        changed = "" if method.reuse is None else ": only what its blocks reuse is changed"
        return f"The sampler is the policy's own{changed}."
    if method.off_the_shelf:
        return "Plain fewer steps won: no schedule does better here."
    return "This is another sampler than the policy's own."


def tuning_chart(tuning: Tuning, name: str = "tuning", source: str = "", named: bool = False) -> Chart:
    """Loss against the milliseconds that the goal judges, with the goal: the front as a line, the chosen point marked.

    Args:
        tuning: What was found.
        name: Of the chart.
        source: Where it is from, as a sentence, if that should be said.
        named: Whether every point has its method's name beside it: a printed picture cannot be pointed at.
    """
    goal, chosen = tuning.goal, tuning.chosen
    judged = "p50" if goal.deadline_ms is None else "p95"

    def ms(point: Point) -> float:
        return point.calls * goal.judged_ms(point)

    points = sorted(tuning.points, key=ms)
    top = max(4 * (goal.loss or -LOSSLESS), 1.2 * chosen.expected_loss)

    def series(title: str, found: Sequence[Point], **style: Any) -> list[Series]:
        if not found:
            return []
        x, y = tuple(map(ms, found)), tuple(min(top, p.expected_loss) for p in found)
        notes = tuple(
            f"{method_named(p.method).label}, {p.engine}, threads: {p.threads}, loss {p.expected_loss:.3f}"
            for p in found
        )
        low = tuple(-p.rollouts.high if p.rollouts else loss for p, loss in zip(found, y, strict=True))
        high = tuple(min(top, -p.rollouts.low) if p.rollouts else loss for p, loss in zip(found, y, strict=True))
        words = tuple(p.method for p in found) if named and style.get("marker") == "circle" else ()
        ends = {"low": low, "high": high} if style.get("points", True) else {}
        return [Series(title, x, y, notes=notes, **{"labels": words, **ends, **style})]

    rolled = [p for p in points if p.rollouts is not None]
    predicted = [p for p in points if p.rollouts is None]
    layers = [
        *series("front", tuning.front, colour="blue", line=True, points=False),
        *series("loss as rolled out", rolled, colour="blue", marker="circle"),
        *series("loss as predicted", predicted, colour="blue", marker="circle", hollow=True),
        *series("chosen", [chosen], colour="orange", marker="star", large=True, labels=("chosen",)),
    ]
    if goal.deadline_ms is not None:
        rule = Rule("x", goal.deadline_ms, f"deadline, {goal.deadline_ms:g} ms")
    else:
        rule = Rule("y", goal.loss or 0.0, f"a loss of {goal.loss:g}")
    figures = _cells(tuning, lambda name: method_named(name).label)
    columns = ["method", "place", "engine, threads", "p50 ms", "p95 ms", "predicted loss", _BOUND, _ROLLOUTS]
    return Chart(
        name,
        f"What tuning looked at, {plain(goal.text())}",
        f"{len(points)} points; chosen is {method_named(chosen.method).label} with {_each(chosen, goal.judged_ms(chosen))} ms ({judged}) and a loss of {chosen.expected_loss:.3f}.",
        (Panel(Axis(f"ms per chunk ({judged})", log=True), Axis("loss of score"), tuple(layers), "", (rule,)),),
        table([*columns, "beyond spread", "spread"], figures),
        f"Left is faster, lower is better; what loses more than {top:.2g} stands at the upper edge. {_JUDGED[judged]} The plain policy takes {tuning.plain_ms:.0f} ms. {source}".rstrip(),
    )  # fmt: skip


_JUDGED = {
    "p50": "Milliseconds are medians.",
    "p95": "Milliseconds are those that 95 of 100 chunks keep, which is what a deadline is judged by; of a method that replans all calls for one chunk's actions are shown.",
}

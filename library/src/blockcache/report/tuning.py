"""What `blockcache tune` shows: what was chosen and why, the points by time, and their picture. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS
from blockcache.report.chart import Axis, Panel, Rule, Series
from blockcache.report.document import Block, Bullets, Chart, Paragraph, plain, table
from blockcache.report.methods import estimate
from blockcache.results.rollouts import BASELINE
from blockcache.results.tuning import Point, Tuning

MS = Axis("ms per chunk", log=True)
_COLUMNS = ["place", "method", "engine, threads", "p50 ms", "p95 ms", "over plain", "GFLOP", "predicted loss", "centre shift",
            "beyond spread", "spread", "rollouts: difference, 95 %"]  # fmt: skip


def tuning_blocks(found: Tuning) -> tuple[Block, ...]:
    """A tuning, from the answer on."""
    chosen, on_front = found.chosen, set(found.front)
    rows = [
        [
            "chosen" if point == chosen else "front" if point in on_front else "",
            plain(point.method),
            f"{point.engine}, {point.threads}",
            f"{point.p50_ms:.2f}",
            f"{point.p95_ms:.2f}",
            f"{found.plain_ms / point.p50_ms:.0f}x",
            f"{point.flops / 1e9:.3f}",
            f"{point.loss:.3f}",
            f"{point.distances.centre_shift.mean:.3f}",
            f"{point.distances.beyond_spread.mean:.3f}",
            f"{point.distances.spread.mean:.2f}",
            "" if point.rollouts is None else point.rollouts.text("{:+.3f}"),
        ]
        for point in found.points
    ]
    hz = found.setting.get("rate_hz")
    rate = f"asked for {hz:g} times a second as a control loop does, " if isinstance(hz, int | float) else ""
    notes = [
        f"Milliseconds: one chunk, batch 1, {rate}all interleaved in one run with the plain policy, which takes "
        f"{found.plain_ms:.1f} ms.",
        "Predicted loss: from how far the actions are from the policy's own as distributions (docs/tune-and-check.md); a prediction.",
        _sampler_note(chosen),
        *(plain(note) + "." for note in found.notes),
    ]
    return (Paragraph(_answer(found)), table(_COLUMNS, rows, left=3), Bullets(tuple(notes)))


def _answer(found: Tuning) -> str:
    chosen, goal = found.chosen, found.goal
    what = (
        f"**{plain(chosen.method)}** ({plain(chosen.engine)} engine, {chosen.threads} thread{'s' * (chosen.threads > 1)}): "
        f"{chosen.p50_ms:.2f} ms a chunk, {found.plain_ms / chosen.p50_ms:.0f}x the plain policy."
    )
    if not found.met:
        unit = "ms" if goal.deadline_ms is not None else "of the score"
        miss = goal.miss(chosen)
        return f"Nothing was found {goal.text()}; nearest is {what} It misses by {miss:.3g} {unit}. {_proof(found)}"
    return f"The best {goal.text()} is {what} {_proof(found)}"


def _proof(found: Tuning) -> str:
    if found.chosen.method == BASELINE:
        return "It computes every block at every step, and loses nothing."
    if found.fresh is None:
        return "Not rolled out: the loss is a prediction; `--task` measures it."
    allowed = -LOSSLESS if found.goal.loss is None else found.goal.loss
    return (
        f"On {found.fresh.n} fresh pairs of rollouts its score differs by {found.fresh.text('{:+.3f}')}: "
        f"a loss of {allowed:g} is {'' if found.fresh.low > -allowed else 'not '}ruled out."
    )


def _sampler_note(chosen: Point) -> str:
    method = method_named(chosen.method)
    if method.sampler is None:
        return "The sampler is the policy's own: only what its blocks reuse is changed."
    if method.off_the_shelf:
        return "Plain fewer steps won: no schedule does better here."
    return "This is another sampler than the policy's own."


def tuning_chart(tuning: Tuning, name: str = "tuning", source: str = "", named: bool = False) -> Chart:
    """Loss against milliseconds: the front as a line, the chosen point marked.

    Args:
        tuning: What was found.
        name: Of the chart.
        source: Where it is from, as a sentence, if that should be said.
        named: Whether every point has its method's name beside it: a printed picture cannot be pointed at.
    """
    allowed = -LOSSLESS if tuning.goal.loss is None else tuning.goal.loss
    top = max(4 * allowed, 1.2 * tuning.chosen.expected_loss)

    def series(title: str, found: Sequence[Point], **style: Any) -> list[Series]:
        if not found:
            return []
        x, y = tuple(p.p50_ms for p in found), tuple(min(top, p.expected_loss) for p in found)
        notes = tuple(
            f"{method_named(p.method).label}, {p.engine}, threads: {p.threads}, loss {p.expected_loss:.3f}"
            for p in found
        )
        low = tuple(-p.rollouts.high if p.rollouts else loss for p, loss in zip(found, y, strict=True))
        high = tuple(min(top, -p.rollouts.low) if p.rollouts else loss for p, loss in zip(found, y, strict=True))
        words = tuple(p.method for p in found) if named and style.get("marker") == "circle" else ()
        ends = {"low": low, "high": high} if style.get("points", True) else {}
        return [Series(title, x, y, notes=notes, **{"labels": words, **ends, **style})]

    points, chosen = sorted(tuning.points, key=lambda p: p.p50_ms), tuning.chosen
    rolled = [p for p in points if p.rollouts is not None]
    layers = [
        *series("front", tuning.front, colour="blue", line=True, points=False),
        *series("loss as rolled out", rolled, colour="blue", marker="circle"),
        *series(
            "loss as predicted", [p for p in points if p.rollouts is None], colour="blue", marker="circle", hollow=True
        ),
        *series("chosen", [chosen], colour="orange", marker="star", large=True, labels=("chosen",)),
    ]
    rules = [Rule("y", allowed, f"a loss of {allowed:g}")]
    if tuning.goal.deadline_ms is not None:
        rules.append(Rule("x", tuning.goal.deadline_ms, "deadline"))
    rows = [
        [
            plain(method_named(p.method).label),
            "chosen" if p == chosen else "front" if p in tuning.front else "",
            f"{p.engine}, {p.threads}",
            f"{p.p50_ms:.2f}",
            f"{p.p95_ms:.2f}",
            f"{p.loss:.3f}",
            estimate(p.rollouts, "{:+.3f}"),
            f"{p.distances.beyond_spread.mean:.3f}",
            f"{p.distances.spread.mean:.2f}",
        ]
        for p in points
    ]
    columns = [
        "method",
        "place",
        "engine, threads",
        "p50 ms",
        "p95 ms",
        "predicted loss",
        "rollouts: difference, 95 %",
        "beyond spread",
        "spread",
    ]
    return Chart(
        name,
        f"What tuning looked at, {plain(tuning.goal.text())}",
        f"{len(points)} points; chosen is {method_named(chosen.method).label} with {chosen.p50_ms:.2f} ms and a loss of {chosen.expected_loss:.3f}.",
        (Panel(MS, Axis("loss of score"), tuple(layers), "", tuple(rules)),),
        table(columns, rows),
        f"Left is faster, lower is better; what loses more than {top:.2g} stands at the upper edge. The plain policy takes {tuning.plain_ms:.0f} ms. {source}".rstrip(),
    )  # fmt: skip

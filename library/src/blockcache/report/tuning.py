"""What `blockcache tune` shows: what was chosen and why, the points by time, and their picture. Knows nothing of torch."""

from __future__ import annotations

from typing import Any

from blockcache.compare.methods import method_named
from blockcache.files import PathLike
from blockcache.measure.statistics import LOSSLESS
from blockcache.report.document import Block, Bullets, Paragraph, plain, table
from blockcache.report.figures import new_figure, save_figure
from blockcache.results.rollouts import BASELINE
from blockcache.results.tuning import Point, Tuning

_FRONT, _BEATEN, _CHOSEN = "#0072B2", "#777777", "#D55E00"  # Okabe and Ito's, for every eye
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
    notes = [
        "Milliseconds: one chunk, batch 1, all interleaved in one run with the plain policy, "
        f"which takes {found.plain_ms:.1f} ms.",
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


def draw_front(found: Tuning, path: PathLike) -> None:
    """Loss against milliseconds, the front as a line, the chosen point marked. What loses hopelessly stands at the upper edge."""
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    allowed = -LOSSLESS if found.goal.loss is None else found.goal.loss
    top = 4 * allowed
    axes.plot(
        [point.p50_ms for point in found.front],
        [min(top, point.expected_loss) for point in found.front],
        color=_FRONT, lw=1.0, zorder=1, label="front",
    )  # fmt: skip
    for point in found.points:
        _draw_point(axes, point, top, _FRONT if point in found.front else _BEATEN)
    chosen = found.chosen
    axes.plot(chosen.p50_ms, min(top, chosen.expected_loss), "*", color=_CHOSEN, ms=17, zorder=4, label="chosen")
    axes.axhline(0.0, color="black", lw=0.6)
    axes.axhline(allowed, color="black", lw=0.8, ls=":", label=f"a loss of {allowed:g}")
    if found.goal.deadline_ms is not None:
        axes.axvline(found.goal.deadline_ms, color=_CHOSEN, ls=":", label="deadline")
    for kind, marker, fill in (
        ("rolled out, 95 %", "o", _FRONT),
        ("predicted", "o", "white"),
        (f"more than {top:g}", "^", "white"),
    ):
        axes.plot([], [], marker, color=_FRONT, mfc=fill, label=kind)
    times = [point.p50_ms for point in found.points]
    axes.set_xlim(0.85 * min(times), 1.6 * max(times))  # room for the names
    axes.set_ylim(top=1.25 * top)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_xlabel("milliseconds a chunk (p50)")
    axes.set_ylabel("loss of score")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _draw_point(axes: Any, point: Point, top: float, colour: str) -> None:
    loss, rolled = min(top, point.expected_loss), point.rollouts
    if rolled is not None:
        axes.plot([point.p50_ms] * 2, [-rolled.high, -rolled.low], color=colour, lw=0.8, zorder=2)
    marker = "^" if point.expected_loss > top else "o"
    axes.plot(point.p50_ms, loss, marker, color=colour, mfc="white" if rolled is None else colour, ms=6, zorder=3)
    axes.annotate(
        point.method,
        (point.p50_ms, loss),
        xytext=(5, 5),
        textcoords="offset points",
        fontsize=7,
        rotation=35,
        color=colour,
    )

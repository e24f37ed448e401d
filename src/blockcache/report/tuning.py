"""What `blockcache tune` shows: what was chosen and why, the points by time, and their picture. Knows nothing of torch."""

from __future__ import annotations

from blockcache.compare.tuning import Point, Tuning
from blockcache.files import PathLike
from blockcache.report.document import Block, Bullets, Paragraph, plain, table
from blockcache.report.figures import new_figure, save_figure

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
        "Predicted loss: from how far the actions are from the policy's own as distributions (docs/check.md); a prediction.",
        *(_sampler_note(chosen)),
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
        return f"Nothing was found {goal.text()}; nearest is {what} It misses by {miss:.3g} {unit}."
    proof = "Not rolled out: the loss is a prediction; `--task` measures it."
    if found.fresh is not None:
        proof = (
            f"On {found.fresh.n} fresh pairs of rollouts its score differs by {found.fresh.text('{:+.3f}')}: "
            f"{'lossless' if found.fresh.lossless else 'a loss of 0.03 is not ruled out'}."
        )
    return f"The best {goal.text()} is {what} {proof}"


def _sampler_note(chosen: Point) -> list[str]:
    method = chosen.method
    if method.startswith(("full", "action", "bac")):
        return ["The sampler is the policy's own: only what its blocks reuse is changed."]
    plainly = "+" not in method and "fitted" not in method and "placed" not in method
    words = (
        "Plain fewer steps won: no schedule does better here."
        if plainly
        else "This is another sampler than the policy's own."
    )
    return [words]


def draw_front(found: Tuning, path: PathLike) -> None:
    """Loss against milliseconds, the front as a line, the chosen point marked."""
    figure = new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    axes.plot(
        [p.p50_ms for p in found.front], [p.expected_loss for p in found.front], color="#0072B2", lw=1.5, label="front"
    )
    for point in found.points:
        axes.plot(point.p50_ms, point.expected_loss, "o", color="#0072B2" if point in found.front else "#999999", ms=5)
        axes.annotate(
            point.method, (point.p50_ms, point.expected_loss), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    axes.plot(found.chosen.p50_ms, found.chosen.expected_loss, "*", color="#D55E00", ms=16, label="chosen")
    if found.goal.deadline_ms is not None:
        axes.axvline(found.goal.deadline_ms, color="#D55E00", ls=":", label="deadline")
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a chunk (p50)")
    axes.set_ylabel("loss of score, predicted or rolled out")
    axes.legend(frameon=False)
    save_figure(figure, path)

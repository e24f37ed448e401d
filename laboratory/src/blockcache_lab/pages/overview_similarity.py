"""How alike a block's outputs are at different steps, as matrices and as curves; and what the action feels of a reuse.

From an analysis, or the matrices of a recording. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.palette import Colour
from blockcache.report.chart import Axis, HeatMap, Panel, Series
from blockcache.report.document import Chart, plain, table
from blockcache.solvers.recording import Recording
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.sections import LAGS, ActionCosts, Similarity

MOST_MATRICES, FINEST = 24, 50
"""Matrices that are drawn, evenly chosen where there are more blocks, and steps in each; the table has all blocks."""
LINES: tuple[Colour, ...] = ("blue", "orange", "green", "pink", "amber", "sky", "ink", "grey")


def similarity_charts(analysis: Analysis | None, recording: Recording | None) -> Iterator[Chart]:
    """Of the analysis where it has similarities, else of the recording."""
    section = None if analysis is None else analysis.get(Similarity)
    if analysis is not None and section is not None:
        yield from _matrices(analysis.block_names, np.asarray(section.cosine, np.float64))
    elif recording is not None and "cosine" in recording.matrices:
        yield from _matrices([block.name for block in recording.blocks], recording.matrices["cosine"])


def _matrices(names: Sequence[str], cosine: NDArray[np.float64]) -> Iterator[Chart]:
    """Matrices of some blocks and curves of fewer; `cosine` is (blocks, K, K)."""
    steps = cosine.shape[-1]
    lags = [lag for lag in LAGS if lag < steps]
    curves = {lag: np.stack([np.diagonal(matrix, lag) for matrix in cosine]) for lag in lags}  # (blocks, K - lag)
    rows = [
        [plain(name), *(f"{curves[lag][place].mean():.4f}" for lag in lags), f"{cosine[place].min():.4f}"]
        for place, name in enumerate(names)
    ]
    behind = table(["block", *(f"mean at lag {lag}" for lag in lags), "lowest"], rows)
    chosen = evenly(len(names), MOST_MATRICES)
    panels, every = step_matrices({names[place]: cosine[place] for place in chosen}, low_end(cosine))
    shown = "" if len(chosen) == len(names) else f" {len(chosen)} of {len(names)} blocks, evenly chosen."
    coarse = "" if every == 1 else f" One cell is {every} steps wide."
    means = cosine.mean(axis=(1, 2))
    alt = (
        f"Similarity between steps for {len(chosen)} blocks; on average highest in {names[int(means.argmax())]} ({means.max():.3f}) and lowest "
        f"in {names[int(means.argmin())]} ({means.min():.3f})."
    )
    yield Chart(
        "similarity",
        "Similarity matrices",
        alt,
        panels,
        behind,
        f"Cosine between a block's outputs at two steps; yellow is alike.{shown}{coarse}",
        columns=8 if len(chosen) > 6 else 3,
    )
    if curves:  # a single step has no other to be compared with
        yield _curves(names, curves, steps)


def _curves(names: Sequence[str], curves: dict[int, NDArray[np.float64]], steps: int) -> Chart:
    """One panel for each of a few blocks, one line for each lag."""
    chosen = evenly(len(names), 6)
    panels = []
    for place in chosen:
        found = enumerate(curves.items())
        lines = [curve(f"lag {lag}", range(lag, steps), values[place], LINES[order]) for order, (lag, values) in found]
        panels.append(Panel(Axis("step"), Axis("cosine"), tuple(lines), names[place]))
    rows = [
        [plain(names[place]), str(lag), f"{found[place].mean():.4f}", f"{found[place].min():.4f}", str(int(found[place].argmin()) + lag)]
        for place in range(len(names))
        for lag, found in curves.items()
    ]  # fmt: skip
    last = max(curves)
    return Chart(
        "similarity-change",
        "Similarity at a lag",
        f"Curves of {len(chosen)} blocks for lags {', '.join(map(str, curves))}; at lag {last} the lowest of all blocks is {curves[last].min():.3f}.",
        tuple(panels),
        table(["block", "lag", "mean", "lowest", "at step"], rows),
        "Cosine between a block's output at a step and so many steps before. Where a curve dips, outputs change and an update is worth most.",
        columns=3,
    )


def action_charts(analysis: Analysis) -> Iterator[Chart]:
    """Where the executed action feels it if a block is reused, beside how alike the outputs are."""
    section = analysis.get(ActionCosts)
    if section is None or not section.lags:
        return
    lags, costs, cosine = section.lags, section.costs, section.cosine
    names, last = analysis.block_names, len(lags) - 1
    cost, unlike = np.asarray(costs[last], np.float64), 1 - np.asarray(cosine[last], np.float64)
    axes = Axis("step"), Axis("block", names=names)
    high, apart = float(np.quantile(cost, 0.99)) or 1.0, float(np.quantile(unlike, 0.99)) or 1.0
    r = float(np.corrcoef(cost.ravel(), unlike.ravel())[0, 1]) if np.ptp(cost) and np.ptp(unlike) else 0.0
    rows = [
        [plain(name), *(f"{costs[i][place].mean():.4f}" for i in range(len(lags))), *(f"{cosine[i][place].mean():.4f}" for i in range(len(lags)))]
        for place, name in enumerate(names)
    ]  # fmt: skip
    top = np.unravel_index(int(cost.argmax()), cost.shape)
    yield Chart(
        "action-costs",
        "What the action feels, beside what the outputs show",
        f"Over {lags[last]} steps the action feels most in {names[int(top[0])]} at step {int(top[1])} ({cost.max():.3f}); the two pictures correlate by {r:.2f}.",
        (
            Panel(*axes, (HeatMap(cost, "action error", 0.0, high),), f"Action error if reused for {lags[last]} steps"),
            Panel(*axes, (HeatMap(unlike, "1 - cosine", 0.0, apart),), f"1 - cosine over {lags[last]} steps"),
        ),
        table(["block", *(f"action error, lag {lag}" for lag in lags), *(f"cosine, lag {lag}" for lag in lags)], rows),
        "Root mean square error of the executed action, to first order, if a block is computed at a step and then reused. The paper's schedules look "
        f"at the right picture, `--method action` at the left one. Over all cells they correlate by {r:.2f}.",
        columns=2,
    )  # fmt: skip


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def curve(name: str, x: Iterable[float], y: Iterable[float], colour: Colour, **more: Any) -> Series:
    """A line without points."""
    return Series(name, tuple(x), tuple(map(float, y)), colour, line=True, points=False, **more)


def step_matrices(matrices: Mapping[str, NDArray[np.float64]], low: float) -> tuple[tuple[Panel, ...], int]:
    """Square panels of similarities between steps, by title; and how many steps one cell is wide."""
    every = -(-next(iter(matrices.values())).shape[-1] // FINEST)
    maps = {
        title: HeatMap(found[::every, ::every], "cosine", low, 1.0, every=every) for title, found in matrices.items()
    }
    return tuple(Panel(Axis("step"), Axis("step"), (heat,), title, square=True) for title, heat in maps.items()), every


def low_end(values: NDArray[np.float64], share: float = 0.02) -> float:
    """Where a scale of cosines begins: below all but a small share of them, rounded down."""
    return float(np.floor(10 * np.quantile(values, share)) / 10)

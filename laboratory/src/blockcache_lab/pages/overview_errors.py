"""Where errors come from: surges at updates, within one FFN, from one FFN to the next, and the size of weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from blockcache.block import FEED_FORWARD
from blockcache.report.chart import Axis, Bars, HeatMap, Marks, Panel, Series
from blockcache.report.document import Chart, plain, table
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.recorded import error_surge
from blockcache_lab.analysis.sections import Caching, Correlation, FeatureMaps, Response, SubLayers, WeightNorms
from blockcache_lab.pages.overview_similarity import LINES, curve, evenly

_SHAPES: tuple[Any, ...] = ("circle", "square", "diamond", "up")


def _schedule(name: str) -> str:
    """The name of a schedule in words."""
    return {"bac": "with the union (BAC)", "blockwise": "block-wise, no union"}.get(name, name)


def error_charts(analysis: Analysis) -> Iterator[Chart]:
    """A chart for each of these sections that the analysis has."""
    if (caching := analysis.get(Caching)) is not None:
        yield from _surge(caching, analysis)
    if (sublayers := analysis.get(SubLayers)) is not None and sublayers.at:
        yield _sublayers(sublayers)
    if (correlation := analysis.get(Correlation)) is not None and correlation.r is not None:
        yield _correlation(correlation)
    if (response := analysis.get(Response)) is not None:
        yield _response(response)
    if (weights := analysis.get(WeightNorms)) is not None and weights.norms.size:
        yield _weights(weights)
    if (features := analysis.get(FeatureMaps)) is not None and features.truth.size:
        yield _features(features)


def _surge(section: Caching, analysis: Analysis) -> Iterator[Chart]:
    """Each FFN's caching error under the schedules, and how far it jumps where the FFN is computed anew."""
    if not any(block.kind == FEED_FORWARD for block in analysis.blocks):
        return
    found = error_surge(section, analysis.blocks)
    shown = [name for name in ("blockwise", "unified", "bac") if name in found.schedules] or list(found.schedules)[:3]
    steps = tuple(range(analysis.steps))
    panels = []
    for place in evenly(len(found.ffns), 8):
        layers = []
        for order, name in enumerate(shown):
            row = found.schedules.index(name)
            errors, updates, words = found.errors[row, place], found.updates[row, place], _schedule(name)
            notes = tuple("update" if updated else "reused" for updated in updates)
            layers.append(curve(words, steps, errors, LINES[order], notes=notes))
            marked, at = _floats(np.flatnonzero(updates)), _floats(errors[updates])
            layers.append(Series(f"its updates, {words}", marked, at, LINES[order], _SHAPES[order]))
        panels.append(Panel(Axis("step"), Axis("caching error"), tuple(layers), found.ffns[place]))
    rows = [
        [
            plain(ffn),
            plain(_schedule(name)),
            *(f"{values[row, place]:.4f}" for values in (found.errors.mean(axis=2), found.at_updates, found.jumps)),
            str(int(found.surges[row, place])),
        ]
        for place, ffn in enumerate(found.ffns)
        for row, name in enumerate(found.schedules)
    ]
    columns = ["FFN", "schedule", "mean error", "at its updates", "largest jump at an update"]
    columns += ["updates at which it rose"]
    said = ", ".join(f"{_schedule(name)} {found.updated(name).mean():.3f}" for name in shown)
    jumps = ", ".join(f"{_schedule(name)} {found.of(name)[0].mean():.3f}" for name in shown)
    yield Chart(
        "surge",
        "Error surges at updates",
        f"Caching error of {len(panels)} FFNs over the steps. Mean error at their own updates: {said}. Largest jump at an update, mean over FFNs: {jumps}.",
        tuple(panels),
        table(columns, rows, left=2),
        "An update should lower the error. Where it is high at an update, or jumps up, the FFN was computed from inputs that others had reused. "
        f"Mean error at the FFNs' own updates: {said}; largest jump at an update, mean over FFNs: {jumps}.",
        columns=3,
    )


def _sublayers(section: SubLayers) -> Chart:
    stages = tuple(section.stages)
    panels = []
    for step, row in zip(section.at, section.errors, strict=True):
        notes = tuple(f"behind the {stage} at step {step}" for stage in stages)
        bars = Bars("relative error", _floats(row), tuple("blue" for _ in stages), notes, "{:.3f}")
        panels.append(Panel(Axis("relative error"), Axis("", names=stages), (bars,), f"step {step}"))
    rows = [[stage, *(f"{value:.4f}" for value in section.errors[:, place])] for place, stage in enumerate(stages)]
    return Chart(
        "sublayers",
        f"Inside {plain(section.block)} at its updates",
        f"Relative error behind each stage of {section.block} at {len(section.at)} of its update steps.",
        tuple(panels),
        table(["stage", *(f"step {step}" for step in section.at)], rows),
        f"Relative error behind each stage, from the input to what the block adds, under the schedule {plain(_schedule(section.schedule))}.",
        columns=2,
    )  # fmt: skip


def _correlation(section: Correlation) -> Chart:
    x, y = Axis(f"error of {section.upstream}"), Axis(f"error of {section.downstream}")
    steps = tuple(f"step {place}" for place in range(1, len(section.upstream_errors) + 1))
    betas = tuple(f"beta {value:.2f}" for value in section.betas)
    by_step = _floats(section.upstream_errors), _floats(section.downstream_errors)
    by_beta = _floats(section.beta_upstream), _floats(section.beta_downstream)
    first = Series("one step", *by_step, "blue", notes=steps)
    second = Series("one beta", *by_beta, "orange", "diamond", line=True, notes=betas)
    points = [point for line in (first, second) for point in zip(line.notes, line.x, line.y, strict=True)]
    rows = [[note, f"{one:.4f}", f"{two:.4f}"] for note, one, two in points]
    r, beta_r = ("none" if value is None else f"{value:.4f}" for value in (section.r, section.beta_r))
    return Chart(
        "correlation",
        "An error upstream, and what arrives downstream",
        f"Errors of {section.upstream} and {section.downstream}: Pearson's r is {r} over the steps, {beta_r} over the betas.",
        (Panel(x, y, (first,), f"r = {r} over the steps"), Panel(x, y, (second,), f"Step {section.step} alone: r = {beta_r}")),
        table(["point", plain(section.upstream), plain(section.downstream)], rows),
        f"Left: {plain(section.upstream)} reuses its first output at all steps, everything else is computed. Right: at one step its error is scaled by beta. The paper has r = 0.9894.",
        columns=2,
    )  # fmt: skip


def _response(section: Response) -> Chart:
    tiny = float(np.finfo(np.float32).tiny)
    scales, true, left = (
        tuple(max(tiny, float(value)) for value in found)
        for found in (section.scales, section.differences, section.remainders)
    )
    lines = (
        Series("true difference", scales, true, "blue", line=True),
        Series("left by the operator", scales, left, "orange", "diamond", line=True),
    )
    rows = [[f"{value:.3g}" for value in row] for row in zip(scales, true, left, strict=True)]
    return Chart(
        "response",
        "The linear response of an FFN",
        f"For {section.block} at step {section.step}: the remainder falls with the power {section.order:.2f} of the input error.",
        (Panel(Axis("input error |delta| / |X|", log=True), Axis("share of |FFN(X)|", log=True), lines),),
        table(["|delta| / |X|", "true difference", "left by the operator"], rows, left=0),
        f"The proposition's operator predicts the difference to first order: what it leaves falls with the power {section.order:.2f} of the input error (2 is expected), the difference itself with {section.difference_order:.2f}.",
    )  # fmt: skip


def _weights(section: WeightNorms) -> Chart:
    layers, places = section.layers, _floats(range(len(section.layers)))

    def panel(title: str, norms: Any) -> Panel:
        made = tuple(
            Series(name, places, _floats(row), LINES[order % len(LINES)], _SHAPES[order % len(_SHAPES)], line=True)
            for order, (name, row) in enumerate(zip(section.matrices, norms, strict=True))
        )
        return Panel(Axis("layer", names=layers if len(layers) <= 12 else ()), Axis("Frobenius norm"), made, title)

    each = section.per_element
    rows = [
        [plain(layer), *(f"{norm:.3f}" for norm in total), *(f"{norm:.5f}" for norm in single)]
        for layer, total, single in zip(layers, section.norms.T, each.T, strict=True)
    ]
    columns = ["layer", *map(plain, section.matrices), *(f"{plain(name)}, per element" for name in section.matrices)]
    return Chart(
        "weights",
        "How large the weights are",
        f"Norms of {', '.join(section.matrices)} in {len(layers)} layers, in total and per element.",
        (panel("In total", section.norms), panel("Per element (root mean square)", each)),
        table(columns, rows),
        "Frobenius norms by layer. W1 and W2 have more elements than W_V, which alone makes them larger; per element that is taken off.",
        columns=2,
    )


def _features(section: FeatureMaps) -> Chart:
    panels = []
    steps, channels = section.truth.shape[1:]
    every = max(1, -(-channels // 64))
    for place, name in enumerate(section.maps[:2]):
        truth, cached = (np.asarray(found[place].T[::every], np.float64) for found in (section.truth, section.cached))
        low, high = (float(np.quantile(truth, at)) for at in (0.01, 0.99))
        high = high if high > low else low + 1.0
        apart = np.abs(cached - truth)
        cells = tuple((0, int(step)) for step in np.flatnonzero(section.updates[place]))
        marks = Marks("update", cells, "orange", "down")
        for title, values, ends in (
            ("in full", truth, (low, high)),
            ("cached", cached, (low, high)),
            ("absolute difference", apart, (0.0, float(np.quantile(apart, 0.99)) or 1.0)),
        ):
            held = (marks,) if title != "in full" else ()
            what = f"{name}, difference" if values is apart else name
            heat = HeatMap(values, what, *ends, held, "reused" if held else "")
            panels.append(Panel(Axis("step"), Axis("channel"), (heat,), f"{name}, {title}"))
    found = zip(section.maps, section.updates, section.truth, section.difference, strict=True)
    rows = [
        [
            plain(name),
            str(int(updates.sum())),
            *(f"{size:.4f}" for size in (abs(truth).mean(), apart.mean(), apart.max())),
        ]
        for name, updates, truth, apart in found
    ]
    shown = f" One row is {every} channels." if every > 1 else ""
    return Chart(
        "features",
        "Features of one sample",
        f"What {' and '.join(section.maps[:2])} add over {steps} steps: in full, under the schedule, and the difference.",
        tuple(panels),
        table(["block", "updates", "mean size", "mean difference", "largest difference"], rows),
        f"Mean over tokens of what a block adds, {channels} channels over the steps; marks at the top are updates under the schedule {plain(_schedule(section.schedule))}.{shown}",
        columns=3,
    )  # fmt: skip


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(map(float, values))

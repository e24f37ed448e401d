"""Whether one schedule does for all: how alike episodes are, how many generations a schedule needs, weaker policies. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from blockcache.palette import Colour, Marker
from blockcache.report.chart import Axis, Bars, HeatMap, Panel, Series
from blockcache.report.document import Chart, plain, table
from blockcache_lab.analysis.claims import last_share, last_steps
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.sections import LAGS, Homogeneity, Stability, WeakerPolicy
from blockcache_lab.pages.overview_similarity import curve, low_end, step_matrices

PAPER = {"AvgMean": "0.93", "MinMean": "0.29"}  # of its row for Push-T


def episode_charts(analysis: Analysis) -> Iterator[Chart]:
    """A chart for each of these sections that the analysis has."""
    if (homogeneity := analysis.get(Homogeneity)) is not None:
        yield _homogeneity(homogeneity, analysis.block_names)
        yield _two(homogeneity)
    if (stability := analysis.get(Stability)) is not None and stability.shared.size:
        yield _stability(stability)
    if (weaker := analysis.get(WeakerPolicy)) is not None:
        yield _weaker(weaker)


def _homogeneity(section: Homogeneity, names: tuple[str, ...]) -> Chart:
    of, statistics = _of(section), section.statistics
    maps = {
        "own noise": np.asarray(section.every_step, np.float64),
        "one noise for all": np.asarray(section.one_noise, np.float64),
    }
    low = min(max(-1.0, low_end(found, 0.01)) for found in maps.values())
    rows = [[name, f"{value:.4f}", PAPER.get(name, "")] for name, value in statistics.items()]
    rows += [
        [f"{plain(name)}, {noise}: mean, lowest step", f"{found[place].mean():.4f}, {found[place].min():.4f}", ""]
        for place, name in enumerate(names)
        for noise, found in maps.items()
    ]
    curves = {"own noise": section.divergence, "one noise for all": section.one_noise_divergence}
    steps = tuple(range(len(section.divergence)))
    lines = (
        curve("own noise", steps, section.divergence, "orange"),
        curve("one noise for all", steps, section.one_noise_divergence, "blue", hollow=True),
    )
    tail = last_steps(len(steps)) / len(steps)
    said = ", ".join(f"{last_share(found) or 0.0:.0%} with {noise}" for noise, found in curves.items())
    one = maps["one noise for all"].mean()
    return Chart(
        "homogeneity",
        f"How alike {section.episodes} {of} are",
        f"Mean cosine {statistics['AvgMean']:.3f} with own noise, {one:.3f} with one noise for all. In the last {tail:.0%} of the steps lies of the divergence: {said}.",
        (
            *(
                Panel(Axis("step"), Axis("block", names=names), (HeatMap(found, "mean cosine over pairs", low, 1.0),), f"Cosine, {noise}")
                for noise, found in maps.items()
            ),
            Panel(Axis("step"), Axis("1 - cosine"), lines, "Where they part, mean over blocks"),
        ),
        table(["statistic", "here", "paper, Push-T"], rows),
        f"Cosine between what a block adds in different {of}, mean over all pairs; yellow is alike. With noise of their own AvgMean is {statistics['AvgMean']:.2f} and MinMean "
        f"{statistics['MinMean']:.2f} (paper, Push-T: {PAPER['AvgMean']} and {PAPER['MinMean']}). Of the divergence, the last {tail:.0%} of the steps hold {said}.",
        columns=3,
    )  # fmt: skip


def _of(section: Homogeneity) -> str:
    return "episodes" if section.separate else "observations"


def _two(section: Homogeneity) -> Chart:
    of = _of(section)
    two = np.asarray(section.two, np.float64)
    gap = np.abs(two[0] - two[1])
    panels, _ = step_matrices({"one": two[0], "another": two[1]}, low_end(two))
    rows = [
        [f"lag {lag}", f"{np.diagonal(two[0], lag).mean():.4f}", f"{np.diagonal(two[1], lag).mean():.4f}"]
        for lag in LAGS
        if lag < two.shape[-1]
    ]
    return Chart(
        "two-episodes",
        f"{plain(section.block)} in two {of}",
        f"Two similarity matrices of {section.block}; they differ by {gap.mean():.4f} on average and {gap.max():.4f} at most.",
        panels,
        table(["mean cosine at", "one", "another"], rows),
        f"Similarity between steps in two {of}, each by itself. The two differ by {gap.mean():.3f} on average, {gap.max():.3f} at most.",
        columns=2,
    )


def _stability(section: Stability) -> Chart:
    counts = tuple(map(float, section.counts))

    def series(name: str, found: Any, colour: Colour, marker: Marker) -> Series:
        """The mean, lowest and highest over the draws; `found` is (counts, draws)."""
        ends = {at: tuple(map(float, getattr(found, at)(axis=1))) for at in ("mean", "min", "max")}
        return Series(name, counts, ends["mean"], colour, marker, line=True, low=ends["min"], high=ends["max"])

    shared = series("updates in common", section.shared, "blue", "circle")
    excess = series("more dissimilar than need be", section.excess, "orange", "diamond")
    rows = [
        [
            str(count),
            *(f"{value[place]:.4f}" for found in (shared, excess) for value in (found.y, found.low, found.high)),
        ]
        for place, count in enumerate(section.counts)
    ]
    x = Axis("generations calibrated on")
    return Chart(
        "stability",
        "How many generations a schedule needs",
        f"With {section.counts[0]} generations {shared.y[0]:.0%} of the updates are those of all {section.generations}, and what is reused is {excess.y[0]:.1%} less like what it stands for than it could be.",
        (Panel(x, Axis("share"), (shared,), "Updates in common"), Panel(x, Axis("share"), (excess,), "More dissimilar than need be")),
        table(["generations", "updates in common", "lowest", "highest", "more dissimilar than need be", "lowest", "highest"], rows),
        f"Schedules of few generations beside that of all {section.generations}; bars reach from the lowest to the highest of several draws. Right: by how much what is reused is less "
        "like what would be computed, over all generations, than under the best schedule.",
        columns=2,
    )  # fmt: skip


def _weaker(section: WeakerPolicy) -> Chart:
    names = tuple(section.policies)
    relative = tuple(map(float, section.relative))
    notes = tuple(
        f"action error {error:.4f}, noise floor {floor:.4f}"
        for error, floor in zip(section.errors, section.floors, strict=True)
    )
    rows = [
        [plain(name), f"{section.errors[i]:.4f}", f"{section.floors[i]:.4f}", f"{relative[i]:.3f}"]
        for i, name in enumerate(names)
    ]
    return Chart(
        "weaker",
        "A good policy and a weak one",
        f"Under {section.method} the action error is {relative[0]:.2f} of the noise floor for {names[0]} and {relative[1]:.2f} for {names[1]}.",
        (Panel(Axis("action error / noise floor"), Axis("", names=names), (Bars("share", relative, ("blue", "orange"), notes, "{:.2f}"),)),),
        table(["policy", "action error", "noise floor", "ratio"], rows),
        f"Action error to the own full run under {plain(section.method)}, in units of what two full runs with different noise differ by.",
    )  # fmt: skip

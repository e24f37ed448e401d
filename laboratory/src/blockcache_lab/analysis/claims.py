"""What the paper claims, what was found here, and whether it holds: sentences computed from an analysis.

Where the paper gives no figure, the sentence says what was asked of the data. Knows nothing of torch and of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from blockcache.block import FEED_FORWARD
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.recorded import ErrorSurge, error_surge
from blockcache_lab.analysis.section import AnalysisSection, Array
from blockcache_lab.analysis.sections import (
    Caching,
    Correlation,
    Homogeneity,
    Response,
    Similarity,
    Stability,
    WeakerPolicy,
    WeightNorms,
    pearson,
)

LAG = 10  # as in the paper's figure of similarity curves


Finding: TypeAlias = tuple[str, bool | None, str]
"""The figure found, whether the claim holds, and a sentence."""
_NO_FIGURE = "no figure"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Args:
        name: A short one, for anchors and tests.
        claim: What the paper says.
        paper: Its figure, or that it has none.
        figure: The figure found; empty where nothing was measured.
        holds: None where it cannot be told.
        sentence: What was found, in words.
        section: The section that it is read off.
    """

    name: str
    claim: str
    paper: str
    figure: str
    holds: bool | None
    sentence: str
    section: str


def _curves(section: Similarity) -> tuple[int, Array]:
    """The lag of the paper's figure, or half the steps if there are fewer, and how much each block changes over it."""
    steps = section.cosine.shape[-1]
    lag = max(1, min(LAG, steps // 2))
    return lag, 1 - np.stack([section.curve(block, lag) for block in range(len(section.cosine))])


def _non_uniform(section: Similarity, analysis: Analysis) -> Finding:
    if section.cosine.shape[-1] < 3:
        return _too_few("steps")
    lag, changes = _curves(section)
    high, low = (np.percentile(changes, at, axis=1) for at in (90, 10))
    ratio = float(np.median(high / np.maximum(low, 1e-6)))
    return (
        f"{ratio:.1f}x",
        ratio > 2,
        f"Over {lag} steps the median block changes {ratio:.1f} times as much where it changes most (90th "
        "percentile of the steps) as where it changes least (10th); more than 2 was asked for.",
    )


def _block_specific(section: Similarity, analysis: Analysis) -> Finding:
    lag, changes = _curves(section)
    pairs = [pearson(one, other) for one, other in combinations(changes, 2)]
    known = [value for value in pairs if value is not None]
    if not known:
        return _too_few("blocks or steps")
    level = changes.mean(axis=1)
    apart = float(level.max() / max(float(level.min()), 1e-6))
    middle, low = float(np.median(known)), float(np.min(known))
    return (
        f"r = {middle:.2f}, {apart:.0f}x",
        middle < 0.9 or apart > 3,
        f"The curves of two blocks over {lag} steps correlate by {middle:.2f} (median of all pairs, lowest "
        f"{low:.2f}), and the block that changes most changes {apart:.0f} times as much as the one that changes "
        "least; a correlation below 0.9 or a factor above 3 was asked for.",
    )


def _surge(section: Caching, analysis: Analysis) -> Finding:
    found = _surges(section, analysis, ("blockwise", "unified"))
    if found is None:
        return _too_few("FFNs or schedules")
    alone, together = (found.updated(name) for name in ("blockwise", "unified"))
    jump, calm = (found.of(name)[0] for name in ("blockwise", "unified"))
    more, count = int((alone[1:] > together[1:]).sum()), len(alone) - 1  # the first FFN is excepted
    jumps = int((jump[1:] > calm[1:]).sum())
    return (
        f"{more} of {count} FFNs",
        more > count / 2,
        f"Behind the first FFN, {more} of {count} have a larger error at their own updates under the block-wise "
        f"schedule than under the unified one (on average {alone.mean():.3f} against {together.mean():.3f}), and "
        f"{jumps} a larger jump from one step to an update ({jump.mean():.3f} against {calm.mean():.3f}); the "
        "former of more than half was asked for.",
    )


def _at_updates(section: Caching, analysis: Analysis) -> Finding:
    rows = [place for place, block in enumerate(analysis.blocks) if block.kind == FEED_FORWARD]
    if "blockwise" not in section.schedules or not rows:
        return _too_few("FFNs or schedules")
    errors, updates = section.of("blockwise")
    errors, updates = errors[rows], updates[rows]
    later = updates.copy()
    later[:, 0] = False  # the first step has no error
    if not later.any() or updates.all():
        return _too_few("updates")
    updated, reused = float(errors[later].mean()), float(errors[~updates].mean())
    return (
        f"{updated:.3f} / {reused:.3f}",
        updated > reused,
        f"Under the block-wise schedule the FFNs' mean error is {updated:.3f} at updates (the first left out) and "
        f"{reused:.3f} where their output is reused.",
    )


def _union(section: Caching, analysis: Analysis) -> Finding:
    names = ("bac", "blockwise", "unified")
    found = _surges(section, analysis, names)
    if found is None:
        return _too_few("FFNs or schedules")
    union, alone, together = (float(found.updated(name).mean()) for name in names)
    jumps = [float(found.of(name)[0].mean()) for name in names]
    surge = alone - together  # what there is to be removed
    removed = (alone - union) / surge if surge > 0 else 0.0
    return (
        f"{union:.3f} / {alone:.3f}",
        removed >= 0.5 if surge > 0 else None,
        f"With the union the FFNs' error at their updates is {union:.3f} on average, without it {alone:.3f}, under "
        f"the unified schedule {together:.3f}: {removed:.0%} of the difference is gone (the largest jump to an "
        f"update: {jumps[0]:.3f}, {jumps[1]:.3f} and {jumps[2]:.3f}); half was asked for.",
    )


def _correlation(section: Correlation, analysis: Analysis) -> Finding:
    if section.r is None:
        return _too_few("steps")
    return (
        f"{section.r:.4f}",
        section.r >= 0.9,
        f"With {section.upstream} reused at all steps, its error and that of {section.downstream}, which is "
        f"computed, correlate by {section.r:.4f} over the steps; 0.9 was asked for.",
    )


def _beta(section: Correlation, analysis: Analysis) -> Finding:
    if section.beta_r is None:
        return _too_few("betas")
    gain = float(section.beta_downstream[-1] / max(float(section.beta_upstream[-1]), 1e-12))
    return (
        f"{section.beta_r:.4f}",
        section.beta_r >= 0.9,
        f"At step {section.step} alone, with the upstream error scaled, the two correlate by {section.beta_r:.4f}; "
        f"of the largest upstream error {gain:.2f} arrives downstream.",
    )


def _proposition(section: Response, analysis: Analysis) -> Finding:
    order = section.order
    return (
        f"{order:.2f}",
        1.8 <= order <= 2.2,
        f"In {section.block} at step {section.step}, what the linear operator leaves falls with the power "
        f"{order:.2f} of the input error's size, the difference itself with {section.difference_order:.2f}.",
    )


def _norms(section: WeightNorms, analysis: Analysis) -> Finding:
    known = {name: place for place, name in enumerate(section.matrices)}
    values = [place for name, place in known.items() if name.endswith("W_V")]
    if not {"W1", "W2"} <= set(known) or not values:
        return _too_few("matrices")
    feed = [known["W1"], known["W2"]]
    total, each = (
        float(norms[feed].mean() / max(float(norms[values].mean()), 1e-12))
        for norms in (section.norms, section.per_element)
    )
    size = section.norms[feed].mean()
    apart = [
        f"{float(size / max(float(section.norms[place].mean()), 1e-12)):.1f} times that of {section.matrices[place]}"
        for place in values
    ]
    return (
        f"{total:.1f}x, {each:.1f}x per element",
        2.25 <= total <= 3.75,
        f"W1 and W2 have {total:.1f} times the Frobenius norm of W_V ({', '.join(apart)}); element by element it is "
        f"{each:.1f}, so {total / max(each, 1e-12):.1f} comes of their size alone. From 2.25 to 3.75 was asked for.",
    )


def _homogeneous(section: Homogeneity, analysis: Analysis) -> Finding:
    found, at = section.statistics, list(section.at)
    of, one = "episodes" if section.separate else "observations", section.one_noise[:, at]
    return (
        f"{found['AvgMean']:.2f}, min {found['MinMean']:.2f}; one noise: {one.mean():.2f}, min {one.min():.2f}",
        found["AvgMean"] >= 0.9,
        f"Over {section.episodes} {of} the mean cosine is {found['AvgMean']:.4f} (lowest block and step "
        f"{found['MinMean']:.4f}), its deviation {found['AvgStd']:.4f} (largest {found['MaxStd']:.4f}), percentiles "
        f"{found['AvgP05']:.4f} and {found['AvgP95']:.4f}, each with noise of its own; with one noise for all, "
        f"which the paper does not rule out, the mean is {one.mean():.4f} (lowest {one.min():.4f}). A mean of 0.9 "
        "with own noise was asked for.",
    )


def _divergence(section: Homogeneity, analysis: Analysis) -> Finding:
    shares = [last_share(apart) for apart in (section.divergence, section.one_noise_divergence)]
    if analysis.steps < 3 or None in shares:
        return _too_few("differences between episodes")
    own, one = (share or 0.0 for share in shares)
    tail = last_steps(analysis.steps) / analysis.steps
    return (
        f"{own:.0%}, one noise: {one:.0%}",
        max(own, one) > 0.5,
        f"The last {tail:.0%} of the steps hold {own:.0%} of all divergence between episodes (one minus the cosine) "
        f"that have noise of their own, and {one:.0%} where all have the same; more than half, of either, was asked "
        "for.",
    )


def last_steps(steps: int) -> int:
    """How many steps are the last 5 % of all.

    Args:
        steps: Of one generation.
    """
    return max(1, round(0.05 * steps))


def last_share(apart: Array) -> float | None:
    """The share of the last 5 % of the steps in all divergence between episodes; None where there is none.

    Args:
        apart: (K,) the divergence at each step.
    """
    total = float(apart.sum())
    return float(apart[-last_steps(len(apart)) :].sum()) / total if total > 0 else None


def _once(section: Stability, analysis: Analysis) -> Finding:
    if not section.counts:
        return _too_few("generations")
    (few, little), (most, much) = ((section.counts[place], float(section.excess[place].mean())) for place in (0, -1))
    shared = float(section.shared[-1].mean())
    return (
        f"{much:.1%} worse",
        much <= 0.05,
        f"A schedule of {_counted(most, 'generation')} leaves {much:.1%} more dissimilarity over all "
        f"{section.generations} than the best one does and shares {shared:.0%} of its updates; one of "
        f"{_counted(few, 'generation')} leaves {little:.1%} more. 5 % more at most, of the former, was asked for.",
    )


def _weak(section: WeakerPolicy, analysis: Analysis) -> Finding:
    good, weak = (float(value) for value in section.relative)
    return (
        f"{weak:.2f} / {good:.2f}",
        weak > good,
        f"Under {section.method} the action error is {weak:.2f} of its own noise floor for {section.policies[1]} "
        f"and {good:.2f} for {section.policies[0]}.",
    )


def _surges(section: Caching, analysis: Analysis, needed: tuple[str, ...]) -> ErrorSurge | None:
    enough = sum(block.kind == FEED_FORWARD for block in analysis.blocks) > 1 and set(needed) <= set(section.schedules)
    return error_surge(section, analysis.blocks) if enough else None


def _too_few(what: str) -> Finding:
    return "", None, f"It cannot be told: too few {what}."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


_Row: TypeAlias = tuple[str, str, str, type[AnalysisSection], Callable[[Any, Analysis], Finding]]
_CLAIMS: tuple[_Row, ...] = (
    ("non-uniform", "Similarity between steps is not uniform over time.", _NO_FIGURE, Similarity, _non_uniform),
    ("block-specific", "Each block has its own pattern of similarity.", _NO_FIGURE, Similarity, _block_specific),
    (
        "surge",
        "Block-wise schedules make errors surge in nearly all FFNs but the first.",
        "nearly all",
        Caching,
        _surge,
    ),
    ("update-induced", "At updates of FFNs the error exceeds that of reuse.", _NO_FIGURE, Caching, _at_updates),
    ("union", "The bubbling union removes the surge.", _NO_FIGURE, Caching, _union),
    ("correlation", "Upstream and downstream FFN errors correlate.", "r = 0.9894", Correlation, _correlation),
    ("beta", "So they do at one step with the upstream error scaled.", "strong", Correlation, _beta),
    ("proposition", "The FFN's response is linear up to the square of the error.", "2", Response, _proposition),
    ("norms", "W1 and W2 are about three times as large as W_V.", "3x", WeightNorms, _norms),
    ("homogeneity", "Episodes of one task are alike.", "0.93, min 0.29 (Push-T)", Homogeneity, _homogeneous),
    ("divergence", "They differ in the last 5 % of the steps.", "almost all", Homogeneity, _divergence),
    ("once", "So a schedule is made once for a task.", _NO_FIGURE, Stability, _once),
    ("weak", "A weak policy is hurt more than a good one.", _NO_FIGURE, WeakerPolicy, _weak),
)
"""In the paper's order: a claim's name, its words, the paper's figure, and what a section of one kind has to say of it."""


def claims(analysis: Analysis) -> tuple[Claim, ...]:
    """Every claim of the paper, in its order; one whose section is missing says which command fills it.

    Args:
        analysis: Of one policy; sections may be missing.
    """
    return tuple(_judged(analysis, row) for row in _CLAIMS)


def _judged(analysis: Analysis, row: _Row) -> Claim:
    name, words, paper, kind, look = row
    section = analysis.get(kind)
    if section is not None:
        return Claim(name, words, paper, *look(section, analysis), kind.name)
    weaker = " --weaker POLICY" if kind is WeakerPolicy else ""
    command = f"blockcache analyse {analysis.source or 'POLICY'} --only {kind.name}{weaker}"
    why = analysis.absent.get(kind.name, f"Not measured; `{command}` does it.")
    return Claim(name, words, paper, "", None, why, kind.name)

"""The sections of an analysis: what each of the paper's figures needs, and what can be read off it at once.

Steps count in execution order, blocks are those of the policy in execution order. Written down in docs/file-formats.md.
Knows nothing of torch, of how a section is found and of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import numpy as np

from blockcache.files import Count, Name
from blockcache_lab.analysis.section import (
    REGISTERED,
    AnalysisError,
    AnalysisSection,
    Array,
    Axes,
    Counts,
    Marks,
    one_of,
)

LAGS = (1, 5, 10, 15, 20)
STAGES = ("input", "norm", "W1", "activation", "W2")


@dataclass(frozen=True, eq=False)
class Similarity(AnalysisSection, name="similarity"):
    """`cosine[b, s, t]`: of block b's residuals at steps s and t, a mean over generations. `lags` of the curves."""

    lags: tuple[Count, ...]
    cosine: Annotated[Array, Axes("blocks", "steps", "steps")]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        _check_below("lag", self.lags, sizes["steps"], least=1)

    def curve(self, block: int, lag: int) -> Array:
        """(K - lag,): the similarity of steps t - lag and t, for t from `lag` on."""
        curve: Array = np.diagonal(self.cosine[block], offset=lag).copy()
        return curve


@dataclass(frozen=True, eq=False)
class Caching(AnalysisSection, name="caching"):
    """`errors[m, b, t]`: caching error `|b^ - b| / |b|` under schedule m; `updates` marks where b is computed."""

    schedules: tuple[Name, ...]
    errors: Annotated[Array, Axes("schedules", "blocks", "steps")]
    updates: Annotated[Marks, Axes("schedules", "blocks", "steps")]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        if not self.updates.size or not self.updates[:, :, 0].all():
            raise AnalysisError("under every schedule every block is computed at step 0")

    def of(self, schedule: str) -> tuple[Array, Marks]:
        """Errors and updates, (blocks, K) each, under one schedule."""
        place = one_of("schedule", schedule, self.schedules)
        return self.errors[place], self.updates[place]

    def update_induced(self, schedule: str) -> float:
        """The mean error where a block is computed: it comes from upstream."""
        errors, updates = self.of(schedule)
        return float(errors[updates].mean())

    def reuse_induced(self, schedule: str) -> float:
        """The mean error where a block's output is used again; 0 where nothing is."""
        errors, updates = self.of(schedule)
        return float(errors[~updates].mean()) if (~updates).any() else 0.0


@dataclass(frozen=True, eq=False)
class SubLayers(AnalysisSection, name="sublayers"):
    """`errors[i, j]`: relative error behind stage j of one FFN at step `at[i]`, one of its updates under `schedule`."""

    block: Name
    schedule: Name
    at: tuple[Count, ...]
    stages: tuple[Name, ...]
    errors: Annotated[Array, Axes("at", "stages")]


@dataclass(frozen=True, eq=False)
class Correlation(AnalysisSection, name="correlation"):
    """`upstream` reuses its first output at all steps, everything else is computed: errors of both by step, 0 left out.

    At `step` alone, the upstream error is scaled by each of `betas`, everything before it as in the full run.
    """

    upstream: Name
    downstream: Name
    upstream_errors: Annotated[Array, Axes("later steps")]
    downstream_errors: Annotated[Array, Axes("later steps")]
    step: Count
    betas: Annotated[Array, Axes("betas")]
    beta_upstream: Annotated[Array, Axes("betas")]
    beta_downstream: Annotated[Array, Axes("betas")]

    @property
    def r(self) -> float | None:
        """Pearson's, over the steps; None where there is nothing to correlate."""
        return pearson(self.upstream_errors, self.downstream_errors)

    @property
    def beta_r(self) -> float | None:
        """Pearson's, over the betas."""
        return pearson(self.beta_upstream, self.beta_downstream)


@dataclass(frozen=True, eq=False)
class Response(AnalysisSection, name="response"):
    """The proposition's linear operator against the true difference of an FFN, for input errors of shrinking size.

    `scales` are |delta| / |X|; `differences` |FFN(X + delta) - FFN(X)|, `remainders` what the operator leaves of that, both
    as shares of |FFN(X)|, means over samples.
    """

    block: Name
    step: Count
    scales: Annotated[Array, Axes("scales")]
    differences: Annotated[Array, Axes("scales")]
    remainders: Annotated[Array, Axes("scales")]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        if len(set(self.scales.tolist())) < 2 or self.scales.min() <= 0:
            raise AnalysisError("the response needs two or more different sizes of the input error, all above 0")

    @property
    def order(self) -> float:
        """The power of |delta| with which the remainder falls: 2 where the operator is the derivative."""
        return _slope(self.scales, self.remainders)

    @property
    def difference_order(self) -> float:
        """The power with which the difference itself falls: 1, since it is linear at first."""
        return _slope(self.scales, self.differences)


@dataclass(frozen=True, eq=False)
class WeightNorms(AnalysisSection, name="weights"):
    """Frobenius norms of W1, W2 and the W_V of each kind of attention, by layer, and how many numbers each has."""

    layers: tuple[Name, ...]
    matrices: tuple[Name, ...]
    norms: Annotated[Array, Axes("matrices", "layers")]
    elements: Annotated[Counts, Axes("matrices", "layers")]

    @property
    def per_element(self) -> Array:
        """(matrices, layers): the root mean square of one number."""
        return np.asarray(self.norms / np.sqrt(self.elements.astype(np.float32)), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class FeatureMaps(AnalysisSection, name="features"):
    """Of one sample and some blocks, the mean over tokens of what the block adds: in the full run, and under `schedule`."""

    schedule: Name
    maps: tuple[Name, ...]
    truth: Annotated[Array, Axes("maps", "steps", "channels")]
    cached: Annotated[Array, Axes("maps", "steps", "channels")]
    updates: Annotated[Marks, Axes("maps", "steps")]

    @property
    def difference(self) -> Array:
        """(maps, K, channels), absolute."""
        found: Array = np.abs(self.cached - self.truth)
        return found


@dataclass(frozen=True, eq=False)
class Homogeneity(AnalysisSection, name="homogeneity"):
    """Cosine between the features of different episodes, each with noise of its own: all pairs, by block and step.

    Args:
        separate: Whether the samples are known to be of different episodes.
        at: Evenly spaced steps, for `mean`, `std`, `p05` and `p95` over the pairs.
        every_step: The mean over the pairs at all steps.
        one_noise: The same with one noise for all episodes, so that they differ by what was observed alone.
        block, step: Where `between` holds the cosine of every pair; `two` are two episodes' own similarity matrices of
            that block.
    """

    separate: bool
    at: tuple[Count, ...]
    mean: Annotated[Array, Axes("blocks", "at")]
    std: Annotated[Array, Axes("blocks", "at")]
    p05: Annotated[Array, Axes("blocks", "at")]
    p95: Annotated[Array, Axes("blocks", "at")]
    every_step: Annotated[Array, Axes("blocks", "steps")]
    one_noise: Annotated[Array, Axes("blocks", "steps")]
    block: Name
    step: Count
    between: Annotated[Array, Axes("episodes", "episodes")]
    two: Annotated[Array, Axes("pair", "steps", "steps")]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        _check_below("step", (*self.at, self.step), sizes["steps"])
        if sizes["pair"] != 2 or not sizes["blocks"] or not self.at:
            raise AnalysisError(
                f"the homogeneity needs blocks, steps and two episodes side by side, got {sizes['blocks']} blocks, "
                f"{len(self.at)} steps and {sizes['pair']} episodes"
            )

    @property
    def episodes(self) -> int:
        return len(self.between)

    @property
    def statistics(self) -> Mapping[str, float]:
        """The paper's six, over all blocks and the evenly spaced steps."""
        return MappingProxyType(
            {
                "AvgMean": float(self.mean.mean()),
                "MinMean": float(self.mean.min()),
                "AvgStd": float(self.std.mean()),
                "MaxStd": float(self.std.max()),
                "AvgP05": float(self.p05.mean()),
                "AvgP95": float(self.p95.mean()),
            }
        )

    @property
    def divergence(self) -> Array:
        """(K,): how unlike episodes are at every step, one minus the mean cosine over blocks and pairs."""
        found: Array = 1 - self.every_step.mean(axis=0)
        return found

    @property
    def one_noise_divergence(self) -> Array:
        """The same with one noise for all."""
        found: Array = 1 - self.one_noise.mean(axis=0)
        return found


@dataclass(frozen=True, eq=False)
class Stability(AnalysisSection, name="stability"):
    """Schedules of few generations beside that of all `generations`, for several draws of each of `counts`.

    `shared`: the share of block updates that both have, of those that either has, step 0 left out; `excess`: by how much
    the dissimilarity (one minus the cosine, of what is reused to what would be computed) over all generations is above the
    least that can be reached, as a share of that.
    """

    generations: Count
    updates: Count
    counts: tuple[Count, ...]
    shared: Annotated[Array, Axes("counts", "draws")]
    excess: Annotated[Array, Axes("counts", "draws")]


@dataclass(frozen=True, eq=False)
class ActionCosts(AnalysisSection, name="action-costs"):
    """What the executed action feels: `costs[i, b, s]` is its root mean square error, to first order and in normalised
    units, if block b is computed at step s and reused for `lags[i]` steps (or to the end); `cosine` is beside it."""

    lags: tuple[Count, ...]
    costs: Annotated[Array, Axes("lags", "blocks", "steps")]
    cosine: Annotated[Array, Axes("lags", "blocks", "steps")]


@dataclass(frozen=True, eq=False)
class WeakerPolicy(AnalysisSection, name="weaker"):
    """The same method on two policies: action error to the own full run, and the noise floor, by policy; the good first."""

    method: Name
    policies: tuple[Name, Name]
    errors: Annotated[Array, Axes("policies")]
    floors: Annotated[Array, Axes("policies")]

    @property
    def relative(self) -> Array:
        """(2,): the error in units of the own noise floor."""
        return np.asarray(self.errors / np.maximum(self.floors, np.finfo(np.float32).tiny), dtype=np.float32)


SECTIONS: Mapping[str, type[AnalysisSection]] = MappingProxyType(REGISTERED)
"""By name, in the order in which a reader meets them."""


def pearson(one: Array, other: Array) -> float | None:
    """The correlation coefficient; None where one of them does not vary, or there are fewer than two values."""
    if len(one) < 2 or not np.ptp(one) or not np.ptp(other):
        return None
    return float(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1])


def _slope(sizes: Array, values: Array) -> float:
    """The slope of a line through the logarithms."""
    tiny = np.finfo(np.float32).tiny
    size, value = (np.log(np.maximum(item, tiny).astype(np.float64)) for item in (sizes, values))
    return float(np.polyfit(size, value, 1)[0])


def _check_below(what: str, found: tuple[int, ...], steps: int, least: int = 0) -> None:
    for item in found:
        if not least <= item < steps:
            raise AnalysisError(f"a {what} must be from {least} to {steps - 1}, got {item}")

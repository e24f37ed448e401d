"""docs/generated/frontier.md, from the files of suite frontier only: who wins where, and whether distances would have told it.

Every verdict is computed; none is written down here. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import exists
from blockcache.fingerprint import fingerprint_differences
from blockcache.measure.statistics import rank_correlation
from blockcache.report.chart import Axis, Panel
from blockcache.report.document import Block, Bullets, Document, Figure, Paragraph, Section, plain, table
from blockcache.report.drawing import draw_panels, save_figure
from blockcache.report.methods import DIFFERENCE, SCORE
from blockcache.results.check import predicted_loss
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache_lab.pages.pictures import LOSS, MILLISECONDS, RULES, Mark, by_kind, full_precision, loss_mark, series_of
from blockcache_lab.pages.suite_parts import PolicySuite, made_from, suite_tables, who_wins
from blockcache_lab.studies.distances import FrontierDistances, MethodDistances
from blockcache_lab.studies.suites import DISTANCES, FRONTIER

_COLUMNS = ["method", "n", SCORE, DIFFERENCE, "lossless", "success", "GFLOP", "of full", "ms", "over full", "jerk"]
LOWEST_DRAWN = 0.25
"""What loses more stands at the edge of the pictures with its loss beside it: the interesting ones lie close together."""
LEAST_SHARED, LEAST_COMPARED = 20, 5
"""Seeds that all methods must share, and methods, before their losses are compared with themselves."""
_MEASURES: dict[str, Callable[[MethodDistances], float]] = {
    "centre shift": lambda found: found.distances.centre_shift.mean,
    "energy distance": lambda found: found.distances.energy.mean,
    "energy beyond spread": lambda found: found.distances.beyond_spread.mean,
}


@dataclass(frozen=True, eq=False)
class FrontierSuite(PolicySuite):
    """One policy's frontier, with the distances of its methods if their file is there."""

    NAMES: ClassVar[Sequence[str]] = (FRONTIER,)

    def __post_init__(self) -> None:
        found = self.distances
        if found is not None and (differences := fingerprint_differences(self.first.fingerprint, found.policy)):
            file = Path(self.directory) / DISTANCES
            raise FileError(f"{file} is of another policy than the suite ({'; '.join(differences)}); measure it again")

    @cached_property
    def distances(self) -> FrontierDistances | None:
        file = Path(self.directory) / DISTANCES
        return FrontierDistances.load(file) if exists(file) else None

    @property
    def scatter(self) -> str:
        return f"frontier-{self.task}-distances.png"

    def losses(self) -> dict[str, float]:
        """What each method loses in closed loop."""
        return {name: -difference.mean for name, difference in self.differences.items()}

    @property
    def known(self) -> list[str]:
        """The methods that have a loss and distances."""
        return [name for name in self.losses() if self.distances is not None and name in self.distances.methods]

    def correlations(self) -> dict[str, float]:
        """Spearman's, of each distance and the loss in closed loop, over the methods that have both."""
        if self.distances is None:
            return {}
        measured, losses = self.distances, self.losses()
        predicted = {"predicted loss": lambda found: predicted_loss(found.distances, measured.features)}
        known, lost = [measured.methods[name] for name in self.known], [losses[name] for name in self.known]
        return {title: rank_correlation(list(map(of, known)), lost) for title, of in (_MEASURES | predicted).items()}

    def agreement(self) -> float | None:
        """Rank correlation of the losses over one half of the seeds and over the other, for the methods of `correlations`;
        None where they share too few seeds."""
        names = (BASELINE, *self.known)
        scores = [self.item.scores(name) for name in names]
        seeds = sorted(set.intersection(*map(set, scores)))
        if len(seeds) < LEAST_SHARED or len(names) < LEAST_COMPARED:
            return None
        full, *others = scores
        return split_half([[full[seed] - found[seed] for seed in seeds] for found in others])


def split_half(values: ArrayLike, rounds: int = 100) -> float:
    """How far (methods, episodes) agree with themselves: the mean rank correlation of the methods' means over one random
    half of the episodes and over the other. No predictor can be asked to do better than the measurement itself.

    Args:
        values: What each method scores in each episode.
        rounds: Random halves.
    """
    values = np.asarray(values, np.float64)
    draw, half = np.random.default_rng(0), values.shape[1] // 2
    orders = [draw.permutation(values.shape[1]) for _ in range(rounds)]
    means = [(values[:, order[:half]].mean(axis=1), values[:, order[half:]].mean(axis=1)) for order in orders]
    return float(np.mean([rank_correlation(one, other) for one, other in means]))


def page(suites: Sequence[FrontierSuite]) -> Document:
    """The whole page; its pictures lie beside it.

    Args:
        suites: The suite's files of each policy.
    """
    command = f"blockcache paper frontier {' '.join(item.directory for item in suites)}"
    sampler = (
        "Everything but the first table changes the sampler: other actions are drawn than the policy's own sampler would "
        "draw, from a distribution that is near to its own. Where that must not be, `tune --keep-sampler`."
    )
    return Document(
        "The frontier: what beats the paper's schedule",
        (made_from("suite frontier", command), Paragraph(sampler), *(_policy(item) for item in suites)),
    )


def _policy(suite: FrontierSuite) -> Section:
    results, timings = suite.item.results, suite.timings
    commands, source = suite.commands, results.policy["source"]
    if suite.distances is not None:
        commands.append(f"`blockcache paper distances {source} -o {suite.directory}{suite.tuned_option}`")
    run = [
        plain(suite.item.suite.about),
        "Commands: " + ", ".join(commands) + ".",
        f"Seeds from {results.setting['first_seed']}, on which nothing was chosen; differences are paired, 95 % intervals.",
    ]
    if timings is not None:
        run.append(
            f"Milliseconds: {timings.setting}; {timings.machine['processor']}. The plain torch policy takes "
            f"{timings.ms(PLAIN):.0f} ms."
        )
    picture = Figure(
        suite.picture,
        f"loss against milliseconds on {suite.task}",
        "Paired difference of the score to the full policy, 95 % intervals. Further left is faster, higher is better.",
    )
    return Section(
        suite.task,
        (
            Bullets(tuple(run)),
            *([picture] if timings is not None else []),
            who_wins(suite),
            *_speed(suite),
            *_distances(suite),
            *suite_tables(suite.item, _COLUMNS, timings),
        ),
    )


def _speed(suite: FrontierSuite) -> list[Block]:
    """The fastest lossless methods, and how many times faster than the plain policy they are."""
    over = {name: times for name in suite.lossless if (times := suite.over(name, PLAIN)) is not None}
    if not over:
        return []
    best = sorted(over, key=lambda name: -over[name])[:3]
    listed = ", ".join(f"{plain(method_named(name).label)} {over[name]:.0f}x" for name in best)
    return [Paragraph(f"The fastest lossless ones, over the plain torch policy in the same rounds: {listed}.")]


def _distances(suite: FrontierSuite) -> list[Block]:
    measured = suite.distances
    if measured is None:
        return []
    losses = suite.losses()
    names = sorted((name for name in measured.methods if name in losses), key=lambda name: losses[name])
    rows = []
    for name in names:
        one = measured.methods[name].distances
        shown = [value.text("{:.3f}") for value in (one.centre_shift, one.energy, one.beyond_spread)]
        shown += [one.spread.text("{:.2f}"), f"{predicted_loss(one, measured.features):.3f}", f"{losses[name]:+.3f}"]
        rows.append([plain(method_named(name).label), *shown])
    ranks = suite.correlations()
    best = max(ranks, key=lambda name: ranks[name])
    said = ", ".join(f"{name} {value:.2f}" for name, value in ranks.items())
    setting = measured.setting
    text = (
        f"Rank correlation (Spearman) with the loss in closed loop over {len(names)} methods: {said}. The best is {best}. "
        f"At {setting['observations']} observations, {setting['samples']} chunks each; nothing was calibrated or fitted on "
        f"them. The policy's own halves are {measured.floor.centre_shift.mean:.3f} (centre shift) and "
        f"{measured.floor.energy.mean:.3f} (energy) apart."
    )
    if (agreement := suite.agreement()) is not None:
        text += (
            f" What rollouts themselves can tell: the losses over one half of the seeds and over the other have a rank "
            f"correlation of {agreement:.2f}."
        )
    columns = ["method", "centre shift", "energy", "beyond spread", "spread", "predicted loss", "loss in closed loop"]
    scatter = Figure(suite.scatter, f"distances against loss on {suite.task}", "Each point is a method.")
    blocks = (Paragraph(text), scatter, table(columns, rows, left=1), *_modes(measured))
    return [Section("Distances, without a rollout", blocks)]


def _modes(measured: FrontierDistances) -> list[Block]:
    known = {name: item.modes for name, item in measured.methods.items() if item.modes is not None}
    if not known:
        return [Paragraph("The policy takes one mode at all of these observations: there is none to be dropped.")]
    one = next(iter(known.values()))
    shown = {name: [f"{m.found:.3f}", f"{m.apart:.3f}", f"{m.dropped} of {m.forks}"] for name, m in known.items()}
    rows = [[plain(method_named(name).label), *figures] for name, figures in shown.items()]
    text = (
        f"At {one.forks} of {measured.setting['observations']} observations the policy has two modes; it takes the "
        f"smaller one in {one.reference:.3f} of its chunks."
    )
    columns = ["method", "share of the smaller mode", "mean difference of the share", "forks where it is never taken"]
    return [Paragraph(text), table(columns, rows, left=1)]


def draw(suite: FrontierSuite, directory: Path) -> None:
    """The pictures of one policy: loss against milliseconds, and distances against loss.

    Args:
        suite: Its suite; a picture whose file is missing is left out.
        directory: For the pictures.
    """
    if suite.timings is not None:
        marks = [
            loss_mark(method_named(name), ms, difference, _short(name), -LOWEST_DRAWN)
            for name, difference in suite.differences.items()
            if (ms := suite.ms(name)) is not None
        ]
        series = (*series_of(by_kind(marks)), *full_precision(suite.ms(BASELINE)))
        panel = Panel(Axis(MILLISECONDS, log=True), Axis(LOSS), series, rules=RULES)
        save_figure(draw_panels([panel], 1, 10.0, 6.0), directory / suite.picture)
    if suite.distances is not None:
        ranks = suite.correlations()
        scatters = [
            Panel(
                Axis(title),
                Axis("loss of score in closed loop"),
                series_of(by_kind(_scattered(suite, suite.distances, of))),
                f"rank correlation {ranks[title]:.2f}",
            )
            for title, of in _MEASURES.items()
        ]
        save_figure(draw_panels(scatters, len(scatters), 5.0, 6.5), directory / suite.scatter)


def _scattered(
    suite: FrontierSuite, measured: FrontierDistances, of: Callable[[MethodDistances], float]
) -> Iterator[Mark]:
    """What each method loses, against one of its distances."""
    for name, lost in suite.losses().items():
        if name in measured.methods:
            beyond = f" ({lost:.2f})" if lost > LOWEST_DRAWN else ""
            x, y = of(measured.methods[name]), min(lost, LOWEST_DRAWN)
            yield Mark(method_named(name), x, y, _short(name) + beyond)


def _short(name: str) -> str:
    """The words beside a point; its colour says the kind of method."""
    return method_named(name).label.replace("SDE-DPM-Solver++", "SDE").replace("Action costs", "action")

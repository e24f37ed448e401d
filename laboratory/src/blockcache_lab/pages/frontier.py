"""docs/generated/frontier.md, from the files of suite frontier only: who wins where, and whether distances would have told it.

Every verdict is computed; none is written down here. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import PathLike, exists
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.measure.statistics import LOSSLESS
from blockcache.palette import drawn
from blockcache.report.document import Block, Bullets, Document, Figure, Paragraph, Section, plain, table
from blockcache.report.figures import Label, new_figure, save_figure, write_labels
from blockcache.report.methods import DIFFERENCE, SCORE
from blockcache.results.check import predicted_loss
from blockcache.results.distances import FrontierDistances, MethodDistances
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.timings import Timings
from blockcache_lab.pages.own_suite import OwnSuite
from blockcache_lab.pages.ranks import rank_correlation, split_half
from blockcache_lab.pages.suite_tables import suite_tables
from blockcache_lab.pages.verdicts import who_wins
from blockcache_lab.studies.suite_results import Collection
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
class FrontierSuite(OwnSuite):
    """With the distances, if they are there."""

    distances: FrontierDistances | None

    @classmethod
    def load(cls, directory: str) -> FrontierSuite:
        collection, file = Collection.load(directory, (FRONTIER,)), Path(directory) / DISTANCES
        found = FrontierDistances.load(file) if exists(file) else None
        run = Fingerprint.from_dict(collection.first.policy["fingerprint"])
        if found is not None and (differences := fingerprint_differences(run, found.policy)):
            raise FileError(f"{file} is of another policy than the suite ({'; '.join(differences)}); measure it again")
        return cls(directory, collection, found)

    @property
    def picture(self) -> str:
        return f"frontier-{self.task}.png"

    @property
    def scatter(self) -> str:
        return f"frontier-{self.task}-distances.png"

    def losses(self) -> dict[str, float]:
        return {name: -row.difference.mean for name, row in self.compared.items() if row.difference is not None}

    def correlations(self) -> dict[str, float]:
        """Spearman's, of each distance and the loss in closed loop, over the methods that have both."""
        if self.distances is None:
            return {}
        losses, known = self.losses(), self.distances.methods
        names = [name for name in losses if name in known]
        features = self.distances.features
        measures = dict(_MEASURES)
        measures["predicted loss"] = lambda found: predicted_loss(found.distances, features)
        lost = [losses[name] for name in names]
        return {title: rank_correlation([of(known[name]) for name in names], lost) for title, of in measures.items()}

    def agreement(self) -> float | None:
        """Rank correlation of the losses over one half of the seeds and over the other, for the methods of `correlations`;
        None where they share too few seeds."""
        assert self.distances is not None
        names = (BASELINE, *(name for name in self.losses() if name in self.distances.methods))
        scores = [
            {seed: one.score for seed, one in self.item.results.of(name).items() if one.score is not None}
            for name in names
        ]
        seeds = sorted(set.intersection(*map(set, scores)))
        if len(seeds) < LEAST_SHARED or len(names) < LEAST_COMPARED:
            return None
        full, *others = scores
        return split_half([[full[seed] - found[seed] for seed in seeds] for found in others])


def page(found: Sequence[FrontierSuite]) -> Document:
    """The whole page; its pictures lie beside it."""
    made_from = (
        "Made from the files of suite frontier; every sentence with a figure or a verdict in it is computed from them. The "
        f"command:\n`blockcache paper frontier {' '.join(item.directory for item in found)} -o docs/generated`."
    )
    sampler = (
        "Everything but the first table changes the sampler: other actions are drawn than the policy's own sampler would "
        "draw, from a distribution that is near to its own. Where that must not be, `tune --keep-sampler`."
    )
    return Document(
        "The frontier: what beats the paper's schedule",
        (Paragraph(made_from), Paragraph(sampler), *(_policy(item) for item in found)),
    )


def _policy(found: FrontierSuite) -> Section:
    results, timings = found.item.results, found.timings
    commands, source = found.commands, results.policy["source"]
    if found.distances is not None:
        commands.append(f"`blockcache paper distances {source} -o {found.directory}{found.tuned_option}`")
    run = [
        plain(found.item.suite.about),
        "Commands: " + ", ".join(commands) + ".",
        f"Seeds from {results.setting['first_seed']}, on which nothing was chosen; differences are paired, 95 % intervals.",
    ]
    if timings is not None:
        run.append(
            f"Milliseconds: {timings.setting}; {timings.machine['processor']}. The plain torch policy takes "
            f"{timings.ms(PLAIN):.0f} ms."
        )
    picture = Figure(
        found.picture,
        f"loss against milliseconds on {found.task}",
        "Paired difference of the score to the full policy, 95 % intervals. Further left is faster, higher is better.",
    )
    return Section(
        found.task,
        (
            Bullets(tuple(run)),
            *([picture] if timings is not None else []),
            who_wins(found.collection),
            *_speed(found),
            *_distances(found),
            *suite_tables(found.item, _COLUMNS, timings),
        ),
    )


def _speed(found: FrontierSuite) -> list[Block]:
    """How fast the lossless ones are, over the plain policy."""
    timings = found.timings
    if timings is None:
        return []
    good = [name for name, row in found.compared.items() if row.difference is not None and row.difference.lossless]
    over = {name: value for name in good if (value := timings.over(name, PLAIN)) is not None}
    if not over:
        return []
    best = sorted(over, key=lambda name: -over[name])[:3]
    listed = ", ".join(f"{plain(method_named(name).label)} {over[name]:.0f}x" for name in best)
    return [Paragraph(f"The fastest lossless ones, over the plain torch policy in the same rounds: {listed}.")]


def _distances(found: FrontierSuite) -> list[Block]:
    measured = found.distances
    if measured is None:
        return []
    losses = found.losses()
    names = sorted((name for name in measured.methods if name in losses), key=lambda name: losses[name])
    rows = []
    for name in names:
        one = measured.methods[name].distances
        rows.append(
            [
                plain(method_named(name).label),
                one.centre_shift.text("{:.3f}"),
                one.energy.text("{:.3f}"),
                one.beyond_spread.text("{:.3f}"),
                one.spread.text("{:.2f}"),
                f"{predicted_loss(one, measured.features):.3f}",
                f"{losses[name]:+.3f}",
            ]
        )
    ranks = found.correlations()
    best = max(ranks, key=lambda name: ranks[name])
    said = ", ".join(f"{name} {value:.2f}" for name, value in ranks.items())
    setting = measured.setting
    text = (
        f"Rank correlation (Spearman) with the loss in closed loop over {len(names)} methods: {said}. The best is {best}. "
        f"At {setting['observations']} observations, {setting['samples']} chunks each; nothing was calibrated or fitted on "
        f"them. The policy's own halves are {measured.floor.centre_shift.mean:.3f} (centre shift) and "
        f"{measured.floor.energy.mean:.3f} (energy) apart."
    )
    if (agreement := found.agreement()) is not None:
        text += (
            f" What rollouts themselves can tell: the losses over one half of the seeds and over the other have a rank "
            f"correlation of {agreement:.2f}."
        )
    columns = ["method", "centre shift", "energy", "beyond spread", "spread", "predicted loss", "loss in closed loop"]
    scatter = Figure(found.scatter, f"distances against loss on {found.task}", "Each point is a method.")
    return [
        Section(
            "Distances, without a rollout", (Paragraph(text), scatter, table(columns, rows, left=1), *_modes(found))
        )
    ]


def _modes(found: FrontierSuite) -> list[Block]:
    assert found.distances is not None
    known = {name: item.modes for name, item in found.distances.methods.items() if item.modes is not None}
    if not known:
        return [Paragraph("The policy takes one mode at all of these observations: there is none to be dropped.")]
    one = next(iter(known.values()))
    rows = [
        [
            plain(method_named(name).label),
            f"{value.found:.3f}",
            f"{value.apart:.3f}",
            f"{value.dropped} of {value.forks}",
        ]
        for name, value in known.items()
    ]
    text = (
        f"At {one.forks} of {found.distances.setting['observations']} observations the policy has two modes; it takes the "
        f"smaller one in {one.reference:.3f} of its chunks."
    )
    columns = ["method", "share of the smaller mode", "mean difference of the share", "forks where it is never taken"]
    return [Paragraph(text), table(columns, rows, left=1)]


def draw(found: FrontierSuite, directory: Path) -> None:
    """The pictures of one policy: loss against milliseconds, and distances against loss."""
    if found.timings is not None:
        _draw_losses(found, found.timings, directory / found.picture)
    if found.distances is not None:
        _draw_distances(found, found.distances, directory / found.scatter)


def _draw_losses(found: FrontierSuite, timings: Timings, path: PathLike) -> None:
    figure = new_figure(10.0, 6.4)
    axes = figure.add_subplot()
    labels = []
    lowest = -LOWEST_DRAWN
    axes.axhline(0, color="black", lw=0.8)
    axes.axhline(LOSSLESS, color="black", lw=0.8, ls=":")
    legend: set[str] = set()
    for name in sorted(found.compared, key=lambda name: method_named(name).rank):
        method = method_named(name)
        difference, ms = found.compared[name].difference, timings.ms(name)
        if difference is not None and ms is not None:
            colour, marker = drawn(*method.look)
            bars = [[difference.mean - difference.low], [difference.high - difference.mean]]
            size = 13 if method.tuned_in else 6
            shown = max(lowest, difference.mean)
            axes.errorbar(
                ms, shown, yerr=bars if shown == difference.mean else None, fmt=marker, color=colour, ms=size,
                elinewidth=0.8, capsize=2, label=None if method.kind in legend else method.kind,
            )  # fmt: skip
            legend.add(method.kind)
            lost = "" if shown == difference.mean else f" ({difference.mean:+.2f})"
            labels.append(Label(_short(name) + lost, ms, shown, colour))
    full = timings.ms(BASELINE)
    if full is not None:
        axes.plot(full, 0, "*", color="black", ms=11, mfc="white", label="full precision, this engine")
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds per action chunk (measured, one CPU thread)")
    axes.set_ylabel("score: paired difference to full precision")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.margins(x=0.1)
    axes.set_ylim(bottom=lowest - 0.02)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    write_labels(axes, labels)
    save_figure(figure, path)


def _draw_distances(found: FrontierSuite, measured: FrontierDistances, path: PathLike) -> None:
    losses, ranks = found.losses(), found.correlations()
    figure = new_figure(15.0, 7.0)
    shown = ("centre shift", "energy distance", "energy beyond spread")
    for panel, title in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        labels = []
        for name, value in losses.items():
            if name in measured.methods:
                colour, marker = drawn(*method_named(name).look)
                x, y = _MEASURES[title](measured.methods[name]), min(value, LOWEST_DRAWN)
                panel.plot(x, y, marker, color=colour, ms=6)
                labels.append(Label(_short(name) + (f" ({value:.2f})" if value > y else ""), x, y, colour))
        panel.set_xlabel(title)
        panel.margins(x=0.25)
        panel.set_title(f"rank correlation {ranks[title]:.2f}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        if title == shown[0]:
            panel.set_ylabel("loss of score in closed loop")
        write_labels(panel, labels, 6.0)
    save_figure(figure, path)


def _short(name: str) -> str:
    """A point's own name beside its kind's colour."""
    return method_named(name).label.replace("SDE-DPM-Solver++", "SDE").replace("Action costs", "action")

"""What the pages of suites share: one policy's suite, tables of its methods, and who wins where. All of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import Estimate
from blockcache.report.document import Bullets, Paragraph, Section, Table, table
from blockcache.report.methods import cells, estimate, of_full
from blockcache.results.rollouts import BASELINE
from blockcache.results.timings import Timings
from blockcache_lab.studies.suite_results import Collection, SuiteResults

REFERENCE = "difference to the reference"  # a column whose head names the suite's own reference
QUICK = Paragraph("**From a quick run: a few shortened rollouts. No figure on this page means anything.**")


def made_from(files: str, command: str) -> Paragraph:
    """The first paragraph of a page on suites: whose `files` it was made from, by which command."""
    return Paragraph(
        f"Made from the files of {files}; every sentence with a figure or a verdict in it is computed from them. The command:\n"
        f"`{command} -o docs/generated`."
    )


def shown_ms(timings: Timings | None, method: str) -> str:
    """A method's milliseconds, if they are known."""
    ms = None if timings is None else timings.ms(method)
    return "" if ms is None else f"{ms:.1f}"


@dataclass(frozen=True, eq=False)
class PolicySuite(Collection):
    """A suite that has a directory of its own: one policy's results, and its times if they are there."""

    @property
    def item(self) -> SuiteResults:
        (item,) = self.suites.values()
        return item

    @property
    def task(self) -> str:
        return str(self.first.task["name"])

    @property
    def picture(self) -> str:
        return f"{self.item.suite.name}-{self.task}.png"

    @property
    def tuned_option(self) -> str:
        """As one would type it behind a command; nothing where nothing tuned is compared."""
        tuned = next(filter(None, (method_named(name).tuned_in for name in self.differences)), None)
        return "" if tuned is None else f" --tuned {tuned}"

    @property
    def commands(self) -> list[str]:
        """What made the files, as far as they are there."""
        name, source = self.item.suite.name, self.item.results.policy["source"]
        made = [f"`{self.item.command(self.directory)}{self.tuned_option}`"]
        if self.timings is not None:
            made.append(f"`blockcache paper timing {source} --suite {name} -o {self.directory}{self.tuned_option}`")
        return made


def suite_tables(
    item: SuiteResults,
    columns: Sequence[str],
    timings: Timings | None = None,
    more: Callable[[str], Mapping[str, str]] = lambda method: {},
) -> tuple[Section, ...]:
    """A suite's methods, one table for each of its sections.

    Args:
        item: The suite and its results.
        columns: Which of the methods' figures to show; REFERENCE is left out where the suite has none.
        timings: How long the methods take, if that is known.
        more: Further figures of a method by the name of their column.
    """
    reference = item.suite.reference
    against = f"difference to {method_named(reference).label}, 95 %" if reference else ""
    names = [against if name == REFERENCE else name for name in columns if reference or name != REFERENCE]
    full = item.rows[BASELINE].method.flops

    def figures(method: str) -> dict[str, str]:
        difference = item.compare(method, reference) if reference and method != reference else None
        over = timings.over(method, BASELINE) if timings else None
        return {
            **cells(item.rows[method]),
            "of full": of_full(item.rows[method].method.flops, full),
            against: estimate(difference, "{:+.3f}"),
            "ms": shown_ms(timings, method),
            "over full": "" if over is None else f"{over:.1f}x",
            **more(method),
        }

    return tuple(
        Section(title, (table(names, [figures(cell.method) for cell in group]),))
        for title, group in item.suite.sections.items()
    )


def who_wins(collection: Collection) -> Section:
    """Each method against the full policy, and against its rivals at equal FLOPs."""
    differences, lossless = collection.differences, collection.lossless
    worse = [name for name in differences if name not in lossless and differences[name].high < 0]
    lossy = [name for name in lossless if differences[name].high < 0]
    open_ = [name for name in differences if name not in lossless and name not in worse]
    score = collection.full.score
    scored = [] if score is None else [f"Full precision scores {estimate(score, '{:.3f}')} over {score.n} rollouts."]
    items = [
        "**Lossless**: " + _listed(lossless, differences) + ".",
        "**Worse** (the whole interval lies below 0), by: " + _listed(worse, differences, "{:.3f}") + ".",
        "**Not shown either way** (a drop is neither ruled out nor certain): " + _listed(open_, differences) + ".",
    ]
    if lossy:
        items.append(f"Lossless, yet certainly a little worse: {', '.join(map(_label, lossy))}.")
    if (cheapest := collection.cheapest) is not None:
        share = of_full(collection.rows[cheapest].method.flops, collection.full.method.flops) or "an unknown share"
        timed = {name: ms for name in lossless if (ms := collection.ms(name))}
        fastest = min(timed, key=lambda name: timed[name], default=None)
        speed = "" if fastest is None else f"; the fastest is {_label(fastest)} with {timed[fastest]:.1f} ms"
        items.append(f"The cheapest lossless method is {_label(cheapest)}, with {share} of the FLOPs{speed}.")
    items.append(_frontier(collection))
    against = Section("Against the full policy", (*map(Paragraph, scored), Bullets(tuple(items))))
    return Section("Who wins where", (against, *_equal_flops(collection)))


def _frontier(collection: Collection) -> str:
    """By the means alone: what no other method beats in both cost and score."""
    differences = collection.differences.items()
    places = {name: (collection.rows[name].method.flops, -value.mean) for name, value in differences}

    def beaten(place: tuple[float, float]) -> bool:
        return any(other != place and other[0] <= place[0] and other[1] <= place[1] for other in places.values())

    best = sorted((name for name, place in places.items() if not beaten(place)), key=lambda name: places[name])
    return (
        "By the means alone, over as many episodes as each method has and so subject to chance, no other method is both "
        f"cheaper and better than: {', '.join(map(_label, best))}."
    )


def _equal_flops(collection: Collection) -> list[Section]:
    if not collection.equals:
        return []
    pairs = [(str(cell.equals), cell.method) for cell in collection.equals]
    flops = {name: row.method.flops for name, row in collection.rows.items()}
    about = Paragraph(
        "Each rival was chosen to have the FLOPs of the BAC schedule beside it. A method wins if the interval of the paired\n"
        "difference leaves out 0."
    )
    return [Section("At equal FLOPs", (about, *rivals(collection, pairs, flops)))]


def rivals(collection: Collection, pairs: Sequence[tuple[str, str]], flops: Mapping[str, int]) -> tuple[Table, Bullets]:
    """BAC schedules beside a rival each: a table with the FLOPs that they are compared by, and how often who wins."""
    rows = []
    for pair in pairs:
        difference, (bac, rival) = collection.compare(*pair), map(_label, pair)
        costs = [f"{flops[name] / 1e9:.3f}" for name in pair] + [shown_ms(collection.timings, name) for name in pair]
        if difference is None:
            rows.append([bac, rival, *costs, "0", "", ""])
        else:
            wins = {"better": f"**{bac}**", "worse": f"**{rival}**"}.get(verdict(difference), "not told apart")
            rows.append([bac, rival, *costs, str(difference.n), estimate(difference, "{:+.3f}"), wins])
    header = ["BAC", "rival", "GFLOP", "rival's", "ms", "rival's", "n", "score, BAC - rival, 95 %", "wins"]
    return table(header, rows), Bullets(tuple(counted([(collection, pair) for pair in pairs])))


def counted(pairs: Iterable[tuple[Collection, tuple[str, str]]]) -> list[str]:
    """How often one kind of method wins against another, loses, or is not told apart from it; by kinds."""
    verdicts = dict[str, list[str]]()
    for collection, pair in pairs:
        if (difference := collection.compare(*pair)) is not None:
            verdicts.setdefault(" against ".join(method_named(name).family for name in pair), []).append(
                verdict(difference)
            )
    return [
        f"{kinds}: wins {found.count('better')}, loses {found.count('worse')}, not told apart {found.count('not told apart')}."
        for kinds, found in verdicts.items()
    ]


def verdict(difference: Estimate) -> str:
    """What a paired difference shows: "better" or "worse" if its interval leaves out 0, else "not told apart"."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "not told apart"


def _label(method: str) -> str:
    return method_named(method).label


def _listed(names: Iterable[str], differences: Mapping[str, Estimate], short: str | None = None) -> str:
    """Methods with their differences, the best first; `short` is the form of losses without intervals."""
    shown = []
    for name in sorted(names, key=lambda name: -differences[name].mean):
        value = differences[name]
        figures = short.format(-value.mean) if short else estimate(value, "{:+.3f}")
        shown.append(f"{_label(name)} ({figures}, n = {value.n})")
    return ", ".join(shown) or "no method"

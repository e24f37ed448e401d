"""Who wins where, computed from the suites: the section of docs/generated/results.md that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import Estimate
from blockcache.report.document import Bullets, Paragraph, Section, Table, table
from blockcache.report.methods import estimate, of_full, shown_ms
from blockcache.results.summary import MethodSummary
from blockcache_lab.studies.suite_results import Collection


def who_wins(collection: Collection) -> Section:
    """Each method against the full policy, and against its rivals at equal FLOPs."""
    rows = {name: row for name, row in collection.rows.items() if row.difference is not None}
    differences = {name: row.difference for name, row in rows.items() if row.difference is not None}
    lossless = [name for name, value in differences.items() if value.lossless]
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
        items.append(
            f"Lossless, yet certainly a little worse: {', '.join(method_named(name).label for name in lossy)}."
        )
    if lossless:
        cheapest = min(lossless, key=lambda name: rows[name].method.flops)
        share = of_full(rows[cheapest].method.flops, collection.full.method.flops) or "an unknown share"
        items.append(
            f"The cheapest lossless method is {method_named(cheapest).label}, with {share} of the FLOPs"
            + _fastest(collection, lossless)
        )
    items.append(_frontier(rows))
    against = Section("Against the full policy", (*map(Paragraph, scored), Bullets(tuple(items))))
    return Section("Who wins where", (against, *_equal_flops(collection)))


def _fastest(collection: Collection, names: Sequence[str]) -> str:
    timed = {name: ms for name in names if (ms := collection.timings and collection.timings.ms(name))}
    if not timed:
        return "."
    best = min(timed, key=lambda name: timed[name])
    return f"; the fastest is {method_named(best).label} with {timed[best]:.1f} ms."


def _frontier(rows: Mapping[str, MethodSummary]) -> str:
    """By the means alone: what no other method beats in both cost and score."""
    places = {
        name: (row.method.flops, -row.difference.mean) for name, row in rows.items() if row.difference is not None
    }

    def beaten(place: tuple[float, float]) -> bool:
        return any(other != place and other[0] <= place[0] and other[1] <= place[1] for other in places.values())

    best = sorted((name for name, place in places.items() if not beaten(place)), key=lambda name: places[name])
    named = ", ".join(method_named(name).label for name in best)
    return (
        "By the means alone, over as many episodes as each method has and so subject to chance, no other method is both "
        f"cheaper and better than: {named}."
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
        difference = collection.compare(*pair)
        rows.append(
            [
                *(method_named(name).label for name in pair),
                *(f"{flops[name] / 1e9:.3f}" for name in pair),
                *(shown_ms(collection.timings, name) for name in pair),
                "0" if difference is None else str(difference.n),
                estimate(difference, "{:+.3f}"),
                "" if difference is None else _winner(difference, *(method_named(name).label for name in pair)),
            ]
        )
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
    """Of a paired difference: whether its interval leaves out 0."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "not told apart"


def _winner(difference: Estimate, one: str, other: str) -> str:
    return {"better": f"**{one}**", "worse": f"**{other}**"}.get(verdict(difference), "not told apart")


def _listed(names: Iterable[str], differences: Mapping[str, Estimate], short: str | None = None) -> str:
    """The best first; with intervals unless the means shall do."""
    shown = []
    for name in sorted(names, key=lambda name: -differences[name].mean):
        value = differences[name]
        figures = short.format(-value.mean) if short else estimate(value, "{:+.3f}")
        shown.append(f"{method_named(name).label} ({figures}, n = {value.n})")
    return ", ".join(shown) or "no method"

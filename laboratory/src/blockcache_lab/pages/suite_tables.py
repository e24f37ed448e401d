"""A suite's methods as tables, one for each of its sections: what the pages show, and what `paper suite` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blockcache.compare.methods import method_named
from blockcache.report.document import Section
from blockcache.report.methods import cells, chosen, estimate, of_full, shown_ms
from blockcache.results.rollouts import BASELINE
from blockcache.results.timings import Timings
from blockcache_lab.studies.suite_results import SuiteResults

REFERENCE = "difference to the reference"  # stands for what the suite says


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
        Section(title, (chosen(names, [figures(cell.method) for cell in group]),))
        for title, group in item.suite.sections.items()
    )

"""A method's figures as cells by the name of their column: what the pages show, and what `eval`, `suite` and `demo` print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from blockcache.measure.statistics import Estimate
from blockcache.report.document import Section, Table, plain, table
from blockcache.report.suites import SuiteResults, Timings, label
from blockcache.results.rollouts import BASELINE
from blockcache.results.summary import MethodSummary

SCORE, SUCCESS, DIFFERENCE = "score, 95 %", "success, 95 %", "difference to full, 95 %"
REFERENCE = "difference to the reference"  # stands for what the suite says


def cells(row: MethodSummary) -> dict[str, str]:
    """Every figure that a method has by itself, "" where it has none."""
    method, pairs, difference = row.method, row.discordant, row.difference
    return {
        "method": plain(label(method.name)) + ("" if method.shares_all_noise else " †"),
        "engine": method.engine,
        "n": f"{0 if row.score is None else row.score.n}" + (f" ({row.failed} failed)" if row.failed else ""),
        SCORE: estimate(row.score, "{:.3f}"),
        SUCCESS: estimate(row.success, "{:.2f}"),
        DIFFERENCE: estimate(difference, "{:+.3f}"),
        "lossless": lossless(difference),
        "success": "" if row.success is None else f"{row.success.mean:.0%}",
        "won/lost (p)": "" if pairs is None else f"{pairs.only_found}/{pairs.only_baseline} ({pairs.p:.2g})",
        "noise": "same" if method.shares_all_noise else "start only",
        "GFLOP": f"{method.flops / 1e9:.3f}",
        "action error": f"{method.error.mean:.3f}",
        "first action P95": f"{method.error.first_p95:.3f}",
        "jerk": "" if row.jerk is None else f"{row.jerk:.4f}",
        "jump": "" if row.jump is None else f"{row.jump:.4f}",
    }


def chosen(columns: Sequence[str], rows: Iterable[Mapping[str, str]], left: int = 1) -> Table:
    """A table of some of the cells, in that order; the first `left` columns are names."""
    return table(columns, [[row[name] for name in columns] for row in rows], left=left)


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
    against = f"difference to {label(reference)}, 95 %" if reference else ""
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


def of_full(flops: float, full: float) -> str:
    """A share of the full policy's FLOPs, as "1/6.0"; nothing where a family does not say its FLOPs, which are then 0."""
    return f"1/{full / flops:.1f}" if flops and full else ""


def shown_ms(timings: Timings | None, method: str) -> str:
    """A method's milliseconds, if they are known."""
    ms = None if timings is None else timings.ms(method)
    return "" if ms is None else f"{ms:.1f}"


def estimate(value: Estimate | None, form: str) -> str:
    """A mean with its interval in the form of one number, such as "{:+.3f}"; nothing where there is none."""
    return "" if value is None else value.text(form)


def lossless(difference: Estimate | None) -> str:
    """The verdict on a paired difference of scores."""
    return "" if difference is None else "yes" if difference.lossless else "no"

"""A method's figures as cells by the name of their column: what the pages show, and what `eval`, `suite` and `demo` print."""

from __future__ import annotations

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import Estimate
from blockcache.report.document import plain
from blockcache.results.summary import MethodSummary

SCORE, SUCCESS, DIFFERENCE = "score, 95 %", "success, 95 %", "difference to full, 95 %"


def cells(row: MethodSummary) -> dict[str, str]:
    """Every figure that a method has by itself, "" where it has none.

    Args:
        row: The method's summary.
    """
    method, pairs, difference = row.method, row.discordant, row.difference
    return {
        "method": plain(method_named(method.name).label) + ("" if method.shares_all_noise else " †"),
        "engine": plain(method.engine),
        "n": f"{row.count}" + (f" ({row.failed} failed)" if row.failed else ""),
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


def of_full(flops: float, full: float) -> str:
    """A share of the full policy's FLOPs, as "1/6.0"; nothing where a family does not say its FLOPs, which are then 0.

    Args:
        flops: Of the method, for one chunk.
        full: Of the full policy.
    """
    return f"1/{full / flops:.1f}" if flops and full else ""


def estimate(value: Estimate | None, form: str) -> str:
    """A mean with its interval in the form of one number, such as "{:+.3f}"; nothing where there is none.

    Args:
        value: The mean with its interval.
        form: How each of its numbers is written.
    """
    return "" if value is None else value.text(form)


def lossless(difference: Estimate | None) -> str:
    """The verdict on a paired difference of scores.

    Args:
        difference: Of the score, method less full policy; None where there are no pairs.
    """
    return "" if difference is None else "yes" if difference.lossless else "no"

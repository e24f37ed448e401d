"""docs/generated/losses.md: how well each task's losses are predicted by all the others. Knows nothing of torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from blockcache.measure.statistics import LOSSLESS
from blockcache.report.document import Block, Document, Paragraph, plain, table
from blockcache.results.check import PUSHT_FEATURES, UNKNOWN, VERDICTS, Verdict, grade_of, verdict_of
from blockcache.results.losses import FLOOR, MOST, NAMES, Prediction
from blockcache_lab.studies.loss_data import (
    ALLOWED,
    AVERAGED,
    CERTAINTY,
    LEAST_LOST,
    MOST_TERMS,
    Judgement,
    LossData,
    LossRow,
    judge,
    sums_of,
)

_TAKEN = [f"taken for {most:g}" for most in ALLOWED]
_JUDGED = [
    "task",
    "methods",
    "rank correlation",
    "highest",
    "factor",
    "promised",
    "covered",
    "by the shipped factor",
    "error",
    *_TAKEN,
]
_VERDICTS = (*VERDICTS, UNKNOWN)
_SHOWN = ("lossless", "whole interval below 0", "neither")
_POWER = [
    "task",
    "policy",
    "methods",
    "pairs",
    "smallest loss told from 0",
    "with most pairs",
    "shown to lose",
    "worst method",
    "loses",
]
_ALL = ["task", "method", "FLOPs", "shift", "beyond spread", "wider", "rougher", "predicted", "bound", "in closed loop"]


def losses_document(data: LossData) -> Document:
    """The page: how far the data can be trusted, what each task can tell apart, and the data.

    Args:
        data: Methods with their features and their losses in rollouts.
    """
    model, judged = data.model, judge(data)
    average = f"rank correlation {mean(one.rank for one in judged):.2f}, error {mean(one.error for one in judged):.3f}"
    if covered := [one.covered for one in judged if one.covered is not None]:
        average += f", covered {mean(covered):.2f} over the {len(covered)} tasks of which something is promised"
    if shipped := [one.shipped for one in judged if one.shipped is not None]:
        average += f", and {mean(shipped):.2f} by the shipped factor"
    return Document(
        "How losses are predicted",
        (
            Paragraph(
                f"{len(data.rows)} methods that were rolled out in pairs, each drawn again at {data.observations} "
                f"observations, {data.samples} chunks each. Made by `blockcache paper losses docs/generated/records/*`. Learnt from: "
                f"{plain(data.about)}."
            ),
            Paragraph(
                f"Predicted loss: {model.formula}; bound ({CERTAINTY:.0%}): {model.factor:.2f} x (prediction + {FLOOR}). It is the "
                f"mean of the {AVERAGED} sums that erred least on tasks that were left out, of {len(sums_of(len(NAMES)))} with up to {MOST_TERMS} of {len(NAMES)} terms. {plain(model.judged)}"
            ),
            Paragraph(
                "Each task below is predicted by a model that did not see it, neither to choose sums nor to fit them nor for its "
                "bound. *Highest*: the rank correlation that a perfect order would have, as many methods lose exactly the same. "
                f"*Promised*: methods with a bound; above {MOST:g}, and of a policy unlike the others, such as the only one of its family, "
                "nothing is promised. *Covered*: share of those that lose no more than their bound. Each of these models has a *factor* of its own for its bounds, in place of the "
                f"{model.factor:.2f} that ships; *by the shipped factor*: the share that it would have covered, among the methods that it would have promised a bound, with the same predictions. *Error*: of predicted losses, its mean. *Taken*: the cheapest method whose bound is at most "
                "so much, as `tune --loss` takes it among these methods, with its share of the FLOPs and its difference in closed loop, in "
                "rollouts that nothing was chosen by; full precision where no bound is as low, or nothing is promised of such a policy."
            ),
            table(_JUDGED, [_judged(one) for one in judged], left=1),
            Paragraph(f"On average: {average}."),
            *_verdicts(data, judged),
            *_power(data),
            _all_rows(data),
        ),
    )


def _judged(one: Judgement) -> list[str]:
    return [
        plain(one.task),
        str(one.methods),
        f"{one.rank:.2f}",
        f"{one.highest:.2f}",
        f"{one.factor:.2f}",
        str(one.promised),
        *("" if share is None else f"{share:.2f}" for share in (one.covered, one.shipped)),
        f"{one.error:.3f}",
        *(
            "full precision"
            if row is None
            else f"{plain(row.method)} ({row.cost:.3f}): {row.difference.text('{:+.3f}')}"
            for row in one.taken
        ),
    ]


def _verdicts(data: LossData, judged: Sequence[Judgement]) -> tuple[Block, ...]:
    """Each verdict of `check` against what rollouts showed."""
    model = data.model
    shipped = [(row, model.predict(row.features, row.family, row.actions)) for row in data.rows]
    told = {row for one in judged for row, _ in one.found}
    unseen = [*(pair for one in judged for pair in one.found), *(pair for pair in shipped if pair[0] not in told)]
    counts = [Counter((_verdict(row, found), _shown(row)) for row, found in pairs) for pairs in (shipped, unseen)]
    rows = [[verdict, *(str(count[verdict, shown]) for count in counts for shown in _SHOWN)] for verdict in _VERDICTS]
    note = (
        "What `check` says of these methods, against what rollouts showed: *lossless*, the lower end of the interval above "
        f"{LOSSLESS:g}; the *whole interval below 0*, which counts first; or *neither*. First by the model that ships, then by one that has not seen the "
        "method's task. By means alone: `check` also asks that intervals of the distances do not reach too far."
    )
    heads = [f"{shown}, {model}" for model in ("shipped", "unseen") for shown in _SHOWN]
    return Paragraph(note), table(["verdict", *heads], rows)


def _verdict(row: LossRow, found: Prediction) -> Verdict:
    shift = row.features.shift * math.sqrt(PUSHT_FEATURES)  # features are for each value of a chunk
    return verdict_of(grade_of(shift, row.features.beyond_spread, PUSHT_FEATURES), found)


def _shown(row: LossRow) -> str:
    if row.difference.high < 0:
        return _SHOWN[1]
    return _SHOWN[0] if row.difference.lossless else _SHOWN[2]


def _power(data: LossData) -> tuple[Block, ...]:
    """What each task's runs can tell apart."""
    tasks: dict[tuple[str, str], list[LossRow]] = {}
    for row in data.rows:
        tasks.setdefault((row.task, row.policy), []).append(row)
    rows = [
        [
            plain(task),
            plain(policy),
            str(len(found)),
            f"{min(row.difference.n for row in found)} to {max(row.difference.n for row in found)}",
            f"{median(row.difference.mean - row.difference.low for row in found):.3f}",
            f"{(most := max(found, key=lambda row: row.difference.n).difference).mean - most.low:.3f}",
            str(sum(row.difference.high < 0 for row in found)),
            plain((worst := min(found, key=lambda row: row.difference.mean)).method),
            f"{-worst.difference.mean:.3f}",
        ]
        for (task, policy), found in sorted(tasks.items())
    ]
    silent = sorted({row.task for row in data.rows} - {row.task for found in data.told.values() for row in found})
    note = (
        "What each task can tell apart. *Smallest loss*: the one that a method would have to show for its 95 % interval to lie below 0, "
        "for the method in the middle and for the one with most pairs. *Shown to lose*: methods whose whole interval lies below 0; "
        f"with fewer than {LEAST_LOST}, or chunks too short for a roughness, nothing is learnt from a task ({', '.join(map(plain, silent)) or 'there is none'}). A name with `@steps=` has a tighter limit "
        "than the task's own, which tells too little: that which 90 % of the full policy's successes keep, where it shows more methods to lose."
    )
    reasons: dict[str, list[str]] = {}
    for which, reason in data.left_out.items():
        reasons.setdefault(reason, []).append(plain(which))
    out = "; ".join(f"{', '.join(sorted(which))} ({plain(reason)})" for reason, which in sorted(reasons.items()))
    left_out = [Paragraph(f"Rolled out, but not in the data: {out}.")] * bool(out)
    return Paragraph(note), table(_POWER, rows, left=2), *left_out


def _all_rows(data: LossData) -> Block:
    model = data.model
    shown = [
        [
            plain(row.task),
            plain(row.method),
            f"{row.cost:.3f}",
            f"{row.features.shift:.3f}",
            f"{row.features.beyond_spread:.3f}",
            f"{row.features.wider:+.2f}",
            f"{row.features.rougher:+.3f}",
            f"{(found := model.predict(row.features, row.family, row.actions)).loss:.3f}",
            "" if found.bound is None else f"{found.bound:.3f}",
            row.difference.text("{:+.3f}"),
        ]
        for row in sorted(data.rows, key=lambda row: (row.task, -row.difference.mean))
    ]
    return table(_ALL, shown, left=2)

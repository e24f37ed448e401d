"""docs/generated/rdt.md, from the files of suite rdt only: the paper's figure on RDT beside what else makes such a policy faster.

Every verdict is computed; none is written down here. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import difference_interval
from blockcache.report.document import Block, Bullets, Document, Figure, Paragraph, Section, plain, table
from blockcache.report.methods import DIFFERENCE, SUCCESS, estimate
from blockcache.results.rollouts import BASELINE, PLAIN, Record
from blockcache_lab.pages.rdt_findings import RdtSuite, is_success, shared, summary
from blockcache_lab.pages.suite_parts import QUICK, made_from, rivals, shown_ms, suite_tables, who_wins

TRIALS, EPISODES = 3, 25
"""As the paper has them."""
AS_PRINTED, IN_ENGINE = f"{TRIALS} x {EPISODES}", "in the engine"
REAL_BLOCKS, REAL_WIDTH, REAL_IMAGE_TOKENS = 84, 2048, 4374
"""Of RDT-1B."""
_COLUMNS = ["method", "n", SUCCESS, AS_PRINTED, DIFFERENCE, "lossless"]
_COLUMNS += ["GFLOP", "of full", IN_ENGINE, "ms", "over full"]


def page(suites: Sequence[RdtSuite]) -> Document:
    """The whole page; its pictures lie beside it.

    Args:
        suites: The suite's files of each policy.
    """
    command = f"blockcache paper rdt {' '.join(item.directory for item in suites)}"
    about = (
        "The paper's second architecture is RDT-1B with DPM-Solver++ in 20 steps on ManiSkill. These are other, smaller policies of "
        "the same architecture: the same question, not the same experiment. S counts the updates of each block, the first step "
        "among them; with S = 1 BAC, Uniform and action costs are one and the same schedule, every block at the first step. The "
        "paper says no n for RDT; here it is 3, as the paper has it on DDIM."
    )
    return Document(
        "RDT: the paper's figure, rolled out again",
        (
            *([QUICK] if any(item.quick for item in suites) else []),
            made_from("suite rdt", command),
            Paragraph(about),
            Section("In short", (Bullets(tuple(summary(suites))), *_all_tasks(suites))),
            *(_policy(item) for item in suites),
            Section("What this does not show", (Bullets(tuple(_limits(suites))),)),
        ),
    )


# ---- all policies


def _all_tasks(suites: Sequence[RdtSuite]) -> list[Block]:
    """The figure as a table: each method's difference on every task."""
    header = ["method", *(plain(item.task) for item in suites)]
    rows = [["full precision: its success", *(estimate(item.full.success, "{:.2f}") for item in suites)]]
    for names in shared(suites):
        differences = [item.differences[name] for item, name in zip(suites, names, strict=True)]
        shown = [(value.lossless, estimate(value, "{:+.2f}")) for value in differences]
        rows.append(
            [plain(method_named(names[0]).label), *(f"**{text}**" if lossless else text for lossless, text in shown)]
        )
    about = "Paired difference of the score to full precision, 95 % intervals; **lossless** ones are bold."
    return [Paragraph(about), table(header, rows)]


# ---- one policy


def _policy(suite: RdtSuite) -> Section:
    results, timings = suite.item.results, suite.timings
    fingerprint = results.policy["fingerprint"]
    widths, sampler = fingerprint["widths"] or {}, fingerprint["sampler"] or {}
    run = [
        plain(suite.item.suite.about),
        f"**Task** {plain(suite.task)}, at most {results.task['max_steps']} steps; success: {plain(results.task['success'])}. "
        + ("The score is success." if is_success(suite) else "The score is the task's own, from 0 to 1."),
        f"**Policy** `{results.policy['source']}`: {len(fingerprint['blocks'] or ())} blocks of width "
        f"{widths.get('width', '?')}, {fingerprint['steps']} steps of {plain(str(sampler.get('type', '?')))}; engine "
        f"{plain(suite.full.method.engine)}.",
        "**Commands** " + ", ".join(suite.commands) + ".",
        f"Seeds from {results.setting['first_seed']}, on which nothing was chosen; differences are paired, 95 % intervals. "
        "† is another sampler, which shares the initial noise.",
        f"*{AS_PRINTED}*: success over the first {TRIALS * EPISODES} episodes, as the paper prints it, in {TRIALS} groups of "
        f"{EPISODES}: mean and standard deviation over the groups. *GFLOP*: by formula, of the policy as the public code "
        f"computes it; *{IN_ENGINE}*: what is left of them there, where what does not change in a generation is done once.",
    ]
    if timings is not None:
        run.append(
            f"Milliseconds: {timings.setting}; {plain(timings.machine['processor'])}. *Over full* is the speed-up over full "
            "precision in the same engine."
        )
    picture = Figure(
        suite.picture,
        f"score against FLOPs on {suite.task}",
        "Paired difference of the score to full precision, 95 % intervals. Further left is cheaper, higher is better.",
    )
    return Section(
        plain(suite.task),
        (
            Bullets(tuple(run)),
            picture,
            *_exact(suite),
            who_wins(suite),
            *_no_dearer(suite),
            *suite_tables(suite.item, _COLUMNS, timings, lambda method: _more(suite, method)),
        ),
    )


def _more(suite: RdtSuite, method: str) -> Mapping[str, str]:
    trials = as_printed(suite.item.results.of(method))
    left = None if suite.exact is None else suite.exact.flops.get(method)
    return {
        AS_PRINTED: "" if trials is None else f"{trials[0]:.2f} ± {trials[1]:.2f}",
        IN_ENGINE: "" if left is None else f"{left / 1e9:.3f}",
    }


def as_printed(records: Mapping[int, Record]) -> tuple[float, float] | None:
    """Mean and standard deviation of the success over three trials of 25 episodes: the first ones, by seed. None where some
    of them are missing or failed."""
    first = [records[seed].success for seed in sorted(records)[: TRIALS * EPISODES]]
    if len(first) < TRIALS * EPISODES or None in first:
        return None
    trials = np.array(first, dtype=float).reshape(TRIALS, EPISODES).mean(axis=1)
    return float(trials.mean()), float(trials.std(ddof=1))


def _exact(suite: RdtSuite) -> list[Block]:
    """The engine by itself: the plain policy, which projects keys and values at every step, beside the full one here."""
    if suite.exact is None:
        return []
    full, over, left = suite.full, suite.over(BASELINE, PLAIN), suite.exact.flops[BASELINE]
    own = ["plain policy, torch", f"{full.method.flops / 1e9:.3f}", shown_ms(suite.timings, PLAIN), "", ""]
    ours = [f"full precision, {plain(full.method.engine)}", f"{left / 1e9:.3f}", shown_ms(suite.timings, BASELINE)]
    ours += ["" if over is None else f"{over:.1f}x", f"{suite.exact.largest_difference:.1e}"]
    about = (
        "No block is skipped and nothing is approximated. The conditions do not change within a generation, so the engine projects "
        f"them to keys and values once: that leaves {left / full.method.flops:.0%} of the FLOPs here. The "
        "rest of its speed is the engine's own: it runs no Python."
    )
    columns = ["every block at every step", "GFLOP", "ms", "over plain", "largest difference of an action"]
    return [Section("The engine alone", (Paragraph(about), table(columns, [own, ours])))]


def _no_dearer(suite: RdtSuite) -> list[Block]:
    if suite.exact is None or not suite.cheaper_pairs:
        return []
    about = (
        "By formula keys and values count at every use, and here they are projected once, so what is equal by formula need not "
        "be equal in the engine. Beside each BAC schedule the solver with the most steps that costs no more there."
    )
    shown = rivals(suite, suite.cheaper_pairs, suite.exact.flops)
    return [Section("At no more FLOPs in the engine", (Paragraph(about), *shown))]


# ---- what it does not show


def _limits(suites: Sequence[RdtSuite]) -> list[str]:
    prints = [item.item.results.policy["fingerprint"] for item in suites]
    own = "; ".join(dict.fromkeys(map(_size, prints)))
    compared = [difference for item in suites for difference in item.differences.values()]
    half = [(value.high - value.low) / 2 for value in compared if np.isfinite(value.low)]
    items = [
        f"RDT-1B itself has {REAL_BLOCKS} blocks of width {REAL_WIDTH} and {REAL_IMAGE_TOKENS} image tokens, made from camera "
        f"frames; the policies here have: {own}. What is saved exactly grows with the image tokens.",
        f"{len(compared)} comparisons with a full policy are made and nothing is corrected for that many looks.",
    ]
    if half:
        items.append(
            f"Half the width of the intervals is about {np.median(half):.3f}: smaller differences cannot be seen."
        )
    counts = {item.full.score.n for item in suites if is_success(item) and item.full.score}
    return [*items, *map(_what_lossless_takes, sorted(counts))]


def _size(fingerprint: Mapping[str, Any]) -> str:
    widths = fingerprint["widths"] or {}
    blocks = f"{len(fingerprint['blocks'] or ())} blocks of width {widths.get('width', '?')}"
    return f"{blocks}, {widths.get('img_tokens', '?')} image tokens"


def _what_lossless_takes(pairs: int) -> str:
    """How many more pairs may be lost than won, where a score is 0 or 1."""
    lost = 0
    while lost < pairs and difference_interval([-1.0] * lost + [0.0] * (pairs - lost), of_successes=True).lossless:
        lost += 1
    if lost == 0:
        return f"Over {pairs} successes and failures nothing can be shown to be lossless, not even a method that loses no pair."
    return (
        f"Over {pairs} successes and failures *lossless* is a hard word: a method that loses {lost} pair{'s' if lost > 1 else ''} "
        "and wins none is not shown to be."
    )

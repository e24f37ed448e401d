"""docs/generated/paper-tables.md: the paper's tables beside those made here, policy by policy, and when BAC costs nothing.

From the files of suites, and of checkpoints, only. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import Estimate, difference_interval, mean_interval, rank_correlation
from blockcache.report.document import Block, Bullets, Document, Paragraph, Section, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, estimate, lossless, of_full
from blockcache.results.rollouts import BASELINE
from blockcache_lab.pages.policy_table import PolicyTable, difference_at, scores_at
from blockcache_lab.pages.protocol import TrainingRuns, protocol_table
from blockcache_lab.pages.published import PLACES, printed_cell
from blockcache_lab.pages.suite_parts import QUICK, made_from, verdict
from blockcache_lab.studies.suites import BASE, TUNED


def page(policies: Sequence[PolicyTable], runs: Sequence[TrainingRuns] = ()) -> Document:
    """The paper's tables beside the figures of these policies.

    Args:
        policies: Each with the files of its suites, in the order of the page.
        runs: Training runs with their last checkpoints, for the paper's protocol.
    """
    directories = " ".join(
        [*(policy.directory for policy in policies), *(f"--checkpoints {one.directory}" for one in runs)]
    )
    quick = [QUICK] if any(policy.first.suite.quick for policy in policies) else []
    checkpoints = Paragraph(
        "Several training seeds; of each run the best of its last checkpoints and their mean, as the paper prints them, by\n"
        "`blockcache paper checkpoints`."
    )
    protocol = [Section("By the paper's protocol", (checkpoints, protocol_table(runs)))] if runs else []
    about = Paragraph(
        "The paper prints two figures, labelled as the best and the mean of the last 10 checkpoints of three training seeds,\n"
        "on demonstrations by people; measured here is one policy each, on demonstrations by scripted experts where the task is not\n"
        "Push-T. So the figures in a line tell of different policies; the differences to full precision are what to compare.\n"
        "Differences are paired, with 95 % intervals. Lossless: the interval's lower end is above -0.03."
    )
    return Document(
        "The paper's tables beside what was measured here",
        (
            made_from("suites and checkpoints", f"blockcache paper tables {directories}"),
            *quick,
            about,
            Section("When BAC is free", (Bullets(tuple(findings(policies))),)),
            Section("Cell by cell", (_cells(policies),)),
            *protocol,
            Section("Rivals at the FLOPs of BAC S = 10, n = 5, or fewer", (_rivals(policies),)),
            Section("Trained with dropout, and without", tuple(_dropout(policies))),
            Section("How the files were made", (Bullets(tuple(_commands(policies))),)),
        ),
    )


def _commands(policies: Sequence[PolicyTable]) -> list[str]:
    return [f"`{item.command(policy.directory)}`" for policy in policies for item in policy.suites]


def findings(policies: Sequence[PolicyTable]) -> list[str]:
    """Three sentences: where BAC is free, what dropout changes, what goes with a loss."""
    known = [(policy, policy.loss) for policy in _each_once(policies) if policy.loss is not None]
    free = [policy.label for policy, loss in known if loss.lossless]
    lost = [f"{policy.label} ({loss.mean:+.3f})" for policy, loss in known if loss.high < 0]
    open_ = [policy.label for policy, loss in known if not loss.lossless and loss.high >= 0]
    sentences = [
        f"**Where**: BAC S = 10, n = 5 is lossless on {len(free)} of {len(known)} policies ({_listed(free)}), loses on "
        f"{len(lost)} ({_listed(lost)}), and on {len(open_)} neither is shown ({_listed(open_)})."
    ]
    sentences.append(f"**Dropout**: {_of_dropout(_pairs(policies))}.")
    losses = [-loss.mean for _, loss in known]
    found = [policy for policy, _ in known]
    goes_with = _ranks(
        losses,
        {
            "action error": [policy.first.rows[BASE].method.error.mean for policy in found],
            "how much rougher its actions are": [policy.rougher or 1.0 for policy in found],
            "the score of full precision": [policy.first.rows[BASELINE].score.mean for policy in found],  # type: ignore[union-attr]
        },
    )
    seen = [
        (policy.facts.features[BASE], -loss.mean)
        for policy, loss in known
        if policy.facts and BASE in policy.facts.features
    ]
    names = {
        "its centre shift": "shift",
        "what it adds to their roughness": "rougher",
        "the policy's own spread": "own_spread",
        "the policy's own roughness": "own_roughness",
    }
    looked_at = _ranks(
        [loss for _, loss in seen], {name: [getattr(one, key) for one, _ in seen] for name, key in names.items()}
    )
    if goes_with:
        over = f"; over the {len(seen)} whose actions were looked at, with {looked_at}" if looked_at else ""
        sentences.append(
            f"**What goes with it**: over {len(known)} policies, the rank correlation of BAC's loss with {goes_with}{over}."
        )
    return sentences


def _ranks(losses: Sequence[float], columns: Mapping[str, Sequence[float]]) -> str:
    """Rank correlations of losses with each column that varies; nothing of fewer than three policies."""
    if len(losses) < 3 or len(set(losses)) == 1:
        return ""
    shown = ((name, values) for name, values in columns.items() if len(set(values)) > 1)
    return ", ".join(f"{name} {rank_correlation(values, losses):+.2f}" for name, values in shown)


def _each_once(policies: Sequence[PolicyTable]) -> list[PolicyTable]:
    """Of a policy that two suites know, the file with more episodes under BAC."""
    most: dict[tuple[str, str, float], PolicyTable] = {}
    for policy in policies:
        key = policy.task, policy.first.results.policy["fingerprint"]["weights"], policy.dropout or 0.0
        if key not in most or len(policy.first.scores(BASE)) > len(most[key].first.scores(BASE)):
            most[key] = policy
    return [policy for policy in policies if policy in most.values()]


def _of_dropout(pairs: Sequence[tuple[str, PolicyTable, PolicyTable]]) -> str:
    """What it changes task by task and over all of them, and what it does to the actions that BAC changes."""
    changes = [(task, found) for task, none, some in pairs if (found := _changes(none, some))]
    if not changes:
        return "no task has policies with it and without"
    each = [f"{plain(task)} {_mean_change(found).text('{:+.3f}')}" for task, found in changes]
    every = _mean_change([change for _, found in changes for change in found])
    real = (
        "less is lost with it"
        if every.low > 0
        else "more is lost with it"
        if every.high < 0
        else "no difference is shown"
    )
    together = (
        f"; all episodes together {every.text('{:+.3f}')}: {real}, of one training seed each"
        if len(changes) > 1
        else ""
    )
    facts = [
        (before.features[BASE], after.features[BASE])
        for _, none, some in pairs
        for before, after in [(none.facts, some.facts)]
        if before is not None and after is not None and BASE in before.features and BASE in after.features
    ]
    shifts, rougher = (
        sum(getattr(after, name) < getattr(before, name) for before, after in facts) for name in ("shift", "rougher")
    )
    looks = f". With it BAC's centre shift is smaller on {shifts} of {len(facts)} tasks, what it adds to the roughness on {rougher}"
    return f"what BAC costs with dropout in training, less what it costs without: {_listed(each)}{together}{looks if facts else ''}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _cells(policies: Sequence[PolicyTable]) -> Block:
    rows = []
    for policy in policies:
        for item, cell in policy.printed:
            for place in PLACES.get(policy.task, ()):
                assert cell.printed is not None
                if figures := printed_cell(cell.printed, place):
                    scores = list(scores_at(item, cell.method, place).values())
                    difference = difference_at(item, cell.method, place)
                    rows.append(
                        [
                            policy.label,
                            place.cell.replace("_", " "),
                            f"{_TABLES[cell.printed.split('/')[0]]}: {cell.printed.split('/', 1)[1]}",
                            method_named(cell.method).label,
                            " / ".join(f"{value:.2f}" for value in figures),
                            str(len(scores)),
                            estimate(mean_interval(scores) if scores else None, "{:.2f}"),
                            estimate(difference, "{:+.3f}"),
                            lossless(difference),
                        ]
                    )
    header = ["policy", "cell", "printed as", "method here", "printed", "n", "measured, 95 %", DIFFERENCE, "lossless"]
    return table(header, rows, left=4)


_TABLES = {
    "main": "main table",
    "n_sweep_s10": "n with S = 10",
    "s_sweep_n3": "S with n = 3",
    "metrics_s10_n5": "metrics",
    "ddim_k40": "DDIM",
}
"""The paper's tables, as the page calls them."""


def _rivals(policies: Sequence[PolicyTable]) -> Block:
    rows = []
    for policy in policies:
        full = policy.first.rows[BASELINE].method.flops
        rivals = [cell.method for cell in policy.first.suite.cells if cell.equals == BASE or cell.section == TUNED]
        for method in (BASE, *rivals):
            against = None if method == BASE else policy.first.compare(BASE, method)
            difference = policy.first.compare(method, BASELINE)
            rows.append(
                [
                    policy.label,
                    method_named(method).label,
                    of_full(policy.first.rows[method].method.flops, full),
                    estimate(policy.first.rows[method].score, "{:.3f}"),
                    estimate(difference, "{:+.3f}"),
                    lossless(difference),
                    estimate(against, "{:+.3f}"),
                    "" if against is None else _WINNER.get(verdict(against), "not told apart"),
                ]
            )
    return table(["policy", "method", "FLOPs", SCORE, DIFFERENCE, "lossless", "BAC - this, 95 %", "wins"], rows, left=2)


_WINNER = {"better": "**BAC**", "worse": "**this**"}


def _dropout(policies: Sequence[PolicyTable]) -> list[Block]:
    pairs = _pairs(policies)
    if not pairs:
        return [Paragraph("No task has policies with it and without.")]
    rows = []
    for task, none, some in pairs:
        for policy in (none, some):
            features = policy.facts.features.get(BASE) if policy.facts else None
            rows.append(
                [
                    plain(task),
                    f"{policy.dropout:g}",
                    estimate(policy.first.rows[BASELINE].score, "{:.3f}"),
                    estimate(policy.loss, "{:+.3f}"),
                    estimate(_change(none, some), "{:+.3f}") if policy is some else "",
                    " to ".join(f"{policy.first.rows[name].jerk or 0:.3f}" for name in (BASELINE, BASE)),
                    "" if features is None else f"{features.own_roughness:.3f}",
                    "" if features is None else f"{features.rougher:+.3f}",
                    "" if features is None else f"{features.shift:.3f}",
                ]
            )
    header = ["task", "dropout", "score of full, 95 %", "BAC's difference, 95 %", "change by dropout, 95 %"]
    header += ["jerk of episodes, full to BAC", "roughness of full", "added by BAC", "centre shift by BAC"]
    about = (
        "The same demonstrations, steps and episodes. The change is that of BAC's difference, episode by episode. Roughness\n"
        "(mean second difference of executed actions) and centre shift are at recorded observations, in normalised units."
    )
    return [Paragraph(about), table(header, rows, left=2)]


def _pairs(policies: Sequence[PolicyTable]) -> list[tuple[str, PolicyTable, PolicyTable]]:
    """Of each task that has both: a policy without dropout, and one with."""
    none = {policy.task: policy for policy in policies if policy.dropout == 0}
    return [(policy.task, none[policy.task], policy) for policy in policies if policy.dropout and policy.task in none]


def _change(none: PolicyTable, some: PolicyTable) -> Estimate | None:
    """BAC's difference with dropout less that without, paired by episode."""
    changes = _changes(none, some)
    return _mean_change(changes) if changes else None


def _changes(none: PolicyTable, some: PolicyTable) -> list[float]:
    """The same of each episode; nothing where episodes ended once they sufficed, as they then are not alike in number."""
    if none.first.stopped or some.first.stopped:
        return []
    lost = [
        {seed: score - full[seed] for seed, score in policy.first.scores(BASE).items() if seed in full}
        for policy in (none, some)
        for full in [policy.first.scores(BASELINE)]
    ]
    return [lost[1][seed] - lost[0][seed] for seed in lost[0] if seed in lost[1]]


def _mean_change(changes: Sequence[float]) -> Estimate:
    return difference_interval(changes, of_successes=False)

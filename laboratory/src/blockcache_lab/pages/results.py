"""docs/generated/results.md, from the files of `blockcache paper suite` only. Every verdict is computed; none is written down here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS
from blockcache.report.document import Block, Bullets, Document, Figure, Folded, Paragraph, Section, Table, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, estimate
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.samplers import SamplerConfig
from blockcache.samplers import table as sampler_table
from blockcache_lab.pages.other_policies import TaskPolicies, other_policies
from blockcache_lab.pages.published import Printed, full_gflops, printed_table
from blockcache_lab.pages.suite_parts import QUICK, REFERENCE, made_from, suite_tables, verdict, who_wins
from blockcache_lab.studies.suite_results import Collection, SuiteResults

PICTURE = "results-tradeoff.png"
_COLUMNS = ["method", "n", SCORE, DIFFERENCE, "lossless", "success", "won/lost (p)", "GFLOP", "of full", REFERENCE]
_COLUMNS += ["ms", "over full", "action error"]
_NOTES = {  # on the printed tables
    "main": "Printed Uniform(fast) fits S = 20; 2.72 G of Uniform(fastest) fits no whole S: here it has the FLOPs of BAC S = 10.",
    "s_sweep_n3": "This sweep is printed with n = 3; here it has n = 5.",
    "n_sweep_s10": "n = 5 is printed as faster than n = 3 although it computes more.",
}


def page(collection: Collection, directory: str, others: Sequence[TaskPolicies] = ()) -> Document:
    """The whole page. Its picture lies beside it.

    Args:
        collection: The suites of the policy that the page is about.
        directory: Where their files were, for the command.
        others: Suite main of further policies, if any.
    """
    directories = " ".join([directory, *(place for task in others for place in task.directories)])
    picture = Figure(
        PICTURE,
        "score against FLOPs and against milliseconds",
        "Paired difference of the score to the full policy with its 95 % interval; the right-hand scale adds the full policy's\n"
        "mean. BAC has n = 5, on DDIM-40 n = 3. Points of one kind are joined; further left is cheaper, higher is better. Hollow\n"
        "points are of fewer episodes, so their place beside the others is less certain than their intervals say.",
    )
    return Document(
        "Results: does the robot still do its job?",
        (
            *([QUICK] if collection.quick else []),
            made_from("the suites", f"blockcache paper results {directories}"),
            Section("What was run", tuple(_what_was_run(collection, directory))),
            Section("In one picture", (picture,)),
            who_wins(collection),
            *([other_policies(others)] if others else []),
            *(_suite(collection, item) for item in collection.suites.values()),
            Section("What this does not show", (Bullets(tuple(_limits(collection, others))),)),
        ),
    )


# ---- what was run


def _what_was_run(collection: Collection, directory: str) -> list[Block]:
    results = collection.first
    setting, fingerprint = results.setting, results.policy["fingerprint"]
    sampler, widths = fingerprint["sampler"], fingerprint["widths"] or {}
    seeds = [record.seed for item in collection.suites.values() for record in item.results.records]
    engines: dict[str, list[str]] = {}
    for name, row in collection.rows.items():
        engines.setdefault(row.method.engine, []).append(name)
    usual = max(engines, key=lambda engine: len(engines[engine]))
    others = [
        f"{method_named(name).label} ({engine})" for engine in engines if engine != usual for name in engines[engine]
    ]
    items = [
        f"**Task** {plain(results.task['name'])}, at most {results.task['max_steps']} steps; success: {plain(results.task['success'])}.",
        f"**Policy** `{results.policy['source']}`: {len(fingerprint['blocks'] or ())} blocks of width "
        f"{widths.get('width', '?')}, {fingerprint['steps']} {str((sampler or {}).get('type', '?')).upper()} steps, weights "
        f"`{str(fingerprint['weights'])[:12]}`.",
        f"**Rollouts** on test seeds {min(seeds)} to {max(seeds)}, in batches of {setting['group']}; how many of them a method "
        "has stands in its row (n). Seeds and noise are the same for every method, so differences are taken pair by pair. "
        "Noise is keyed by seed, chunk and step; methods marked † have another sampler and share the initial noise only.",
        f"**Calibration** on {setting['calibration']['generations']} generations, observed on other seeds than the test's.",
        f"**Engine** {usual}"
        + (f", except for {', '.join(others)}, whose times are that engine's" if others else "")
        + ".",
    ]
    if collection.timings is None:
        items.append(
            f"**Timing** is missing; `blockcache paper timing {results.policy['source']} -o {directory}` measures it."
        )
    else:
        timings = collection.timings
        untouched = timings.ms(PLAIN)
        items.append(
            f"**Timing**: {timings.setting}, medians of {timings.rounds} rounds, on {plain(timings.machine['processor'])} (not a GPU)"
            + _load(timings.machine)
            + (". " if untouched is None else f". The plain policy in torch takes {untouched:.0f} ms. ")
            + f"*Over full* is the speed-up over full precision in blockcache's own engine ({collection.full.method.engine}), so it is "
            "what the method alone brings where it runs in the same engine."
        )
    blocks: list[Block] = [Bullets(tuple(items)), _suite_list(collection, directory)]
    if collection.missing:
        source, names = results.policy["source"], ", ".join(collection.missing)
        commands = ", ".join(f"`blockcache paper suite {name} {source} -o {directory}`" for name in collection.missing)
        blocks.append(Paragraph(f"**Not run yet**, so missing below: {names}. To run them: {commands}."))
    terms = [
        f"*Lossless* means one thing here: the lower end of the 95 % interval of the paired difference is above {LOSSLESS}.",
        "Intervals are bootstrap percentiles over rollouts; where all scores are 0 or 1, Wilson's for rates, and for differences one",
        "won and one lost pair are drawn too, as what was never seen is not ruled out. *Won/lost* counts pairs in which only this method, or only the full",
        "policy, succeeded, with the exact McNemar p. GFLOP are those of one chunk, by formula. *Action error*: open loop, executed",
        f"slice, normalised units; two full runs with different noise differ by {results.noise_floor.mean:.3f}.",
    ]
    printed = [
        "*Beside the paper*: its cells are success rates as printed; where there are two, they are labelled maximum / average of the",
        "last ten checkpoints (three training seeds), but the first is mostly the smaller, so the labels look swapped. **Averages are",
        "recomputed from the cells**, as some printed ones do not follow from them. Its speed is wall-clock on one RTX 4090D. Beside it",
        "stands what was measured here, with another policy, other seeds and a CPU: the same question, not the same experiment.",
    ]
    return [*blocks, Paragraph("\n".join(terms)), Paragraph("\n".join(printed))]


def _suite_list(collection: Collection, directory: str) -> Table:
    rows = []
    for name, item in collection.suites.items():
        counts = " or ".join(map(str, item.rollouts))
        rows.append([name, str(len(item.rows)), counts, str(item.results.failed), f"`{item.command(directory)}`"])
    return table(["suite", "methods", "n", "failed", "command"], rows)


# ---- one suite


def _suite(collection: Collection, item: SuiteResults) -> Section:
    suite = item.suite
    blocks: list[Block] = [Paragraph(suite.about), *suite_tables(item, _COLUMNS, collection.timings)]
    if suite.reference:
        blocks.append(_against_reference(item, suite.reference))
    return Section(f"Suite {suite.name}", (*blocks, _beside_the_paper(collection, item), *_first_and_rest(item)))


def _against_reference(item: SuiteResults, reference: str) -> Paragraph:
    found: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
    for name in item.suite.methods:
        difference = None if name == reference else item.compare(name, reference)
        if difference is not None:
            found[verdict(difference)].append(method_named(name).label)
    verdicts = "; ".join(f"**{verdict}** {', '.join(names) or 'none'}" for verdict, names in found.items())
    return Paragraph(f"Against {method_named(reference).label}: {verdicts}.")


def _load(machine: Mapping[str, Any]) -> str:
    """How busy the machine was, with what was timed, where it says so."""
    load = machine.get("load_average")
    return "" if load is None else f", load {load[0]:.1f} on {machine['cores']} cores in the last minute"


def _first_and_rest(item: SuiteResults) -> list[Section]:
    """Whether the episodes that all methods met are like the others, for the methods that met more."""
    few, seeds = item.rollouts[0], sorted(item.results.of(BASELINE))
    first, rest = seeds[:few], seeds[few:]
    if len(rest) < few:
        return []
    rows = [["full precision: its score", *(estimate(item.mean(BASELINE, part), "{:.3f}") for part in (first, rest))]]
    rows += [
        [method_named(name).label, *(estimate(item.compare(name, BASELINE, part), "{:+.3f}") for part in (first, rest))]
        for name, row in item.rows.items()
        if row.difference is not None and row.difference.n > few
    ]
    header = [DIFFERENCE, f"the first {len(first)} episodes", f"the other {len(rest)}"]
    about = f"Methods with n = {few} met the first {few} episodes only. Those that met more show how far to trust such figures."
    return [Section("Are the first episodes like the others?", (Paragraph(about), table(header, rows)))]


def _beside_the_paper(collection: Collection, item: SuiteResults) -> Block:
    ours = {cell.printed: cell.method for cell in item.suite.cells if cell.printed}
    blocks: list[Block] = []
    for name in dict.fromkeys(str(place).split("/", 1)[0] for place in ours):
        rows = {place.split("/", 1)[1]: method for place, method in ours.items() if place.startswith(f"{name}/")}
        blocks += _printed(collection, item, name, rows)
    if not blocks:
        return Paragraph("The paper shows this comparison in a figure without numbers.")
    return Section("Beside the paper", tuple(blocks))


def _printed(collection: Collection, item: SuiteResults, name: str, ours: dict[str, str]) -> list[Block]:
    """The printed table, one for each group of tasks, with the figures measured here beside the first group's."""
    baseline = "ddim-40" if name == "ddim_k40" else BASELINE  # of FLOPs and speed, as in the printed table
    blocks: list[Block] = []
    for group, rows in printed_table(name).items():
        tasks = list(next(iter(rows.values())).cells)
        header = [group, *(task.replace("_", " ") for task in tasks), "average", "GFLOP", "speed"]
        body = [_printed_row(row, value) for row, value in rows.items()]
        if blocks:
            blocks.append(Folded(f"printed, {group}", (table(header, body),)))
        else:
            header += [
                f"**measured, {plain(item.results.task['name'])}**",
                "GFLOP",
                f"over {method_named(baseline).label}",
            ]
            body = [cells + _ours(collection, item, ours.get(cells[0]), baseline) for cells in body]
            blocks += [table(header, body), *([Paragraph(_NOTES[name])] if name in _NOTES else [])]
    return blocks


def _printed_row(name: str, row: Printed) -> list[str]:
    cells = [" / ".join(f"{value:.2f}" for value in cell) for cell in (*row.cells.values(), row.average)]
    flops = "" if row.gflops is None else f"{row.gflops:.2f} (1/{full_gflops() / row.gflops:.1f})"
    return [name, *cells, flops, "" if row.speed is None else f"{row.speed:.2f}x"]


def _ours(collection: Collection, item: SuiteResults, method: str | None, baseline: str) -> list[str]:
    if method is None:
        return ["", "", ""]
    row, flops = item.rows[method], item.rows[baseline].method.flops
    over = collection.over(method, baseline)
    score = "" if row.score is None else f"{method_named(method).label}: {row.score.mean:.3f}"
    share = f"{row.method.flops / 1e9:.2f} (1/{flops / row.method.flops:.1f})"
    return [score, share, "" if over is None else f"{over:.1f}x"]


# ---- what it does not show


def _limits(collection: Collection, others: Sequence[TaskPolicies]) -> list[str]:
    widths: dict[int, list[float]] = {}
    for difference in collection.differences.values():
        if math.isfinite(difference.low):
            widths.setdefault(difference.n, []).append((difference.high - difference.low) / 2)
    seen = "; ".join(f"with n = {n} about {sorted(found)[len(found) // 2]:.3f}" for n, found in sorted(widths.items()))
    compared = len(collection.differences) + sum(len(task.cells) - 1 for task in others)
    starts = {name: row.method.sampler for name, row in collection.rows.items() if not row.method.shares_all_noise}
    items = [
        f"{plain(collection.first.task['name'])} with one set of weights"
        + "".join(f", {plain(task.name)} with {len(task.policies)}" for task in others)
        + ". Another policy may fall otherwise; the paper itself says that a weak policy gets weaker.",
        f'"Not told apart" is not "equal". Half the width of the intervals is {seen}: smaller differences cannot be seen.',
        f"{compared} comparisons with a full policy are made and nothing is corrected for that many looks: of methods that are no "
        "different, about one in forty would still look worse.",
        "Times are of one CPU with one thread and batch 1; on a GPU, or with a larger policy, their order may change. FLOPs do not.",
    ]
    if starts:
        firsts = ", ".join(
            f"{method_named(name).label} at {_first_timestep(sampler)}"
            for name, sampler in starts.items()
            if "+" not in name
        )
        items.append(
            "Fewer steps are spaced as diffusers does by default, which does not always begin at the most noise "
            f"({firsts}, of {next(iter(starts.values()))['num_train_timesteps']} timesteps); another spacing may do better."
        )
    return items


def _first_timestep(sampler: Mapping[str, Any]) -> int:
    return int(sampler_table(SamplerConfig.from_dict(sampler)).timesteps[0])

"""Schedules as pictures: blocks by steps, updates as dots over the error, what the union added in another colour.

The error is the caching error where it was analysed, else one minus the similarity of what is reused and what would be
computed, where there is a recording. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from blockcache.block import FEED_FORWARD, kind_from_name
from blockcache.compare.methods import method_named
from blockcache.errors import BlockcacheError
from blockcache.report.chart import Axis, HeatMap, Marks, Panel
from blockcache.report.document import Block, Chart, Paragraph, Section, code, missing, plain, table
from blockcache.report.overview.sources import Shown, Sources
from blockcache.schedule.schedule import Schedule
from blockcache.solvers.explain import own_steps, reuse_error

MOST = 3
"""Schedules that are drawn, at most: those of a suite are many and look alike."""


def schedules_section(sources: Sources) -> Section:
    """All schedules that were given, then those that were analysed and those that the results hold."""
    analysed = [replace(one, origin=source.path) for source in sources.brought for one in source.value.schedules]
    found = [_with_error(one, analysed, sources) for one in _given(sources)]
    for group in (analysed, [_with_error(one, analysed, sources) for one in _from_results(sources)]):
        found += [one for one in group if not any(_same(one.schedule, other.schedule) for other in found)]
    if not found:
        return Section("Schedules", (missing("a schedule", "blockcache solve recording.safetensors -o schedule.json"),))
    blocks: list[Block] = [
        Paragraph(
            "One row a block, in execution order; one column a denoising step, the first on the left. A dot is an update: the block is computed. "
            "Everywhere else its last output is added again."
        )
    ]
    blocks += [_chart(number, one) for number, one in enumerate(found[:MOST], 1)]
    if all(one.errors is None for one in found[:MOST]):
        command = f"blockcache analyse {sources.typed} -o analysis.safetensors"
        blocks.append(missing("the errors behind the dots", command))
    if len(found) > MOST:
        left = ", ".join(plain(one.title) for one in found[MOST:])
        blocks.append(Paragraph(f"Not drawn, to keep the page short: {left}."))
    return Section("Schedules", tuple(blocks))


def _given(sources: Sources) -> Iterator[Shown]:
    for source in sources.schedules:
        origin = source.value.origin
        signs = {"updates": "S", "union": "n", "metric": "metric"}
        facts = [f"{sign} = {origin[key]}" for key, sign in signs.items() if key in origin]
        yield Shown(", ".join([str(origin.get("method", "schedule")), *facts]), source.path, source.value)


def _from_results(sources: Sources) -> Iterator[Shown]:
    """The schedules that methods ran by, the cheapest first of each kind, under the policy's own sampler first."""
    methods = [(row.method, method_named(row.method.name)) for row in sources.rows.values()]
    for run, method in sorted(methods, key=lambda pair: (not pair[0].shares_all_noise, pair[1].by_another_metric)):
        updates = (run.reuse or {}).get("updates")
        steps = run.sampler.get("num_inference_steps")
        if isinstance(updates, Mapping) and isinstance(steps, int) and not method.tuned_in:
            with contextlib.suppress(BlockcacheError):  # of a method that has no static schedule
                yield Shown(method.label, "results", Schedule(steps, updates))


def _with_error(one: Shown, analysed: Sequence[Shown], sources: Sources) -> Shown:
    """With the caching error where that schedule was analysed, else with what a recording tells."""
    for known in analysed:
        if _same(known.schedule, one.schedule):
            return replace(known, title=one.title, origin=one.origin)
    for recording in (source.value for source in sources.recordings):
        shape = tuple(block.name for block in recording.blocks), recording.steps
        if shape == (one.schedule.blocks, one.schedule.steps) and "cosine" in recording.matrices:
            what, own = "1 - similarity to what is reused", own_steps(recording, one.schedule)
            return replace(one, errors=reuse_error(recording, one.schedule), what=what, own=own)
    return one


def _same(one: Schedule, other: Schedule) -> bool:
    return one.steps == other.steps and dict(one.updates) == dict(other.updates)


def added_by_union(one: Shown) -> tuple[dict[str, set[int]], bool]:
    """By block, the steps that the union added, and whether that is certain.

    Where a block's own steps are not known, these are all steps of the union's blocks at which a feed-forward block behind
    them is computed: some may have been their own too.
    """
    updates, upstream = one.schedule.updates, one.schedule.origin.get("union_blocks")
    if one.own is not None:
        return {name: set(found) - set(one.own.get(name, ())) for name, found in updates.items()}, True
    if not isinstance(upstream, list):
        return {}, True
    behind: set[int] = set()
    added = {}
    for name in reversed(one.schedule.blocks):
        if name in upstream:
            added[name] = (set(updates[name]) & behind) - {0}
        if kind_from_name(name) == FEED_FORWARD:
            behind |= set(updates[name])
    return added, False


def _chart(number: int, one: Shown) -> Chart:
    schedule, steps = one.schedule, one.schedule.steps
    added, certain = added_by_union(one)
    places = {name: row for row, name in enumerate(schedule.blocks)}
    extra = tuple((places[name], step) for name, found in added.items() for step in sorted(found))
    own = tuple(
        (places[name], step)
        for name, found in schedule.updates.items()
        for step in found
        if step not in added.get(name, ())
    )
    union_name = "update, added by the union" if certain else "update, its own or added by the union"
    marks = [Marks("update", own)] + ([Marks(union_name, extra, "orange", "diamond")] if extra else [])
    errors = np.full((len(places), steps), np.nan) if one.errors is None else one.errors
    high = 1.0 if one.errors is None else float(np.quantile(errors, 0.99)) or 1.0
    heat = HeatMap(errors, one.what or "error", 0.0, high, tuple(marks), "reused")
    rows = [
        [
            plain(name),
            str(len(found)),
            str(len(added.get(name, ()))),
            f"{errors[places[name]].mean():.4f}" if one.errors is not None else "",
            f"{errors[places[name]].max():.4f}" if one.errors is not None else "",
            " ".join(f"{step}+" if step in added.get(name, ()) else str(step) for step in found),
        ]
        for name, found in schedule.updates.items()
    ]
    columns = ["block", "updates", "of the union", "mean error", "largest", "update steps (+: of the union)"]
    where = "" if one.origin == "results" else f" From {code(one.origin)}."
    error = "" if one.errors is None else f" The colour is the {one.what}, up to its 99th percentile."
    worst = "" if one.errors is None else f" The mean error is {errors.mean():.3f}, the largest {errors.max():.3f}."
    return Chart(
        f"schedule-{number}",
        plain(one.title),
        f"{len(places)} blocks by {steps} steps: {schedule.computed} updates, {len(extra)} of them of the union.{worst}",
        (Panel(Axis("step"), Axis("block", names=schedule.blocks), (heat,)),),
        table(columns, rows),
        f"{schedule.computed} of {len(places) * steps} block computations are done, {schedule.reused_share:.1%} are reused.{error}{where}",
    )  # fmt: skip

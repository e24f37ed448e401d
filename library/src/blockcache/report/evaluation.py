"""What `eval` and `demo` show of a run: tables and what their figures mean. Knows nothing of torch or of terminals."""

from __future__ import annotations

from collections.abc import Sequence

from blockcache.compare.methods import method_named
from blockcache.measure.action_error import ActionError
from blockcache.measure.statistics import Estimate
from blockcache.report.document import Block, Bullets, Paragraph, plain, table
from blockcache.report.methods import DIFFERENCE, SCORE, cells, estimate
from blockcache.results.rollouts import PLAIN, SETTLED, MethodRun, Results
from blockcache.results.stored import Stored
from blockcache.results.summary import summarise
from blockcache.results.timings import Timings

_CLOSED = ("method", "n", SCORE, DIFFERENCE, "success", "won/lost (p)", "noise")
_CLOCKED = {"stale": "{:.2f}", "held": "{:.1f}", "missed": "{:.1f}", "first_action": "{:.2f}", "action_hz": "{:.1f}"}
_COST = ("method", "engine", "GFLOP", "chunk Hz", "action error", "first action P95", "jerk", "jump")


def evaluation_blocks(results: Results, timings: Timings | None = None) -> tuple[Block, ...]:
    """An evaluation: how well the task is done, what it costs, and what the figures mean.

    Args:
        results: Of the rollouts. Methods go by the names that were typed.
        timings: Of the methods and the plain policy, if they were timed.
    """

    def hz(name: str) -> str:
        return "" if timings is None else f"{1 / timings.seconds[name].p50:.1f}"

    named = {row.method.name: row for row in summarise(results)}
    rows = [{**cells(row), "method": plain(name), "chunk Hz": hz(name)} for name, row in named.items()]
    floor, stopped = results.noise_floor, bool(results.setting.get(SETTLED))
    notes = [
        "Score and its paired difference with 95 % intervals."
        + (
            " Each method has as many pairs as its verdict took; the differences' intervals hold at any time." * stopped
        ),
        f"Success: {plain(results.task['success'])}. Won/lost counts pairs in which only this method, or only the full policy, "
        "succeeded; p is McNemar's.",
        "Noise: same as the full policy's in every step, or, with another sampler, at the start only.",
        "GFLOP per chunk, by formula. Action error: open loop, executed slice, normalised units, "
        f"{results.setting['open_loop_observations']} observations; two full runs with different noise differ by "
        f"{floor.mean:.3f} (first action, P95: {floor.first_p95:.3f}).",
        "Jerk and jump (between chunks) of the executed actions, in normalised units.",
    ]
    if timings is not None:
        notes.append(
            f"Chunk Hz: timed apart from the rollouts, batch 1, one torch thread, median of {timings.rounds} interleaved rounds; "
            f"the plain policy makes {hz(PLAIN)}."
        )
    clocked = clock_blocks(results) if results.clocked else ()
    return table(_CLOSED, rows), table(_COST, rows, left=2), *clocked, Bullets(tuple(notes))


def clock_blocks(results: Results) -> tuple[Block, ...]:
    """What rollouts on the clock were like, as means over a method's rollouts.

    Args:
        results: Of rollouts on the clock.
    """
    clock = results.setting["clock"]
    rows = []
    for method in results.methods:
        of = [item for item in results.clocked if item.method == method.name]
        waited = clock["latency"][method.name]
        rows.append(
            [
                plain(method.name),
                f"{waited['median_ms']:.0f}" if "median_ms" in waited else "live",
                *(_mean([getattr(item, name) for item in of], form) for name, form in _CLOCKED.items()),
            ]
        )
    told = ", each chunk told of the one before" if clock.get("rtc") else ""
    note = (
        f"On the clock: {clock['mode']}{told}, {clock['rate']:g} ticks a second, replanning after {clock['replan']}. Stale: the "
        "share of actions from before the newest observation that a chunk was asked for with. Held: ticks at which the last "
        "action was repeated. Missed: chunks that arrived after the one before had run out. Jump is that from chunk to chunk."
    )
    columns = ["method", "latency ms", "stale", "held", "missed", "first action s", "action Hz"]
    return table(columns, rows), Paragraph(note)


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(sum(known) / len(known)) if known else ""


def open_loop_blocks(methods: Sequence[MethodRun], floor: ActionError, timings: Timings) -> tuple[Block, ...]:
    """Speed and action errors of methods beside the plain policy.

    Args:
        methods: As they ran.
        floor: The error between two runs of the full policy with different noise.
        timings: Of these methods.
    """
    rows = [
        [
            "full precision" if row.name == PLAIN else row.name,
            row.engine,
            f"{timings.ms(row.name):.0f}",
            f"{timings.over(row.name, PLAIN):.1f}x",
            f"{row.flops / 1e9:.2f}",
            f"{row.reused:.0%}",
            "" if row.name == PLAIN else f"{row.error.mean:.3f}",
        ]
        for row in methods
    ]
    note = (
        "Action error: mean absolute difference to the full policy with the same noise, executed slice, normalised units. "
        f"Noise floor (two full runs, different noise): {floor.mean:.3f}. Medians of {timings.rounds} rounds: "
        f"{timings.setting}."
    )
    columns = ["method", "engine", "ms", "speed-up", "GFLOP", "reused", "action error"]
    return table(columns, rows, left=2), Paragraph(note)


def closed_loop_blocks(results: Results, timings: Timings, stored: Stored | None) -> tuple[Block, ...]:
    """A short comparison in the simulator.

    Args:
        results: Of the rollouts.
        timings: Of the methods and the plain policy.
        stored: Results that ship with the package, if they are of this policy and task.
    """
    rows = []
    for row in summarise(results):
        name = row.method.name
        before = stored.of(method_named(name).portable_name) if stored else None
        rows.append(
            {
                **cells(row),
                "method": method_named(name).label,
                "ms": f"{timings.ms(name):.0f}",
                "GFLOP": f"{row.method.flops / 1e9:.2f}",
                "speed-up": f"{timings.over(name, PLAIN):.1f}x",
                "score": "" if row.score is None else f"{row.score.mean:.3f}",
                DIFFERENCE: _counted(row.difference),
                "stored, 95 %": _counted(before.difference if before else None),
            }
        )
    columns = ["method", "engine", "ms", "speed-up", "GFLOP", "score", DIFFERENCE]
    columns += ["stored, 95 %"] if stored else []
    task, source, setting = plain(results.task["name"]), results.policy["source"], results.setting
    notes = [
        f"Mean score of {setting['rollouts']} rollouts on {task} (test seeds from {setting['first_seed']}); the same episodes "
        f"for all, so differences are paired. So few rollouts leave the intervals wide: `blockcache eval {source}` runs more. "
        f"Speed-up over the plain policy in torch, which takes {timings.ms(PLAIN):.0f} ms."
    ]
    if results.failed:
        notes.append(f"The simulator failed in {results.failed} rollouts, which are left out.")
    if any(method_named(name).tuned_in for name in timings.seconds):
        notes.append(
            "Tuned: what `blockcache tune` chose for this policy, another sampler than its own (tuning.json in its directory)."
        )
    if stored:
        notes.append(
            "Stored: not measured now but kept with the package, from `blockcache paper suite` on this very policy, calibrated on "
            f"{stored.calibration['generations']} generations (docs/generated/frontier.md)."
        )
    return table(columns, rows, left=2), *map(Paragraph, notes)


def _counted(value: Estimate | None) -> str:
    return "" if value is None else f"{estimate(value, '{:+.3f}')}, n = {value.n}"

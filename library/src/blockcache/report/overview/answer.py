"""The answer at the top of the page: how fast, at what loss, what was run, and what to type next. All computed."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from blockcache.compare.methods import method_named
from blockcache.measure.statistics import LOSSLESS, Estimate
from blockcache.report.document import Block, Bullets, Fact, Facts, Paragraph, code, plain
from blockcache.report.overview.sources import Source, Sources
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.tuning import Tuning


@dataclass(frozen=True)
class Answer:
    """What the files say is best.

    Args:
        name: The method's name in the results; empty where they do not have it.
        what: The method in words.
        why: How it came to be the best.
        next: Commands to go on with.
        ms, plain: Milliseconds a chunk, its own and the plain policy's, where they were timed.
        speed: How many times faster that is, in the same rounds where these are known.
        share: Of the full policy's FLOPs, where that is known.
        difference: Of the score to the full policy, where there were rollouts.
        loss: Of the score as it is predicted from the distance of the actions, where that was measured.
        promise: What is known of that predicted loss for certain.
        spread: Of the actions, as a share of the policy's own, where that was measured.
        notes: Sentences on what was not tried.
    """

    name: str
    what: str
    why: str
    next: tuple[str, ...]
    ms: float | None = None
    plain: float | None = None
    speed: float | None = None
    share: float | None = None
    difference: Estimate | None = None
    loss: float | None = None
    promise: str = ""
    spread: Estimate | None = None
    notes: tuple[str, ...] = ()


def find_answer(sources: Sources) -> Answer | None:
    """What was tuned, if that is known; else the fastest of the lossless methods, or what comes nearest to one; else what
    was checked, the method that is predicted to lose least."""
    if sources.tunings:
        return _tuned(sources, sources.tunings[0])
    if sources.rows:
        return _best(sources)
    return _checked(sources) if sources.checks else None


def answer_blocks(sources: Sources) -> tuple[Block, ...]:
    """The top of the page."""
    found = find_answer(sources)
    if found is None:
        return _without_results(sources)
    facts = [_speed(found), _loss(found)]
    if found.spread is not None:
        kept = f"{found.spread.mean:.0%}"
        facts.append(Fact(kept, "of the spread of the policy's actions is kept", _interval(found.spread, "{:.2f}")))
    if found.share is not None:
        less = f"1/{1 / found.share:.0f}"
        facts.append(Fact(less, "of the full policy's FLOPs", "by formula, over all denoising steps"))
    notes = tuple(f"{plain(note[0].upper() + note[1:])}." for note in found.notes if note.strip())
    return (
        Facts(tuple(facts)),
        Paragraph(f"**{plain(found.what)}.** {found.why} {_verdict(found)}"),
        *([Bullets(notes)] if notes else []),
        Paragraph(f"What was run: {_run(sources)}"),
        Paragraph("What to type next: " + ", or ".join(map(code, found.next)) + "."),
    )


def _speed(found: Answer) -> Fact:
    if found.ms is None:
        suite, engines = "`blockcache paper timing` times all methods of a suite", "`blockcache bench` times engines"
        return Fact("not timed", "speed", suite if found.name else engines)
    if found.speed is None or found.plain is None:
        return Fact(f"{found.ms:.1f} ms", "for one chunk of actions")
    note = f"{found.ms:.1f} ms for one chunk of actions instead of {found.plain:.0f} ms in plain torch"
    return Fact(f"{found.speed:.{0 if found.speed >= 10 else 1}f}x", "as fast as the plain policy", note)


def _loss(found: Answer) -> Fact:
    """As it was rolled out; where it was not, as it is predicted."""
    difference = found.difference
    if difference is None and found.loss is None:
        return Fact("not rolled out", "difference of the score", "`blockcache eval` runs pairs of rollouts")
    if difference is None:
        note = "from how far the actions are from the policy's own as distributions; not rolled out"
        note += f"; {plain(found.promise)}" * bool(found.promise)
        return Fact(f"{found.loss:.3f}", "predicted loss of the score", note)
    interval = _interval(difference, "{:+.3f}")
    note = f"{interval}{', ' * bool(interval)}{difference.n} pair{'s' * (difference.n > 1)} of rollouts"
    if found.loss is not None:
        note += f"; a loss of {found.loss:.3f} was predicted" + f", {plain(found.promise)}" * bool(found.promise)
    mean = Estimate(difference.mean, -math.inf, math.inf, 1).text("{:+.3f}")
    return Fact(mean, "difference of the score to the full policy", note)


def _interval(value: Estimate, form: str) -> str:
    if not math.isfinite(value.low):
        return ""
    return f"95 % interval {form.format(value.low)} to {form.format(value.high)}"


def _verdict(found: Answer) -> str:
    if found.difference is None:
        predicted = "" if found.loss is None else ": the loss is a prediction"
        return f"What it costs in the task was not measured{predicted}."
    ruled = "ruled out, which is called lossless here" if found.difference.lossless else "**not** ruled out"
    return f"A loss of {-LOSSLESS:g} of the score is {ruled}."


def _run(sources: Sources) -> str:
    parts = [
        f"{len(one.value.records)} rollouts of {len(one.value.methods)} methods on {plain(one.value.task['name'])}, the same episodes for "
        f"all, from seed {one.value.setting['first_seed']} ({code(one.path)})"
        for one in sources.results
    ]
    parts += [
        f"times on {plain(one.value.machine['processor'])} with {one.value.machine['cores']} cores: {plain(one.value.setting)} ({code(one.path)})"
        for one in sources.timings
    ]
    for tuned in sources.tunings:
        looked = tuned.value.setting.get("seconds")
        spent = f" in {looked / 60:.0f} minutes" if isinstance(looked, int | float) else ""
        parts.append(f"a tuning {plain(tuned.value.goal.text())}{spent} ({code(tuned.path)})")
    parts += [
        f"a check of {plain(one.value.name)} at {one.value.setting['observations']} observations, {one.value.setting['samples']} chunks each ({code(one.path)})"
        for one in sources.checks
    ]
    return "; ".join(parts) + "."


def _tuned(sources: Sources, source: Source[Tuning]) -> Answer:
    tuning, rows = source.value, sources.rows
    chosen, timed = tuning.chosen, sources.timed()
    name = next((name for name in rows if method_named(name).tuned_in), chosen.method)
    known = rows[name].difference if name in rows else None
    ms, plain_ms, speed = chosen.p50_ms, tuning.plain_ms, tuning.plain_ms / chosen.p50_ms
    if timed is not None and (own := timed.ms(name)) is not None and (whole := timed.ms(PLAIN)) is not None:
        ms, plain_ms, speed = own, whole, timed.over(name, PLAIN) or speed  # all of one run with the other methods
    full = rows[BASELINE].method.flops if BASELINE in rows else None
    looked = f"Of {len(tuning.points)} points that tuning looked at"
    met = "this is the best" if tuning.met else "this comes nearest to what was asked for, which was missed,"
    tuned = _tuned_policy(sources, source.path.removesuffix("tuning.json").rstrip("/") or ".")
    differences = [d for d in (known, tuning.fresh, chosen.rollouts) if d is not None]
    return Answer(
        name=name,
        what=f"{method_named(chosen.method).label}, {chosen.engine} engine",
        why=f"{looked}, {met} {plain(tuning.goal.text())}.",
        next=(f"blockcache export {tuned} -o policy.onnx", f"blockcache bench {tuned}"),
        ms=chosen.calls * ms,
        plain=plain_ms,
        speed=speed / chosen.calls,
        share=_share(round(chosen.calls * chosen.flops), full),
        difference=max(differences, key=lambda d: d.n, default=None),
        loss=chosen.loss,
        promise=chosen.promise,
        spread=chosen.distances.spread,
        notes=tuning.notes,
    )


def _tuned_policy(sources: Sources, directory: str) -> str:
    """What was tuned, in a command: the directory is the policy itself, unless only other code can load that."""
    said = [one.value.setting.get("holds_policy") for one in sources.tunings]
    whole = False not in said and ":" not in sources.name and sources.typed != "POLICY"
    return shlex.quote(directory) if whole else f"{sources.typed} --tuned {shlex.quote(directory)}"


def _share(flops: int, full: int | None) -> float | None:
    """Where a family does not say its FLOPs, they are 0."""
    return flops / full if flops and full else None


def _best(sources: Sources) -> Answer:
    rows, timed = sources.rows, sources.timed()
    compared = {name: row.difference for name, row in rows.items() if row.difference is not None}

    def cost(name: str) -> float:
        ms = timed.ms(name) if timed else None
        return rows[name].method.flops / 1e12 if ms is None else ms

    good = [name for name, difference in compared.items() if difference.lossless]
    if good:
        name = min(good, key=cost)
        why = f"The {'fastest' if timed else 'cheapest'} of {len(good)} lossless ones among {len(compared)} methods."
    else:
        name = max(compared, key=lambda name: compared[name].low, default=BASELINE)
        why = f"None of {len(compared)} methods is shown to be lossless; this one comes nearest."
    go_on = f"blockcache tune {sources.typed} --loss {-LOSSLESS:g}"
    if (tuned := method_named(name).tuned_in) is not None:
        go_on = f"blockcache export {_tuned_policy(sources, tuned)} -o policy.onnx"
    return Answer(
        name=name,
        what=method_named(name).label,
        why=why,
        next=(go_on,),
        ms=None if timed is None else timed.ms(name),
        plain=None if timed is None else timed.ms(PLAIN),
        speed=None if timed is None else timed.over(name, PLAIN),
        share=_share(rows[name].method.flops, rows[BASELINE].method.flops),
        difference=rows[name].difference,
    )


def _checked(sources: Sources) -> Answer:
    checks = [source.value for source in sources.checks]
    found = min(checks, key=lambda check: check.loss)
    among = f", which is the least of {len(checks)} that were checked" if len(checks) > 1 else ""
    clear = "" if found.clear else " The intervals reach over a threshold: more observations would tell."
    method = f" -m {shlex.quote(found.method['name'])}" if found.method["name"] else ""
    where = found.prediction.where
    return Answer(
        name="",
        what=f"{found.name}: {found.verdict}",
        why=f"Open loop, the {found.method['engine']} engine{among}.{clear}",
        next=(f"blockcache eval {sources.typed}{method}", f"blockcache tune {sources.typed} --loss {-LOSSLESS:g}"),
        share=_share(found.method["flops"], found.method["full_flops"]),
        loss=found.loss,
        promise=found.prediction.words,
        spread=found.distances.spread,
        notes=(f"the policy beside those that losses were learnt on: {where}",) if where else (),
    )


def _without_results(sources: Sources) -> tuple[Block, ...]:
    facts = [
        Fact(f"{one.value.reused_share:.0%}", "of block computations reused", f"by {code(one.path)}")
        for one in sources.schedules[:1]
    ]
    for bench in sources.benchmarks[:1]:
        best = max(bench.value["rows"], key=lambda row: row["speedup"])
        note = f"{plain(best['name'])}, {best['p50_ms']:.1f} ms a chunk"
        facts.append(Fact(f"{best['speedup']:.1f}x", f"as fast as {plain(bench.value['eager'])}", note))
    text = (
        f"These files do not say what the policy gains or loses: no rollouts and no tuning. {code(f'blockcache tune {sources.typed} --loss {-LOSSLESS:g}')} looks "
        f"for the fastest without a loss, {code(f'blockcache eval {sources.typed}')} compares methods in the simulator."
    )
    return (*([Facts(tuple(facts))] if facts else []), Paragraph(text))

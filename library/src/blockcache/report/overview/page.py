"""The whole page as a document: the answer first, then what it rests on, and the commands that made it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from blockcache.errors import BlockcacheError, entry_failure
from blockcache.report.check import check_blocks
from blockcache.report.clock import clock_section
from blockcache.report.document import Document, Paragraph, Section, code, plain, table
from blockcache.report.overview.answer import answer_blocks, find_answer
from blockcache.report.overview.front import front_section, latency_section
from blockcache.report.overview.schedules import schedules_section
from blockcache.report.overview.sources import Source, Sources
from blockcache.results.check import Check
from blockcache.results.rollouts import BASELINE, Results
from blockcache.results.tuning import Tuning
from blockcache.schedule.schedule import Schedule


def page(sources: Sources) -> Document:
    """What the files say, from the answer on; a section without its files says which command would fill it.

    Args:
        sources: Everything that was read of one policy.
    """
    on = f" on {plain(sources.task)}" if sources.task and sources.task != sources.name else ""
    return Document(
        f"{plain(sources.name)}{on}: what caching gains, and what it costs",
        (
            *answer_blocks(sources),
            schedules_section(sources),
            *_checks(sources),
            front_section(sources, find_answer(sources)),
            latency_section(sources),
            *clock_section(sources.clocked),
            *_brought(sources),
            _origins(sources),
        ),
    )


def _checks(sources: Sources) -> list[Section]:
    """How far the actions of each method that was checked are from the policy's own, without a simulator."""
    found = [
        Section(plain(one.value.name), (*check_blocks(one.value), Paragraph(f"From {code(one.path)}.")))
        for one in sources.checks
    ]
    return [Section("Without a simulator: how far the actions are off", tuple(found))] if found else []


def _brought(sources: Sources) -> list[Section]:
    """Sections that installed packages bring: each entry of `blockcache.sections` is a function of the sources."""
    points = sorted(entry_points(group="blockcache.sections"), key=lambda point: point.name)
    sections: list[Section] = []
    for point in points:
        try:
            sections += point.load()(sources)
        except BlockcacheError:
            raise
        except Exception as error:  # a page is not lost by a package that is broken
            said = plain(entry_failure("section", point, error))
            sections.append(Section(plain(point.name), (Paragraph(f"{said}."),)))
    return sections


def _origins(sources: Sources) -> Section:
    """Every file, and what made it: what was typed, where the file says so."""
    policy = sources.typed
    results = (*sources.results, *sources.clocked)
    timed = {os.fspath(Path(one.path).with_suffix(".timings.json")): _evaluation(one) for one in results}
    tuned = {os.path.dirname(one.path): _tuning(one.value, policy) for one in sources.tunings}
    calibrated = f"blockcache calibrate {policy}"

    def solved(one: Source[Schedule]) -> str:
        return tuned.get(os.path.dirname(one.path), "blockcache solve")

    made: list[tuple[str, tuple[Source[Any], ...], Callable[[Source[Any]], str]]] = [
        ("results", results, _evaluation),
        ("timings", sources.timings, lambda one: timed.get(one.path, f"blockcache paper timing {policy}")),
        ("tuning", sources.tunings, lambda one: _tuning(one.value, policy)),
        ("check", sources.checks, lambda one: _typed(one.value.setting) or _check(one.value)),
        ("recording", sources.recordings, lambda one: _written(one, one.value.origin) or calibrated),
        ("schedule", sources.schedules, lambda one: _written(one, one.value.origin) or solved(one)),
        ("benchmark", sources.benches, lambda one: _typed(one.value) or "blockcache bench --json"),
    ]
    rows = [["this page", "", code(sources.command)]]
    rows += [[what, code(one.path), code(command(one))] for what, found, command in made for one in found]
    brought = ((one.path, one.value) for one in sources.brought)
    rows += [[value.kind, code(path), code(value.command.replace("POLICY", policy))] for path, value in brought]
    return Section("The commands that made it", (table(["what", "file", "made by"], rows, left=3),))


def _typed(said: Mapping[str, Any]) -> str:
    """What somebody typed for a file, where it says so."""
    command = said.get("command")
    return command if isinstance(command, str) else ""


def _written(file: Source[Any], said: Mapping[str, Any]) -> str:
    """The same for a file that does not say where it was written: where it is."""
    command = _typed(said)
    return command and f"{command} -o {shlex.quote(file.path)}"


def _evaluation(file: Source[Results]) -> str:
    results = file.value
    if command := _written(file, results.setting):
        return command
    policy, suite = shlex.quote(results.policy["source"]), results.setting.get("suite")
    if isinstance(suite, dict) and isinstance(suite.get("name"), str):
        return f"blockcache paper suite {suite['name']} {policy}"
    methods = " ".join(f"-m {shlex.quote(item.name)}" for item in results.methods if item.name != BASELINE)
    task = shlex.quote(results.task["name"])
    clock = " --clock CLOCK" if results.clocked else ""
    return f"blockcache eval {policy} --task {task} {methods} --rollouts {results.setting['rollouts']}{clock}"


def _check(found: Check) -> str:
    policy, what = shlex.quote(found.policy["source"] or "POLICY"), shlex.quote(found.method["name"] or "SCHEDULE")
    setting = found.setting
    return f"blockcache check {policy} {what} --count {setting['observations']} --samples {setting['samples']}"


def _tuning(found: Tuning, policy: str) -> str:
    goal = found.goal
    wanted = f"--deadline {goal.deadline_ms:g}ms" if goal.loss is None else f"--loss {goal.loss:g}"
    return _typed(found.setting) or f"blockcache tune {policy} {wanted}"

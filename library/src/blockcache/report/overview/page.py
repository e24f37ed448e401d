"""The whole page as a document: the answer first, then what it rests on, and the commands that made it."""

from __future__ import annotations

import shlex
from importlib.metadata import entry_points

from blockcache.errors import BlockcacheError, entry_failure
from blockcache.report.check import check_blocks
from blockcache.report.document import Document, Paragraph, Section, code, plain, table
from blockcache.report.overview.answer import answer_blocks, find_answer
from blockcache.report.overview.front import front_section, latency_section
from blockcache.report.overview.schedules import schedules_section
from blockcache.report.overview.sources import Sources
from blockcache.results.check import Check
from blockcache.results.rollouts import BASELINE, Results
from blockcache.results.tuning import Goal, Tuning

ANALYSES = "analyses"  # the laboratory's sections, which an analysis file is drawn by


def page(sources: Sources) -> Document:
    """What the files say, from the answer on; a section without its files says which command would fill it."""
    on = f" on {plain(sources.task)}" if sources.task and sources.task != sources.name else ""
    return Document(
        f"{plain(sources.name)}{on}: what caching gains, and what it costs",
        (
            *answer_blocks(sources),
            schedules_section(sources),
            *_checks(sources),
            front_section(sources, find_answer(sources)),
            latency_section(sources),
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
    if sources.analyses and not any(point.name == ANALYSES for point in points):
        said = f"Drawn by blockcache-lab, which is not installed: {code(sources.analyses[0].path)}."
        sections.append(Section("Why caching works", (Paragraph(said),)))
    return sections


def _origins(sources: Sources) -> Section:
    """Every file, and what made it, as far as it says so."""
    policy = sources.typed
    rows = [["this page", "", code(sources.command)]]
    rows += [["results", code(one.path), code(_evaluation(one.value))] for one in sources.results]
    rows += [["timings", code(one.path), code(f"blockcache paper timing {policy}")] for one in sources.timings]
    rows += [["distances", code(one.path), code(f"blockcache paper distances {policy}")] for one in sources.distances]
    rows += [
        ["tuning", code(one.path), code(_typed(one.value) or f"blockcache tune {policy} {_goal(one.value.goal)}")]
        for one in sources.tunings
    ]
    rows += [["check", code(one.path), code(_typed(one.value) or _check(one.value))] for one in sources.checks]
    rows += [["recording", code(one.path), code(f"blockcache calibrate {policy}")] for one in sources.recordings]
    rows += [["schedule", code(one.path), "`blockcache solve`"] for one in sources.schedules]
    rows += [["analysis", code(one.path), code(one.value.setting["command"])] for one in sources.analyses]
    rows += [["benchmark", code(one.path), "`blockcache bench --json`"] for one in sources.benches]
    return Section("The commands that made it", (table(["what", "file", "made by"], rows, left=3),))


def _typed(found: Tuning | Check) -> str:
    """What somebody typed for it, where the file says so."""
    said = found.setting.get("command")
    return said if isinstance(said, str) else ""


def _evaluation(results: Results) -> str:
    policy, suite = shlex.quote(results.policy["source"]), results.setting.get("suite")
    if isinstance(suite, dict) and isinstance(suite.get("name"), str):
        return f"blockcache paper suite {suite['name']} {policy}"
    methods = " ".join(f"-m {shlex.quote(item.name)}" for item in results.methods if item.name != BASELINE)
    task = shlex.quote(results.task["name"])
    return f"blockcache eval {policy} --task {task} {methods} --rollouts {results.setting['rollouts']}"


def _check(found: Check) -> str:
    count, samples = found.setting["observations"], found.setting["samples"]
    what = shlex.quote(found.method["name"] or "SCHEDULE")
    return (
        f"blockcache check {shlex.quote(found.policy['source'] or 'POLICY')} {what} --count {count} --samples {samples}"
    )


def _goal(goal: Goal) -> str:
    return f"--deadline {goal.deadline_ms:g}ms" if goal.loss is None else f"--loss {goal.loss:g}"

"""The whole page as a document: the answer first, then what it rests on, and the commands that made it."""

from __future__ import annotations

from blockcache.report.document import Document, Section, plain, table
from blockcache.report.overview.answer import answer_blocks, find_answer
from blockcache.report.overview.front import front_section
from blockcache.report.overview.insight import insight_sections
from blockcache.report.overview.latency import latency_section
from blockcache.report.overview.schedules import schedules_section
from blockcache.report.overview.sources import Sources
from blockcache.report.overview.words import named


def page(sources: Sources) -> Document:
    """What the files say, from the answer on; a section without its files says which command would fill it."""
    on = f" on {plain(sources.task)}" if sources.task and sources.task != sources.name else ""
    return Document(
        f"{plain(sources.name)}{on}: what caching gains, and what it costs",
        (
            *answer_blocks(sources),
            schedules_section(sources),
            front_section(sources, find_answer(sources)),
            latency_section(sources),
            *insight_sections(sources),
            _origins(sources),
        ),
    )


def _origins(sources: Sources) -> Section:
    """Every file, and what made it, as far as it says so."""
    rows = [["this page", "", f"`{sources.command}`"]]
    for source in sources.results:
        results = source.value
        methods = "".join(f" -m {item.name}" for item in results.methods[1:3])
        suite = results.setting.get("suite")
        made = (
            f"`blockcache paper suite {suite['name']} {results.policy['source']}`"
            if isinstance(suite, dict)
            else f"`blockcache eval {results.policy['source']}{methods}` ..."
        )
        rows.append(["results", named(source.path), made])
    name = sources.name
    rows += [["timings", named(one.path), f"`blockcache paper timing {name}`"] for one in sources.timings]
    rows += [["distances", named(one.path), f"`blockcache paper distances {name}`"] for one in sources.distances]
    for tuned in sources.tunings:
        goal = tuned.value.goal
        asked = f"--loss {goal.loss:g}" if goal.loss is not None else f"--deadline {goal.deadline_ms:g}ms"
        rows.append(["tuning", named(tuned.path), f"`blockcache tune {tuned.value.policy['source']} {asked}`"])
    rows += [["recording", named(one.path), f"`blockcache calibrate {name}`"] for one in sources.recordings]
    rows += [["schedule", named(one.path), "`blockcache solve`"] for one in sources.schedules]
    rows += [["analysis", named(one.path), f"`{one.value.setting['command']}`"] for one in sources.analyses]
    rows += [["benchmark", named(one.path), "`blockcache bench --json`"] for one in sources.benches]
    return Section("The commands that made it", (table(["what", "file", "made by"], rows, left=3),))

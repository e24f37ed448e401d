"""What an analysis says: the paper's claims for the terminal and as a page, and the sections of the report on it.

From the files alone. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from blockcache.report.document import Block, Bullets, Document, Folded, Paragraph, Section, missing, plain, table
from blockcache.report.overview.sources import Brought, Shown, Sources
from blockcache.schedule.schedule import Schedule
from blockcache_lab.analysis.claims import Claim, claims
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.sections import SECTIONS, Caching, WeakerPolicy
from blockcache_lab.pages.overview_episodes import episode_charts
from blockcache_lab.pages.overview_errors import error_charts
from blockcache_lab.pages.overview_similarity import action_charts, similarity_charts

_VERDICTS = {True: "**holds**", False: "**does not hold**", None: "not told"}
_NOTHING = "similarities, errors by block and step, episodes beside one another, and whether the paper's claims hold for this policy"


def claims_blocks(analysis: Analysis, fold: bool = False) -> tuple[Block, ...]:
    """Each claim of the paper beside what was found here, a sentence for each, and what there is not.

    Args:
        analysis: Of one policy.
        fold: Whether the sentences are hidden until a reader opens them.
    """
    found = claims(analysis)
    rows = [[plain(one.claim), _VERDICTS[one.holds], plain(one.figure), plain(one.paper)] for one in found]
    counts = {verdict: sum(one.holds is verdict for one in found) for verdict in _VERDICTS}
    summary = f"Of {len(found)} claims {counts[True]} hold for this policy, {counts[False]} do not"
    summary += f", and {counts[None]} could not be told." if counts[None] else "."
    sentences = Bullets(tuple(f"**{one.name}**: {_sentence(one)}" for one in found))
    notes = [f"No {name}: {plain(why)}" for name, why in analysis.absent.items()]
    if lacking := [name for name in SECTIONS if name not in (*analysis.sections, *analysis.absent)]:
        only = " ".join(f"--only {name}" + " --weaker POLICY" * (name == WeakerPolicy.name) for name in lacking)
        notes.append(
            f"Not analysed yet: {', '.join(lacking)}. `blockcache analyse {analysis.source or 'POLICY'} {only}` does it."
        )
    return (
        Paragraph(f"{summary} Every verdict is computed from the analysis; what was asked of the data stands beneath."),
        table(["claim", "verdict", "here", "in the paper"], rows, left=4),
        Folded("What was asked of the data, and what was found", (sentences,)) if fold else sentences,
        *([Bullets(tuple(notes))] if notes else []),
    )


def page(analysis: Analysis) -> Document:
    """The whole page.

    Args:
        analysis: Of one policy.
    """
    setting, observed = analysis.setting, analysis.setting["observations"]
    return Document(
        "What the paper claims, and what is found here",
        (
            Paragraph(
                f"Made by `{setting['command']}`: {len(analysis.blocks)} blocks, {analysis.steps} steps, calibrated on "
                f"{setting['generations']} generations, {observed['count']} observations, seed {setting['seed']}. Every sentence "
                "is computed from the file of the analysis ([its format](../file-formats.md#analysis)). Where the paper gives no figure, "
                "the sentence says what was asked of the data."
            ),
            *claims_blocks(analysis),
        ),
    )


def _sentence(item: Claim) -> str:
    """Commands in backquotes stay; whatever else has a mark's meaning is shown as it is."""
    pieces = item.sentence.split("`")
    return "".join(f"`{piece}`" if place % 2 else _plain_inside(piece) for place, piece in enumerate(pieces))


def _plain_inside(words: str) -> str:
    """As `plain`, with the spaces at both ends kept."""
    lead, tail = words[: len(words) - len(words.lstrip())], words[len(words.rstrip()) :]
    return f"{lead}{plain(words)}{tail}" if words.strip() else words


def brought(analysis: Analysis) -> Brought:
    """The analysis as the report's page sees it."""
    command = str(analysis.setting["command"])
    return Brought(
        "analysis", analysis.source, analysis.fingerprint, command, analysis, tuple(_analysed_schedules(analysis))
    )


def _analysed_schedules(analysis: Analysis) -> Iterator[Shown]:
    """Its schedules with their caching errors: the paper's first, as it is repaired by the union."""
    caching = analysis.get(Caching)
    known = {} if caching is None else {name: caching.of(name) for name in caching.schedules}
    updates = {
        name: {block: np.flatnonzero(row).tolist() for block, row in zip(analysis.block_names, marks, strict=True)}
        for name, (_, marks) in known.items()
    }
    for name in (name for name in _NAMES if name in known):
        origin = analysis.schedules.get(name, {}).get("origin", {})
        made = Schedule(analysis.steps, updates[name], analysis.fingerprint, origin)
        own = updates.get("blockwise") if name == "bac" else None
        if own is not None and not all(set(own[block]) <= set(made.updates[block]) for block in own):
            own = None  # of another calibration
        yield Shown(_NAMES[name], "analysis", made, np.asarray(known[name][0], np.float64), "caching error", own)


_NAMES = {"bac": "BAC, with the union", "given": "The given schedule", "blockwise": "Block-wise, without the union"}


def insight_sections(sources: Sources) -> tuple[Section, ...]:
    """All that an analysis has; of a recording the similarities alone."""
    analyses = [one.value.value for one in sources.brought if isinstance(one.value.value, Analysis)]
    analysis = analyses[0] if analyses else None
    recording = sources.recordings[0].value if sources.recordings else None
    found: dict[str, Iterable[Block]] = {
        "How alike outputs are from step to step": similarity_charts(analysis, recording)
    }
    if analysis is None:
        command = f"blockcache analyse {sources.typed} -o analysis.safetensors"
        found["Why it works"] = [missing(_NOTHING, command)]
    else:
        found = {
            "The paper's claims, here": claims_blocks(analysis, fold=True),
            **found,
            "Where errors come from": error_charts(analysis),
            "Does one schedule do for all episodes?": episode_charts(analysis),
            "What the action feels": action_charts(analysis),
        }
    kept = {title: tuple(blocks) for title, blocks in found.items()}
    return tuple(Section(title, blocks) for title, blocks in kept.items() if blocks)

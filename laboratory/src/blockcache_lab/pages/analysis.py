"""What an analysis says of the paper's claims: for the terminal, and as the page docs/generated/analyses.md. From the file alone."""

from __future__ import annotations

from blockcache.report.document import Block, Bullets, Document, Paragraph, Section, plain, table
from blockcache.results.analysis import Analysis
from blockcache.results.analysis_sections import SECTIONS
from blockcache_lab.analysis.claims import Claim, claims

_HOLDS = {True: "yes", False: "**no**", None: "not told"}


def claims_blocks(analysis: Analysis) -> tuple[Block, ...]:
    """The table of claims, and a sentence for each."""
    found = claims(analysis)
    rows = [[item.claim, item.paper, plain(item.figure), _HOLDS[item.holds]] for item in found]
    return (
        table(["the paper says", "its figure", "here", "holds"], rows, left=3),
        Bullets(tuple(f"**{item.name}**: {sentence(item)}" for item in found)),
    )


def page(analysis: Analysis) -> Document:
    """The whole page."""
    setting, observed = analysis.setting, analysis.setting["observations"]
    absent = tuple(f"`{name}`: {plain(reason)}" for name, reason in analysis.absent.items())
    missing = [name for name in SECTIONS if name not in analysis.sections and name not in analysis.absent]
    absent += tuple(f"`{name}`: not asked for." for name in missing)
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
            *((Section("Not there", (Bullets(absent),)),) if absent else ()),
        ),
    )


def sentence(item: Claim) -> str:
    """Commands in backquotes stay; whatever else has a mark's meaning is shown as it is."""
    pieces = item.sentence.split("`")
    return "".join(f"`{piece}`" if place % 2 else plain_inside(piece) for place, piece in enumerate(pieces))


def plain_inside(words: str) -> str:
    """As `plain`, with the spaces at both ends kept."""
    lead, tail = words[: len(words) - len(words.lstrip())], words[len(words.rstrip()) :]
    return f"{lead}{plain(words)}{tail}" if words.strip() else words

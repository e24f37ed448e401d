"""Words that several sections of the page share. Knows nothing of files."""

from __future__ import annotations

from blockcache.errors import BlockcacheError
from blockcache.report.chart import Colour, Marker
from blockcache.report.document import Paragraph, plain
from blockcache.report.suites import kind_of, label

# kind of method -> colour and shape; no two that stand beside one another differ by colour alone
KINDS: dict[str, tuple[Colour, Marker]] = {
    "full precision": ("ink", "star"),
    "BAC": ("orange", "circle"),
    "Action costs": ("green", "diamond"),
    "Uniform": ("grey", "square"),
    "DDPM-N": ("blue", "down"),
    "DDIM-N": ("sky", "up"),
    "SDE-DPM-Solver++-N": ("grey", "cross"),
    "placed DDPM-N": ("pink", "cross"),
    "fitted-N": ("amber", "x"),
    "reuse on few steps": ("ink", "diamond"),
    "tuned": ("orange", "star"),
}
OTHERS: tuple[Colour, Marker] = ("grey", "circle")


def method_label(name: str) -> str:
    """A method for people, or its name where no method is called so now."""
    try:
        return label(name)
    except BlockcacheError:
        return name


def method_kind(name: str) -> str:
    try:
        return "full precision" if name == "full" else kind_of(name)
    except BlockcacheError:
        return "another method"


def code(text: str) -> str:
    """A command or a file in a sentence."""
    return plain(text) if "`" in text or not text.strip() else f"`{' '.join(text.split())}`"


def missing(what: str, command: str) -> Paragraph:
    """A section that has nothing to show says what would fill it."""
    return Paragraph(
        f"Not in these files: {what}. To have it here: {code(command)}, and give its file to `blockcache report`."
    )

"""Words that several sections of the page share. Knows nothing of files."""

from __future__ import annotations

from blockcache.report.document import Paragraph, plain


def code(text: str) -> str:
    """A command or a file in a sentence."""
    return plain(text) if "`" in text or not text.strip() else f"`{' '.join(text.split())}`"


def missing(what: str, command: str) -> Paragraph:
    """A section that has nothing to show says what would fill it."""
    return Paragraph(
        f"Not in these files: {what}. To have it here: {code(command)}, and give its file to `blockcache report`."
    )

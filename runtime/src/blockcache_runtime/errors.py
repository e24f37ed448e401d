"""Everything that blockcache refuses, it refuses with one of these; the library adds errors of its own.

A message says what is wrong, what was expected, what was found and what to do next, in one sentence or two. However long the
thing that it speaks of, it is never longer than a few lines.
"""

from __future__ import annotations

import reprlib

_LONGEST, _LINES = 1000, 4  # of a message, in characters and in lines
_VALUES = reprlib.Repr()
_VALUES.maxlevel, _VALUES.maxother, _VALUES.maxlong = 2, 60, 40


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters: of a longer one the beginning and the end.

    Args:
        text: A text of any length.
        most: Characters that it may have.
    """
    return text if len(text) <= most else f"{text[: most * 3 // 4 - 5]} ... {text[len(text) - most // 4 :]}"


def short(value: object) -> str:
    """A value as Python writes it, for a message, however large the value is.

    Args:
        value: Any object.
    """
    try:
        return shortened(_VALUES.repr(value), 100)
    except (ValueError, RecursionError):  # Python does not write down a whole number of more than 4300 digits
        return f"one {type(value).__name__} too large to be shown"


def in_one_line(error: BaseException) -> str:
    """What foreign code raised, for a message: its kind and the first line of what it says.

    Args:
        error: The exception; only its kind and its message are read.
    """
    return shortened(f"{type(error).__name__}: {error}".partition("\n")[0], 300)


class BlockcacheError(Exception):
    """Base of every error that blockcache raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_few_lines(item) if isinstance(item, str) else item for item in args))


def _few_lines(message: str) -> str:
    lines = message.splitlines()
    if len(lines) > _LINES:
        message = "\n".join([*lines[: _LINES - 2], "...", lines[-1]])
    return shortened(message, _LONGEST)


class FileError(BlockcacheError):
    """A file that cannot be read, written or understood. A failed write leaves the old file whole."""


class ContentError(BlockcacheError):
    """A value that is not what it should be; the reader of a file turns it into a FileError that names the file."""


class ObservationError(BlockcacheError):
    """An observation that the policy cannot answer: wrong shape, wrong type or not finite."""


class NonFiniteError(BlockcacheError):
    """A generation that went through NaN, infinity or numbers too large to compute with; no action is handed out."""


class EngineError(BlockcacheError):
    """An engine that is missing, or that does not support what was asked of it."""

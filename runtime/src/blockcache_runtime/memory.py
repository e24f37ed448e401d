"""Small answers that are kept for the next start, per user and beside what blockcache keeps. Knows nothing of what is asked.

An answer that cannot be read or kept costs time, and is never an error: a robot may have no disk to write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from blockcache_runtime.atomic import write_bytes
from blockcache_runtime.errors import FileError


class Remembered:
    """A whole number that was found out once, kept under everything that it depends on."""

    def __init__(self, kind: str, *question: object) -> None:
        """Nothing is read yet.

        Args:
            kind: What was found out, such as "threads"; part of the file's name.
            question: Everything that the number depends on: plain values, as JSON has them.
        """
        name = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:32]
        self._name = f"{name}.{kind}"  # of the form that the library's cache deletes in the end

    def get(self, possible: tuple[int, ...]) -> int | None:
        """What was kept, if it is one of the numbers that are possible."""
        with contextlib.suppress(OSError, RuntimeError, ValueError), (_directory() / self._name).open("rb") as file:
            return {str(answer).encode(): answer for answer in possible}.get(file.read(20))
        return None

    def keep(self, answer: int) -> None:
        """Keep the number for the next start."""
        with contextlib.suppress(FileError, OSError, RuntimeError, ValueError):
            place = _directory()
            place.mkdir(parents=True, exist_ok=True)
            write_bytes(place / self._name, str(answer).encode())


def _directory() -> Path:
    """`BLOCKCACHE_CACHE`, or the user's cache directory; a RuntimeError for a user without a home."""
    chosen = os.environ.get("BLOCKCACHE_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockcache"

"""Formats that are read badly in every way that the harness must notice; see `test_fuzz_harness`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from blockcache.errors import BlockcacheError, FileError

from .running import Sample

SOUND = '{"content": "this is sound"}'


def _make(place: Path) -> list[Path]:
    (place / "file.json").write_text(SOUND)
    return [place / "file.json"]


def _sample(hurt: Any) -> Sample:
    return Sample(_make, lambda path: None if path.read_text(errors="replace") == SOUND else hurt())


def _raise(error: Exception) -> None:
    raise error


class _LongError(BlockcacheError):
    """Says just what it is given; those of the package shorten themselves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


def _hoard() -> int:
    return len(os.urandom(1) * 400_000_000)


class UncutError(FileError):
    """As no error of ours is: `BlockcacheError` itself keeps messages short."""

    def __str__(self) -> str:
        return self.whole

    def __init__(self, whole: str) -> None:
        super().__init__(whole)
        self.whole = whole


SAMPLES = {
    "crash": _sample(os.abort),
    "hang": _sample(lambda: time.sleep(60)),
    "greedy": _sample(_hoard),
    "raw": _sample(lambda: _raise(TypeError("unhashable type: 'list'"))),
    "deep": _sample(lambda: _raise(RecursionError("too deep"))),
    "talkative": _sample(lambda: _raise(_LongError("x" * 5_000))),
    "many lines": _sample(lambda: _raise(_LongError("\n" * 20))),
    "refused": _sample(lambda: _raise(FileError("the file is not what it should be; make it again"))),
    "taken": _sample(lambda: None),
}


def dies(seed: int, case: int, directory: Path) -> None:
    """A case of `CHECKS` that takes its process along."""
    os._exit(1)

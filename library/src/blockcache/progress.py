"""Progress bars on a terminal; in a pipe or a log file, a line now and then of long work. Knows nothing of the work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from tqdm import tqdm

T = TypeVar("T")
BETWEEN_LINES = 30.0
"""Seconds between two lines of a bar where there is no terminal, and before the first one: short work writes none."""
_watcher: ContextVar[Callable[[], object] | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Callable[[], object]) -> Iterator[None]:
    """Inside, every step of every bar, drawn or not, calls the watcher: it can tell people of long work, or end it.

    Args:
        watcher: Called before each step; what it raises ends the work.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class _Bar(tqdm):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            _step()
            yield item

    def update(self, n: float | None = 1) -> bool | None:
        _step()
        return super().update(n)


class _Lines:
    """Takes what a bar draws as lines. tqdm moves the cursor by escape sequences, which mean nothing in a file."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and "\x1b" not in line:
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _step() -> None:
    if (watcher := _watcher.get()) is not None:
        watcher()


@overload
def progress_bar(items: Iterable[T], desc: str | None = ..., *, disable: bool = ..., **settings: Any) -> tqdm[T]: ...
@overload
def progress_bar(items: None = ..., desc: str | None = ..., *, disable: bool = ..., **settings: Any) -> tqdm[Any]: ...
def progress_bar(
    items: Iterable[Any] | None = None, desc: str | None = None, *, disable: bool = False, **settings: Any
) -> tqdm[Any]:
    """A bar of tqdm, with its arguments: drawn on a terminal, else written line by line.

    Args:
        items: What it counts while somebody goes over it; without them, `update` moves it.
        desc: The words before it.
        disable: No bar at all.
        settings: Further arguments of tqdm, such as `total`, `unit` and `leave`.
    """
    if not sys.stderr.isatty():
        often = {"mininterval": BETWEEN_LINES, "maxinterval": BETWEEN_LINES, "delay": BETWEEN_LINES}
        settings |= {"file": _Lines(), **often}
        disable = disable or _watcher.get() is not None  # who watches tells people what is being done
    return _Bar(items, desc, disable=disable, **settings)

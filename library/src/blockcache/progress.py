"""Progress bars, on a terminal only: a pipe or a log file gets none. Knows nothing of what takes its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

from tqdm import tqdm

T = TypeVar("T")


@overload
def progress_bar(items: Iterable[T], desc: str | None = ..., *, disable: bool = ..., **settings: Any) -> tqdm[T]: ...
@overload
def progress_bar(items: None = ..., desc: str | None = ..., *, disable: bool = ..., **settings: Any) -> tqdm[Any]: ...
def progress_bar(
    items: Iterable[Any] | None = None, desc: str | None = None, *, disable: bool = False, **settings: Any
) -> tqdm[Any]:
    """A bar of tqdm, with its arguments; drawn if standard error is a terminal and nobody disabled it.

    items    what it counts while somebody goes over it; without them, `update` moves it
    desc     the words before it
    disable  no bar at all
    """
    return tqdm(items, desc, disable=disable or None, **settings)

"""Finished work, kept in a directory under a digest of all that it depends on: a run that was killed goes on from there.

Knows nothing of policies or of what the work is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from blockcache.errors import BlockcacheError, FileError
from blockcache.files import Format, Name, PathLike, digest, exists, make_directory

FORMAT = Format("blockcache.job", "finished job", {"key": Name, "outcome": dict}, again="delete it and run again")
Outcome: TypeAlias = dict[str, Any]


class Saved(Protocol):
    """A value that writes its own file."""

    def save(self, path: PathLike) -> object: ...


T = TypeVar("T", bound=Saved)


class Store:
    """A directory of finished work; None keeps nothing. Only the process that hands out work writes to it."""

    def __init__(self, directory: PathLike | None) -> None:
        self.directory = None if directory is None else Path(directory)

    def get(self, key: str, check: Callable[[Outcome], object] = dict) -> Outcome | None:
        """The JSON object that is kept under a key, if any is; `check` raises if it is not what it should be."""
        path = self._path(f"{key[:32]}.json")
        if path is None or not exists(path):
            return None
        value = FORMAT.load(path)
        if value["key"] != key:
            raise FileError(f"the finished job {path} is not the one that its name says; delete it and run again")
        outcome: Outcome = value["outcome"]
        with FORMAT.reading(path):
            check(outcome)
        return outcome

    def put(self, key: str, outcome: Outcome) -> None:
        """Keep a JSON object under a key."""
        if self.directory is not None:
            make_directory(self.directory)
            FORMAT.save(self.directory / f"{key[:32]}.json", {"key": key, "outcome": outcome})

    def outcome(self, origin: Mapping[str, Any], make: Callable[[], Outcome]) -> Outcome:
        """A JSON object, made unless it is there.

        Args:
            origin: All that it depends on, in JSON types.
            make: Makes it.
        """
        key = digest(origin)
        found = self.get(key)
        if found is None:
            self.put(key, found := make())
        return found

    def value(self, name: str, load: Callable[[Path], T], make: Callable[[], T], *others: str, mend: bool = False) -> T:
        """A value with a file of its own, made unless it is there.

        Args:
            name: Of the file, with a digest of all that the value depends on.
            load: Reads the file.
            make: Makes the value.
            others: Names of files that hold as much.
            mend: Whether a file that cannot be read is made again, instead of refused.
        """
        for path in map(self._path, (name, *others)):
            with contextlib.suppress(*[BlockcacheError] if mend else []):
                if path is not None and exists(path):
                    return load(path)
        made = make()
        if self.directory is not None:
            make_directory(self.directory)
            made.save(self.directory / name)
        return made

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name

"""Work that is kept on disk for the next time, per user and bounded in size: exports and conversions.

Knows nothing of what is kept. A piece of work is known by the digest of everything that it depends on, so that nothing in
the cache is ever out of date: what is no longer asked for is deleted in the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

import platformdirs
from filelock import FileLock, Timeout

from blockcache.errors import FileError

T = TypeVar("T")

CACHE_BYTES = 2 * 10**9
PATIENCE = 30.0  # seconds to wait for another process that keeps something
_LOCK, _NEW, _SEAL = ".lock", ".new-", ".seal"
_logger = logging.getLogger("blockcache")


@dataclass(frozen=True)
class Cache:
    """One kind of work. What cannot be read or kept costs time, and is never an error."""

    what: str  # in a warning, such as "an export"
    suffix: str

    def path(self, key: str) -> Path:
        """Where the work of this digest is, or would be."""
        return cache_directory() / f"{key}.{self.suffix}"

    def get(self, key: str, load: Callable[[Path], T | None]) -> T | None:
        """What was kept under a digest; None if there is nothing, or nothing that is whole and right.

        Args:
            key: What `files.digest` gave.
            load: Reads it; None or any exception means that it is of no use. A file it must check itself; a directory is
                the one that was kept under this digest, bit by bit.
        """
        path = self.path(key)
        try:
            found = load(path) if path.is_file() or _is_sealed(path, key) else None
        except Exception:  # nobody wrote it by hand, and an error here would come back with every start
            return None
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(path)  # was of use just now, see `_prune`
        return found

    def put(self, key: str, save: Callable[[Path], object]) -> None:
        """Keep work under a digest, whole or not at all; instead of what is there.

        Args:
            key: What `files.digest` gave.
            save: Writes a file or a directory at the path that it is given, where nothing is yet.
        """
        path = self.path(key)
        try:
            with FileLock(path.with_name(_LOCK), timeout=PATIENCE):
                for left in path.parent.glob(f"{_NEW}*"):  # by a process that was killed: nobody else has the lock
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=_NEW, dir=path.parent) as place:
                    new = Path(place) / path.name
                    save(new)
                    if new.is_dir():
                        _seal(new, key)
                    if new.is_dir() and path.is_dir():
                        shutil.rmtree(path)
                    os.replace(new, path)
                _prune(path.parent)
        except (FileError, OSError, Timeout) as error:
            _logger.warning("%s cannot be kept for the next time: %s", self.what, error)


def _seal(directory: Path, key: str) -> None:
    """Write down beside the files of a directory what they hold, and under which digest they are kept."""
    (directory / _SEAL).write_text(json.dumps([key, _hashes(directory)]))


def _is_sealed(directory: Path, key: str) -> bool:
    """Whether a directory holds what was kept under this digest: nothing damaged, nothing exchanged."""
    seal = directory / _SEAL
    return seal.is_file() and json.loads(seal.read_text()) == [key, _hashes(directory)]


def _hashes(directory: Path) -> dict[str, str]:
    found = {path.name: hashlib.sha256() for path in sorted(directory.iterdir()) if path.name != _SEAL}
    for name, so_far in found.items():
        with (directory / name).open("rb") as file:
            while part := file.read(2**22):
                so_far.update(part)
    return {name: so_far.hexdigest() for name, so_far in found.items()}


def _prune(directory: Path) -> None:
    """Once all that is kept takes more than `CACHE_BYTES`, delete what was of no use for longest; the newest stays."""
    with contextlib.suppress(OSError):  # a file that is open on Windows: next time
        newest, *others = sorted(directory.glob("[0-9a-f]" * 32 + "*.*"), key=lambda path: -path.stat().st_mtime_ns)
        room = CACHE_BYTES - _size(newest)
        for path in others:
            room -= _size(path)
            if room < 0 and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif room < 0:
                path.unlink()


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


@functools.cache
def source_hash(family: str) -> str:
    """A hash of the code that makes what is kept: what older code made is made again.

    Args:
        family: The path of a source file of the policy's family; all modules beside it count.
    """
    package = Path(str(resources.files("blockcache")))
    folders = [
        *(package / room for room in ("engines", "foreign", "models", "samplers", "schedule")),
        Path(family).parent,
    ]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def cache_directory() -> Path:
    """`BLOCKCACHE_CACHE`, or the user's cache directory; a temporary one if that cannot be written."""
    try:
        chosen = os.environ.get("BLOCKCACHE_CACHE")
        directory = Path(chosen) if chosen else platformdirs.user_cache_path("blockcache", appauthor=False)
        if not chosen and not directory.is_absolute():
            raise RuntimeError("no home")  # which newer versions of platformdirs say themselves
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: a container's user may have no home
        return _temporary_directory()


def _temporary_directory() -> Path:
    """The same one for every process of this user; never one that another user made, whose files would be run."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    directory = Path(tempfile.gettempdir()) / f"blockcache-{user}"
    with contextlib.suppress(OSError):  # a file has that name, or nobody may look at it
        directory.mkdir(mode=0o700, exist_ok=True)
        facts = directory.lstat()  # a link may lead anywhere
        if stat.S_ISDIR(facts.st_mode) and user in ("", facts.st_uid) and os.access(directory, os.W_OK | os.X_OK):
            return directory
    return _own_directory(tempfile.gettempdir())


@functools.cache
def _own_directory(where: str) -> Path:
    """One that nobody else has, the same for as long as this process lives."""
    return Path(tempfile.mkdtemp(prefix="blockcache-", dir=where))

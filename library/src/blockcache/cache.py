"""Where exports, converted policies and what was found out about policies are kept on disk, bounded in size.

Knows nothing of what they hold.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from importlib import resources
from pathlib import Path

CACHE_BYTES = 2 * 10**9


@functools.cache
def source_hash(family: str) -> str:
    """Of the code that makes what is kept: what an older state made is made again. `family` is a file of the family's."""
    package = Path(str(resources.files("blockcache")))
    folders = [
        *(package / room for room in ("engines", "foreign", "models", "samplers", "schedule")),
        Path(family).parent,
    ]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def prune(directory: Path) -> None:
    """Once what it keeps takes more than `CACHE_BYTES`, delete what was of no use for longest; the newest stays."""
    with contextlib.suppress(OSError):  # another process prunes too, or holds a file open on Windows: next time
        exports = [path for path in directory.glob("[0-9a-f]" * 32 + ".onnx") if path.is_file()]
        policies = [path for path in directory.glob("[0-9a-f]" * 32 + ".policy") if path.is_dir()]
        newest, *others = sorted([*exports, *policies], key=lambda path: -path.stat().st_mtime_ns)
        room = CACHE_BYTES - _size(newest)
        for path in others:
            room -= _size(path)
            if room < 0 and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif room < 0:
                path.unlink()


def _size(path: Path) -> int:
    files = [item for item in path.iterdir() if item.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def cache_directory() -> Path:
    """`BLOCKCACHE_CACHE`, or `blockcache` under the user's cache directory; a temporary one if that cannot be written."""
    try:
        chosen = os.environ.get("BLOCKCACHE_CACHE")
        base = os.environ.get("XDG_CACHE_HOME")
        directory = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "blockcache"
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

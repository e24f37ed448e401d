"""Whole files or nothing, in places that are checked first. Knows no format.

A write goes to a hidden file in the same directory and takes the old file's place in one step, so a full disk, a killed
process or a read-only directory can cost the new file but never the old one. The writer holds a lock on its hidden file; one
that nobody holds was left by a writer that was killed, and the next write to the same place removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from blockcache_runtime.errors import FileError, short

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

PathLike: TypeAlias = str | os.PathLike[str]

PATIENCE = 30.0  # seconds to wait for another writer of the same directory


def check_writable(path: PathLike, *, directory: bool = False) -> None:
    """Refuse a place that cannot be written, before any work is done for it.

    Args:
        path: The output file; the directory that it shall be in must exist.
        directory: The output is a directory: it may be missing, and its parent too, but no more than that.
    """
    with writing(path):
        target = Path(path)
        if directory:
            above = (target, target.parent, target.parent.parent)
            target = next((place for place in above if place.exists()), above[-1]) / "probe"
        else:
            target = _behind_links(path)
        temporary, handle = _temporary(target, path)
        os.unlink(temporary)
        os.close(handle)


def make_directory(path: PathLike) -> None:
    """Make a directory that somebody named as an output, and its parent if need be; `check_writable` allows the same.

    Args:
        path: The directory; the parent of its parent must exist.
    """
    with writing(path):
        for place in (Path(path).parent, Path(path)):
            place.mkdir(exist_ok=True)


def write_bytes(path: PathLike, data: bytes) -> None:
    """Put `data` at `path`: all of it or none of it. The directory must exist; of a link the target is written.

    Args:
        path: The file to write.
        data: Its whole content.
    """
    with writing(path):
        target = _behind_links(path)
        temporary, handle = _temporary(target, path)
        with contextlib.ExitStack() as held:
            if fcntl is not None:
                held.callback(os.close, os.dup(handle))  # the lock lasts until the file has its name
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:  # Ctrl-C in the middle, too: leave no half file behind
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        _sync(target.parent)


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Turns errors of the operating system into a FileError that names the output.

    Args:
        path: The output as the user named it.
    """
    try:
        yield
    except (TypeError, ValueError) as error:  # "" and "." have no name
        raise FileError(f"cannot write {short(str(path))}: that is no file's name") from error
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """An exclusive lock on a directory, between processes that ask for one; a process that is killed releases it.

    Args:
        directory: An existing directory.
    """
    with _locked(directory):
        yield


@contextlib.contextmanager
def no_writer(directory: Path) -> Iterator[None]:
    """A shared lock on a directory: nobody has it as its `only_writer` meanwhile; others may read.

    Args:
        directory: A directory; if it is missing, there is nothing to wait for.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # whoever reads a file there says what is wrong
            held.enter_context(_locked(directory, shared=True))
        yield


@contextlib.contextmanager
def _locked(directory: Path, shared: bool = False) -> Iterator[None]:
    handle, until = os.open(directory, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while not _lock(handle, shared):
            if time.monotonic() > until:
                raise FileError(f"another process is writing to {directory}; wait for it, then try again")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _behind_links(path: PathLike) -> Path:
    """The file itself, where `path` is a link to it."""
    if not Path(path).name:
        raise ValueError("no name")
    target = Path(os.path.realpath(path) if os.path.islink(path) else path)
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _temporary(target: Path, named: PathLike) -> tuple[Path, int]:
    """A new file beside the target, open to be written and locked; `named` is what errors call the output."""
    if not target.parent.exists():
        raise FileError(f"cannot write {named}: the directory {target.parent} does not exist; make it first")
    if target.exists() and not target.is_file():  # a device would be replaced by a file
        raise OSError(errno.EINVAL, "it is not a regular file")
    _sweep(target)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        # not tempfile: its files are private, and giving them the usual rights means reading the umask by setting it
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        handle = os.open(temporary, flags, 0o666)
        if _lock(handle) and os.fstat(handle).st_nlink:
            return temporary, handle
        os.close(handle)  # somebody else's sweep came between the two and took it for a dead one's


def _sweep(target: Path) -> None:
    """Remove what killed writers of the target left beside it."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}")
    with os.scandir(target.parent) as entries:
        names = [entry.name for entry in entries if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
    for name in names:
        with contextlib.suppress(OSError):  # another sweep was quicker, or it is somebody else's
            _remove_if_left(target.with_name(name))


def _remove_if_left(path: Path) -> None:
    if fcntl is None:
        path.unlink()
        return
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its writer lives
        path.unlink()
    finally:
        os.close(handle)


def _lock(handle: int, shared: bool = False) -> bool:
    """Whether this process has the lock now; where the file system knows no locks, everybody has it."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True


def _sync(directory: Path) -> None:
    """The new name is on the disk too, before the next write: a power cut keeps their order."""
    with contextlib.suppress(OSError):  # the file is there already, and some systems cannot do it
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

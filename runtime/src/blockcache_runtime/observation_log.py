"""A log of what a policy was asked on a robot, bounded in size, for `blockcache calibrate`, `check` and `tune`.

    with ObservationLog("log/") as log:
        log.begin_episode()
        ...
        log.add(history.push(observation))  # each time that a chunk is asked for

A directory of .npz files, each with the observations by name, `moments` (the episode and the place in it) and, where they
were given, `answered_actions`. Files are written by a thread of its own: a control loop never waits for the disk.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.arrays import parse_arrays, write_arrays
from blockcache_runtime.atomic import PathLike, make_directory
from blockcache_runtime.errors import FileError, ObservationError
from blockcache_runtime.files import read_bytes
from blockcache_runtime.history import forms

ALONE, MOMENTS, ANSWERS = "obs", "moments", "answered_actions"
"""Names in a file: of an observation that is one array, of when each was made, of what the policy answered."""
FILE_BYTES, FILE_ROWS = 32 * 2**20, 256
"""A file is written as soon as it would hold so many bytes or observations."""
_MOST_WAITING, _MOST_EPISODES = 4, 4096  # files that wait for the disk; episodes that are under way at once
_FILE = re.compile(r"observations-(\d{6,9})\.npz")
_logger = logging.getLogger("blockcache")


class ObservationLog(AbstractContextManager["ObservationLog"]):
    """Several threads may add at once."""

    def __init__(self, directory: PathLike, most_bytes: int = 10**9) -> None:
        """Go on with a log, or begin one.

        Args:
            directory: Where its files are; it is made if it is missing.
            most_bytes: On disk; beyond it the oldest files are deleted.
        """
        make_directory(directory)
        self.directory, self._most = Path(directory), most_bytes
        self._lock, self._writer = threading.Lock(), ThreadPoolExecutor(1, "blockcache-log")
        self._waiting: list[Future[None]] = []
        self._rows: list[dict[str, npt.NDArray[Any]]] = []
        self._places: dict[int, int] = {}  # by episode, the one that was added to last at the end
        self._number, self._episode = _last(self.directory)
        self._forms: dict[str, tuple[Any, ...]] | None = None
        self.added = self.dropped = 0
        """Observations that were taken, and those that were lost: the disk was too slow or full, or their form another."""

    @property
    def episode(self) -> int:
        """The number of the one that was begun last."""
        return self._episode

    def begin_episode(self) -> int:
        """Another episode begins; returns its number."""
        with self._lock:
            self._episode += 1
            return self._episode

    def add(self, observation: Any, actions: Any = None, episode: int | None = None) -> None:
        """Keep a copy of what the policy was asked.

        Args:
            observation: A batch of one, as `History.push` returns it and `predict_action` takes it.
            actions: What it answered, (steps, action_dim), if that is to be kept too; then with every observation.
            episode: Which one it is of, where several are under way; otherwise the last that was begun.
        """
        row = _row(observation, actions)
        with self._lock:
            found = forms(row, 2)
            if self._forms not in (None, found):
                self.dropped += 1
                raise ObservationError(f"a log holds observations of one form, got {found} after {self._forms}")
            most = min(FILE_ROWS, max(1, FILE_BYTES // sum(array.nbytes for array in row.values())))
            self._waiting = [one for one in self._waiting if not one.done()]
            if len(self._waiting) >= _MOST_WAITING and len(self._rows) >= most:
                self.dropped += 1
                return
            self._forms, episode = found, self._episode if episode is None else episode
            row[MOMENTS] = np.array([[episode, self._next_place(episode)]], dtype=np.int64)
            self._rows.append(row)
            self.added += 1
            if len(self._rows) >= most and len(self._waiting) < _MOST_WAITING:
                self._hand_over()

    def close(self) -> None:
        """Write what is left, and wait for it. A log that is closed takes nothing more."""
        with self._lock:
            self._hand_over()
        self._writer.shutdown()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next_place(self, episode: int) -> int:
        place = self._places.pop(episode, 0)
        self._places[episode] = place + 1
        if len(self._places) > _MOST_EPISODES:
            del self._places[next(iter(self._places))]
        return place

    def _hand_over(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._number += 1
            self._waiting.append(self._writer.submit(self._write, self._number, rows))

    def _write(self, number: int, rows: list[dict[str, npt.NDArray[Any]]]) -> None:
        try:
            arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            write_arrays(self.directory / f"observations-{number:06d}.npz", **arrays)
            sizes = {path: path.stat().st_size for path in log_files(self.directory)}
            for path in list(sizes)[:-1]:  # the newest stays
                if sum(sizes.values()) > self._most:
                    del sizes[path]
                    path.unlink()
        except (FileError, OSError) as error:
            with self._lock:
                self.dropped += len(rows)
            _logger.warning("%d observations are not recorded: %s", len(rows), error)


def log_files(directory: PathLike) -> list[Path]:
    """The files of a log, the oldest first.

    Args:
        directory: The directory of an `ObservationLog`.
    """
    found = {path: match for path in Path(directory).iterdir() if (match := _FILE.fullmatch(path.name))}
    return sorted(found, key=lambda path: int(found[path][1]))


def _row(observation: Any, actions: Any) -> dict[str, npt.NDArray[Any]]:
    given = observation if isinstance(observation, Mapping) else {ALONE: observation}
    row = {str(name): np.array(array) for name, array in given.items()}  # copies: drivers reuse their memory
    if reserved := {MOMENTS, ANSWERS} & {*row}:
        raise ObservationError(f"an observation called {min(reserved)!r} cannot be logged: that name is taken")
    if not row or any(array.ndim < 2 or len(array) != 1 or array.dtype.kind not in "biuf" for array in row.values()):
        shapes = {name: (array.shape, str(array.dtype)) for name, array in row.items()}
        raise ObservationError(f"a log takes batches of one, numbers of shape (1, n_obs_steps, ...), got {shapes}")
    return row if actions is None else {**row, ANSWERS: np.array(actions)[None]}


def _last(directory: Path) -> tuple[int, int]:
    """The numbers of the last file and of the last episode that a log holds."""
    files = log_files(directory)
    if not files:
        return 0, -1
    moments = parse_arrays(read_bytes(files[-1], "observation log"), "observation log", files[-1]).get(MOMENTS)
    episode = -1 if moments is None or not moments.size else int(moments.reshape(-1, 2)[:, 0].max())
    return int(files[-1].stem.rpartition("-")[2]), episode

"""What a control loop saw, planned and did, as a file for the Rerun viewer. Needs the extra `rerun`.

    with RerunFile("run.rrd") as file, Player(policy, 30, watcher=file.watcher("robot", 30)) as player:
        ...

Everything lies on one timeline, `tick`, and on `time`, which is that in seconds at the loop's rate. The file grows as the
loop goes on, and what it holds stays if the program is killed. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache_runtime.atomic import PathLike
from blockcache_runtime.checks import Array
from blockcache_runtime.chunks import Due, Watcher
from blockcache_runtime.errors import EngineError, FileError

LANES = 8
"""Chunks overlap in time: each is a line of its own in one of so many entities, taken in turn."""


def check_rerun(path: PathLike) -> None:
    """Refuse a recording that cannot be written here, before any work is done for it.

    Args:
        path: Where it shall be.
    """
    if not str(path).endswith(".rrd"):
        raise FileError(f"a recording for Rerun is a .rrd file, got {path}")
    if find_spec("rerun") is None:
        raise EngineError(
            "a .rrd file needs rerun-sdk, which is not installed; it comes with blockcache-runtime[rerun] (docs/start.md)"
        )


class RerunFile(AbstractContextManager["RerunFile"]):
    """One file; several loops may be watched in it, one after the other."""

    def __init__(self, path: PathLike) -> None:
        """Begin the file; what was there is gone.

        Args:
            path: Ends with .rrd.
        """
        check_rerun(path)
        import rerun

        self._stream = rerun.RecordingStream("blockcache")
        try:
            self._stream.save(path)
        except RuntimeError as error:
            raise FileError(f"cannot write {path} ({error})") from error

    def watcher(self, name: str, rate_hz: float) -> RerunWatcher:
        """Writes what a loop does.

        Args:
            name: Of the loop: all that belongs to it stands below this name.
            rate_hz: Ticks in a second.
        """
        return RerunWatcher(self._stream, name, rate_hz)

    def close(self) -> None:
        """Write what is left."""
        self._stream.flush()
        self._stream.disconnect()

    def __exit__(self, *exception: object) -> None:
        self.close()


class RerunWatcher(Watcher):
    """Entities below its name: `observation`, `planned/0` to `planned/7`, `action`, `held`, and each figure of a chunk."""

    def __init__(self, stream: Any, name: str, rate_hz: float) -> None:
        """See `RerunFile.watcher`."""
        import rerun

        self._rerun, self._stream, self._period = rerun, stream, 1 / rate_hz
        self._root = rerun.escape_entity_path_part(name)
        self._chunks = self._pictures = 0

    def observed(self, tick: int, observation: Any) -> None:
        """See `Watcher`. Frames become pictures, everything else numbers."""
        self._at(tick)
        named = observation if isinstance(observation, Mapping) else {"": observation}
        for name, value in named.items():
            self._log(f"observation/{name}" if name else "observation", self._shown(np.asarray(value)))

    def planned(self, begin: int, arrived: int, actions: Array, figures: Mapping[str, float]) -> None:
        """See `Watcher`. Each action stands at its own tick; a row of NaN ends the line."""
        rows = np.concatenate([actions, np.full_like(actions[:1], np.nan)]).astype(np.float64)
        ticks = begin + np.arange(len(rows))
        rerun = self._rerun
        self._stream.send_columns(
            f"{self._root}/planned/{self._chunks % LANES}",
            indexes=[
                rerun.TimeColumn("tick", sequence=ticks),
                rerun.TimeColumn("time", duration=ticks * self._period),
            ],
            columns=rerun.Scalars.columns(scalars=rows),
        )
        self._chunks += 1
        self._at(arrived)
        for name, value in figures.items():
            self._log(name, rerun.Scalars(float(value)))

    def acted(self, tick: int, due: Due) -> None:
        """See `Watcher`."""
        if due.action is None:
            return
        self._at(tick)
        self._log("action", self._rerun.Scalars(np.asarray(due.action, dtype=np.float64)))
        self._log("held", self._rerun.Scalars(float(due.held)))

    def pictured(self, picture: npt.NDArray[np.uint8]) -> None:
        """What a bystander sees, (height, width, 3) in bytes; the first at tick 0, the next at 1."""
        self._at(self._pictures)
        self._pictures += 1
        self._log("view", self._rerun.Image(picture).compress(jpeg_quality=85))

    def _at(self, tick: int) -> None:
        self._stream.set_time("tick", sequence=tick)
        self._stream.set_time("time", duration=tick * self._period)

    def _log(self, name: str, value: Any) -> None:
        self._stream.log(f"{self._root}/{name}", value)

    def _shown(self, value: Array) -> Any:
        if value.ndim != 3:
            return self._rerun.Scalars(value.astype(np.float64).ravel())
        frame = value if value.dtype == np.uint8 else np.clip(value * 255, 0, 255).astype(np.uint8)
        return self._rerun.Image(np.moveaxis(frame, 0, -1) if frame.shape[0] in (1, 3) else frame)

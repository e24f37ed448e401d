"""What tasks in MuJoCo share: versions of it that are too new are refused, and pictures need something that draws."""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from ctypes.util import find_library
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.errors import TaskError
from blockcache.extras import how_to_install

_TOO_NEW = (4, 0)
_IDLE: defaultdict[str, list[Any]] = defaultdict(list)
"""Simulators that no task uses now, by name. Building one takes as long as an episode in it, and a seed gives the same
episode to the last bit in one that was used before, even if it raised in mid-episode (tests of the tasks show both)."""


def borrow(name: str, build: Callable[[], Any]) -> Any:
    """A simulator of that name that nobody uses, or a new one."""
    return _IDLE[name].pop() if _IDLE[name] else build()


def give_back(name: str, simulator: Any) -> None:
    """Keep a simulator for the next task that borrows one of that name."""
    _IDLE[name].append(simulator)


def choose_graphics() -> None:
    """MuJoCo chooses when it is imported; without a screen only EGL draws."""
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl" if find_library("EGL") else "disable")


def check_mujoco(simulator: str, extra: str) -> None:
    """Refuse a MuJoCo that breaks a simulator.

    Args:
        simulator: Its name, for the message.
        extra: The extra of blockcache-lab that pins one that works.
    """
    import mujoco

    if tuple(int(part) for part in mujoco.__version__.split(".")[:2]) >= _TOO_NEW:
        raise TaskError(
            f"{simulator} needs a MuJoCo below {_TOO_NEW[0]}.{_TOO_NEW[1]}, got {mujoco.__version__}; "
            f"install the one that comes with {how_to_install('blockcache-lab', extra)}"
        )


def drawn(render: Callable[[], Any]) -> npt.NDArray[np.uint8]:
    """The picture that a simulator draws; where it cannot, the error says what is missing."""
    try:
        return np.asarray(render(), dtype=np.uint8)
    except (RuntimeError, ImportError, AttributeError) as error:
        raise TaskError(
            f"MuJoCo cannot draw here ({error}); install libEGL, or set MUJOCO_GL=osmesa with libOSMesa"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what simulators log, and say on the error stream, of parts that nobody asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)

"""Schedules as the paper's authors' code keeps them: one pickled list of update steps for each block.

The files are called optimal_steps_<module>_<S>_<metric>.pkl, all in one folder or each in a folder of its module's name. The
module is the dropout behind a block: `decoder.layers.3.dropout1` is its self-attention, `dropout2` its cross-attention,
`dropout3` its feed-forward block. They hold the steps before the bubbling union, which that code adds when it runs. Nothing
of the pickles is run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from blockcache.block import CROSS_ATTENTION, FEED_FORWARD, SELF_ATTENTION
from blockcache.errors import FileError, ScheduleError, short, shortened
from blockcache.files import PathLike, read_bytes
from blockcache.fingerprint import Fingerprint
from blockcache.foreign.pickles import Call, Global, load_pickle
from blockcache.schedule.schedule import Schedule

WHAT = "authors' schedule"
_FILE = re.compile(r"optimal_steps_(?P<module>.+)_(?P<updates>\d{1,5})_(?P<metric>[^_]+)\.pkl")
_BLOCK = re.compile(r"(?:model\.)?decoder\.layers\.(\d{1,4})\.dropout([123])")
_KINDS = {"1": SELF_ATTENTION, "2": CROSS_ATTENTION, "3": FEED_FORWARD}
_BYTES = 2**20  # of one file; a list of a hundred steps has less than a thousandth of it


def read_authors_schedule(
    folder: PathLike, *, steps: int = 100, updates: int | None = None, metric: str | None = None, last: bool = False
) -> Schedule:
    """One schedule from a folder of the authors' files, without the bubbling union.

    Args:
        folder: Where they are.
        steps: The denoising steps of one generation, which the files do not say.
        updates: S, where the folder has files for several.
        metric: The metric of the solver, where the folder has files for several.
        last: Whether every block is computed at the last step too, as the authors' code runs them.
    """
    (found_updates, found_metric), places = _files(Path(folder), updates, metric)
    found = {block: _steps(path, steps, last) for block, path in places.items()}
    layers = 1 + max(layer for layer, _ in found)
    blocks = [(layer, dropout) for layer in range(layers) for dropout in _KINDS]
    missing = [f"decoder.layers.{layer}.dropout{dropout}" for layer, dropout in blocks if (layer, dropout) not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FileError(f"the {WHAT} in {folder} lacks the steps of {', '.join(missing[:3])}{more}")
    rows = {f"layers.{layer}.{_KINDS[dropout]}": found[layer, dropout] for layer, dropout in blocks}
    origin = {
        "method": "blockwise",
        "updates": found_updates,
        "metric": found_metric,
        "last": last,
        "source": f"authors' files, {shortened(Path(folder).name, 200)}",
    }
    try:
        return Schedule(steps, rows, Fingerprint(family="dp-t"), origin)
    except ScheduleError as error:
        raise ScheduleError(f"{folder}: {error}; how many steps there are is said by --steps") from error


def _files(
    folder: Path, updates: int | None, metric: str | None
) -> tuple[tuple[int, str], dict[tuple[int, str], Path]]:
    """The one number of updates and the one metric that are wanted, and the files by layer and dropout."""
    found: dict[tuple[int, str], dict[tuple[int, str], Path]] = {}
    for path in sorted([*folder.glob("optimal_steps_*.pkl"), *folder.glob("*/optimal_steps_*.pkl")]):
        named = _FILE.fullmatch(path.name)
        block = _BLOCK.fullmatch(named["module"]) if named else None
        if named is None or block is None:  # there are files for other modules too
            continue
        kind, place = (int(named["updates"]), named["metric"]), (int(block[1]), block[2])
        if updates not in (None, kind[0]) or metric not in (None, kind[1]):
            continue
        group = found.setdefault(kind, {})
        if place in group:
            raise FileError(f"{folder} has two schedules of {named['module']}: {group[place]} and {path}")
        group[place] = path
    if len(found) == 1:
        return found.popitem()
    if found:
        kinds = shortened(", ".join(f"S={count} by {name}" for count, name in found), 200)
        raise FileError(f"{folder} has several schedules ({kinds}); choose one with --updates and --metric")
    wanted = "".join(f", {word} {value}" for word, value in (("S =", updates), ("metric", metric)) if value is not None)
    raise FileError(
        f"{folder} has no {WHAT}{wanted}: expected files such as optimal_steps_decoder.layers.0.dropout1_10_cosine.pkl"
    )


def _steps(path: Path, steps: int, last: bool) -> list[int]:
    value = load_pickle(read_bytes(path, WHAT, _BYTES), WHAT, path)
    if not isinstance(value, list):
        raise FileError(f"the {WHAT} {path} holds {_shown(value)}, expected a list of steps")
    found = set()
    for item in value:
        step = _numpy_number(item) if _is_numpy(item, "scalar") else item
        if type(step) is not int or not 0 <= step < 2**31:
            raise FileError(f"the {WHAT} {path} holds {_shown(item)} for a step, expected a whole number")
        found.add(step)
    if not found:  # the authors' code computes such a block at every step
        return list(range(steps))
    return sorted(found | {steps - 1} if last else found)


def _numpy_number(scalar: Call) -> int | None:
    """The whole number of a pickled scalar of numpy, as the authors' solver leaves it; None of any other."""
    dtype: Any
    data: Any
    dtype, data = scalar.arguments if len(scalar.arguments) == 2 else (None, None)
    code: Any = dtype.arguments[0] if _is_numpy(dtype, "dtype") and dtype.arguments else None
    if isinstance(data, Call) and data.kind == "_codecs.encode" and data.arguments:  # as old pickles write bytes
        text = data.arguments[0]
        data = text.encode("latin-1", "replace") if isinstance(text, str) else text
    known = code in ("i8", "i4", "u8", "u4") and isinstance(data, bytes) and len(data) == int(code[1])
    if not known or (isinstance(dtype.state, tuple) and dtype.state[1:2] == (">",)):
        return None
    return int.from_bytes(data, "little", signed=code[0] == "i")


def _is_numpy(call: Any, name: str) -> bool:
    """Whether a value out of a pickle is a call of numpy's function of this name."""
    function = call.function if isinstance(call, Call) else None
    return isinstance(function, Global) and function.name == name and function.module.partition(".")[0] == "numpy"


def _shown(value: Any) -> str:
    return shortened(value.kind, 80) if isinstance(value, Call) else short(value)

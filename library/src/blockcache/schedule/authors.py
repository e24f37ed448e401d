"""Schedules as the paper's authors' code keeps them: one pickled list of update steps for each block.

The files are called optimal_steps_<module>_<S>_<metric>.pkl, all in one folder or each in a folder of its module's name. The
module is the dropout behind a block: `decoder.layers.3.dropout1` is its self-attention, `dropout2` its cross-attention,
`dropout3` its feed-forward block. They hold the steps before the bubbling union, which that code adds when it runs. Nothing
of the pickles is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    places = _files(Path(folder), updates, metric)
    ((found_updates, found_metric),) = places
    found: dict[tuple[int, str], list[int]] = {}
    for module, path in places[found_updates, found_metric].items():
        layer, dropout = _BLOCK.fullmatch(module).groups()  # type: ignore[union-attr]  # chosen by it
        found[int(layer), dropout] = _steps(path, steps, last)
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


def _files(folder: Path, updates: int | None, metric: str | None) -> dict[tuple[int, str], dict[str, Path]]:
    """The files by module, of the one number of updates and the one metric that are wanted."""
    found: dict[tuple[int, str], dict[str, Path]] = {}
    for path in sorted([*folder.glob("optimal_steps_*.pkl"), *folder.glob("*/optimal_steps_*.pkl")]):
        named = _FILE.fullmatch(path.name)
        if named is None or not _BLOCK.fullmatch(named["module"]):  # there are files for other modules too
            continue
        if updates not in (None, int(named["updates"])) or metric not in (None, named["metric"]):
            continue
        group = found.setdefault((int(named["updates"]), named["metric"]), {})
        if named["module"] in group:
            raise FileError(f"{folder} has two schedules of {named['module']}: {group[named['module']]} and {path}")
        group[named["module"]] = path
    if len(found) == 1:
        return found
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
    found = {_whole(item, path) for item in value}
    if not found:  # the authors' code computes such a block at every step
        return list(range(steps))
    return sorted(found | {steps - 1} if last else found)


def _whole(item: Any, path: Path) -> int:
    """A step: a whole number of Python or, as the authors' solver leaves it, of numpy."""
    if type(item) is int and 0 <= item < 2**31:
        return item
    if _is_numpy(item, "scalar") and len(item.arguments) == 2:
        dtype, data = item.arguments
        code = dtype.arguments[0] if _is_numpy(dtype, "dtype") and dtype.arguments else None
        if isinstance(data, Call) and data.kind == "_codecs.encode" and data.arguments:  # as old pickles write bytes
            text = data.arguments[0]
            data = text.encode("latin-1", "replace") if isinstance(text, str) else text
        sizes: Mapping[Any, int] = {"i8": 8, "i4": 4, "u8": 8, "u4": 4}
        if (
            isinstance(code, str)
            and isinstance(data, bytes)
            and len(data) == sizes.get(code)
            and not _big_endian(dtype)
        ):
            return _whole(int.from_bytes(data, "little", signed=code[0] == "i"), path)
    raise FileError(f"the {WHAT} {path} holds {_shown(item)} for a step, expected a whole number")


def _is_numpy(call: Any, name: str) -> bool:
    """Whether a value out of a pickle is a call of numpy's function of this name."""
    function = call.function if isinstance(call, Call) else None
    return isinstance(function, Global) and function.name == name and function.module.partition(".")[0] == "numpy"


def _big_endian(dtype: Call) -> bool:
    return isinstance(dtype.state, tuple) and len(dtype.state) > 1 and dtype.state[1] == ">"


def _shown(value: Any) -> str:
    return shortened(value.kind, 80) if isinstance(value, Call) else short(value)

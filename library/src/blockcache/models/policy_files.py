"""Where a policy lies that a user names: shipped, a directory, a checkpoint of the public code, or a Python entry.
Knows nothing of torch, so that a wrong name is answered at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import weakref
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockcache.errors import FileError, PolicyError, entry_failure, short
from blockcache.files import Format, Name, PathLike, exists, opened, read_bytes

CONFIG, WEIGHTS, OBSERVATIONS = "config.json", "model.safetensors", "observations.npz"
SAMPLER, SCHEDULE, TUNING = "sampler.json", "schedule.json", "tuning.json"  # what `tune` writes
CHECKPOINT = ".ckpt"  # how the public code's files end
TUNED = "tuned"  # the directory with these inside a policy's own
# others: the family's config checks them; no header: directories made by hand from public weights have none
FORMAT = Format(
    "blockcache.policy",
    "policy config",
    {"task": Name | None},
    optional=("format", "version", "made_by", "task"),
    others=True,
)
PENDING = re.compile(r"\.config-([0-9a-f]{64})\.json")
"""The config of weights that are just being saved, by their SHA-256: as soon as they are there, it counts, and not the old
config. So weights and config change at one moment, that of one rename, though they are two files."""
_places: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()
_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def shipped_policies() -> tuple[str, ...]:
    """Names that `load_policy` knows without a path: those of every installed package that brings policies."""
    return tuple(sorted(_shipped()[0]))


def policy_directory(source: PathLike) -> Path:
    """Where a policy lies: the directory itself, or that of a shipped policy by name.

    A directory that is called like a shipped policy counts only if it holds a policy, and not, say, its results.

    Args:
        source: a path, or the name of a shipped policy.
    """
    directory, name = Path(source), os.fspath(source)
    shipped = name in shipped_policies()
    if os.path.isfile(directory / CONFIG) or (os.path.isdir(directory) and not shipped):
        return directory
    if not shipped:
        raise FileError(
            f"no policy {short(name)}: it is neither a directory nor one of the shipped policies "
            f"({', '.join(shipped_policies())}) nor a checkpoint FILE.ckpt nor a Python entry module:function"
            + "".join(f"; {sentence}" for sentence in _shipped()[1])
        )
    return _shipped()[0][name]


def remember_place(policy: Any, directory: Path) -> None:
    """That a policy object was loaded from a directory, wherever its name leads later; nothing is put on the object."""
    _places[policy] = Path(os.path.realpath(directory))


def place_of(policy: Any) -> Path | None:
    """The directory that this very object was loaded from; a copy, or one with another sampler, has none.

    Args:
        policy: the policy object, as `load_policy` gave it.
    """
    try:
        return _places.get(policy)
    except TypeError:  # no weak references to it, or no hash
        return None


def shared_file(directory: Path, name: str) -> Path:
    """A file of a policy's directory. What was tuned for a policy may lie in that policy's directory, under `tuned`, and
    has its weights and observations from there.

    Args:
        directory: the policy's, or `tuned` within it.
        name: of the file, without a path.
    """
    own, above = directory / name, directory.parent
    return above / name if directory.name == TUNED and not own.exists() and (above / CONFIG).is_file() else own


def read_config(source: PathLike) -> dict[str, Any]:
    """What `config.json` of a policy directory, or of a shipped policy by name, says.

    Args:
        source: a path, or the name of a shipped policy.
    """
    return FORMAT.load(config_file(policy_directory(source)))


def config_file(directory: Path) -> Path:
    """Where a policy's config stands: `config.json`, unless a save was killed before it came to that."""
    with contextlib.suppress(OSError, FileError):  # what is missing, its own reader says better
        pending = [name for name in os.listdir(directory) if PENDING.fullmatch(name)]
        if pending and (name := pending_config(read_bytes(directory / WEIGHTS, "policy weights"))) in pending:
            return directory / name
    return directory / CONFIG


def pending_config(weights: bytes) -> str:
    """The name under which the config of these weights waits for them."""
    return f".config-{hashlib.sha256(weights).hexdigest()}.json"


def is_entry(source: PathLike) -> bool:
    """Whether a name is a Python entry, and not a path."""
    return _ENTRY.fullmatch(os.fspath(source)) is not None and not exists(source)


def is_checkpoint(source: PathLike) -> bool:
    """Whether a name is that of a checkpoint file, which is converted first."""
    return os.fspath(source).endswith(CHECKPOINT) and not os.path.isdir(source)


def in_directory(source: PathLike) -> bool:
    """Whether a name stands for a policy's own directory, in which other things may lie beside it.

    Args:
        source: what a user names a policy by, see `load_policy`.
    """
    return not is_entry(source) and not is_checkpoint(source)


def check_new(place: PathLike) -> None:
    """Refuse an output where something is already.

    Args:
        place: where something is about to be written.
    """
    if os.path.lexists(place):
        raise FileError(f"{place} is there already; name a place where nothing is, or remove it first")


def split_entry(entry: str) -> tuple[str, str]:
    """The module and the function of a Python entry. The user's own files are at hand, as `python -m` has it."""
    module, _, function = entry.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    package = module.split(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise PolicyError(
            f"no policy {entry!r}: there is no module {package!r}; expected module:function, importable here"
        )
    return module, function


def check_source(source: str) -> None:
    """Refuse what names no policy, as far as that can be told without loading it.

    Args:
        source: what a user names a policy by, see `load_policy`.
    """
    if is_entry(source):
        split_entry(source)
    elif is_checkpoint(source):
        with opened(source, "checkpoint"):
            return
    else:
        read_config(source)


@cache
def _shipped() -> tuple[dict[str, Path], tuple[str, ...]]:
    """By name, the policies in `assets/policies` of each package that is registered under `blockcache.policies`, and a
    sentence about each package that cannot be looked into."""
    found: dict[str, Path] = {}
    broken = []
    for package, point in sorted({point.value: point for point in entry_points(group="blockcache.policies")}.items()):
        try:
            root = Path(str(resources.files(package) / "assets" / "policies"))
            items = sorted(root.iterdir())
        except Exception as error:  # a package may raise anything when it is imported
            broken.append(entry_failure("policies", point, error))
            continue
        for item in items:
            for place in (item, item / TUNED):
                if place.joinpath(CONFIG).is_file():
                    found.setdefault(place.relative_to(root).as_posix(), place)
    return found, tuple(broken)

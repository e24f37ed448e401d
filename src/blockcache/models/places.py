"""Where a policy is found that somebody names: shipped, a directory, or a Python entry. Knows nothing of torch, so that a
wrong name is answered at once."""

from __future__ import annotations

import os
import re
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockcache.errors import FileError, PolicyError
from blockcache.files import Format, PathLike

CONFIG, WEIGHTS, OBSERVATIONS = "config.json", "model.safetensors", "observations.npz"
# keys None: the family's config checks them; no header: directories made by hand from public weights have none
FORMAT = Format("blockcache.policy", "policy config", None, optional=("format", "version", "made_by"))
_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def shipped_policies() -> tuple[str, ...]:
    """Names that `load_policy` knows without a path."""
    return tuple(sorted(item.name for item in _shipped().iterdir() if item.joinpath(CONFIG).is_file()))


def policy_directory(source: PathLike) -> Path:
    """Where a policy lies: the directory itself, or that of a shipped policy by name.

    A directory that is called like a shipped policy counts only if it holds a policy, and not, say, its results.
    """
    directory, name = Path(source), os.fspath(source)
    shipped = name in shipped_policies()
    if directory.joinpath(CONFIG).is_file() or (directory.is_dir() and not shipped):
        return directory
    if not shipped:
        raise FileError(
            f"no policy {name!r}: it is neither a directory nor one of the shipped policies "
            f"({', '.join(shipped_policies())}) nor a Python entry module:function"
        )
    return _shipped() / name


def read_config(source: PathLike) -> dict[str, Any]:
    """What `config.json` of a policy directory, or of a shipped policy by name, says."""
    return FORMAT.load(policy_directory(source) / CONFIG)


def is_entry(source: PathLike) -> bool:
    """Whether a name is a Python entry, and not a path."""
    return _ENTRY.fullmatch(os.fspath(source)) is not None and not Path(source).exists()


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
    """Refuse what names no policy, as far as that can be told without loading it."""
    if is_entry(source):
        split_entry(source)
    else:
        read_config(source)


def _shipped() -> Path:
    return Path(str(resources.files("blockcache") / "assets" / "policies"))

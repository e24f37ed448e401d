"""A policy's directory, `config.json` + `model.safetensors`, written by whatever family. Strict, atomic.

A directory is written file by file, and at every instant its name loads as the whole old policy or as the whole new one:
first the new config, under a name that binds it to the new weights (`places.PENDING`); then the weights, in one rename, from
which moment on that config counts; then the config takes the name `config.json`. That needs nothing of the file system but
a rename, and where nothing is killed there are never other files than these two. Knows no family.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from blockcache.errors import FileError, PolicyError, shortened
from blockcache.files import PathLike, make_directory, only_writer, write_bytes, writing
from blockcache.models.policy_files import CONFIG, FORMAT, PENDING, WEIGHTS, config_file, pending_config


def write_policy(directory: PathLike, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a policy's directory; an older one of the same name stays whole until the new one is complete.

    A directory that holds anything but a policy is refused; where the name is a link, its target is written.

    config   what `config.json` says
    tensors  by name, on the CPU
    """
    weights = safetensors.torch.save(dict(tensors), metadata={"format": "pt"})
    with writing(directory):
        target = Path(os.path.realpath(directory))
        check_replaceable(target)
        new = not target.exists()
        make_directory(target)
        with only_writer(target):
            _finish(target)
            pending = target / pending_config(weights)
            try:
                FORMAT.save(pending, dict(config))
                write_bytes(target / WEIGHTS, weights)
            except BaseException as error:
                pending.unlink(missing_ok=True)
                if new:
                    target.rmdir()
                if isinstance(error, FileError) and isinstance(error.__cause__, OSError):
                    raise error.__cause__ from error  # said of the directory, not of a file that the user did not name
                raise
            try:
                _finish(target)
            except OSError as error:
                raise FileError(
                    f"cannot write {target / CONFIG}: {error.strerror}; the new policy loads all the same, save it again "
                    "to put its files in order"
                ) from error


def _finish(target: Path) -> None:
    """Give the config of the weights that are there its name, and remove what else killed saves left.

    Only the one writer of a directory does this, so nobody is in the middle of a save.
    """
    current, config = config_file(target), target / CONFIG
    if current != config:
        os.replace(current, os.path.realpath(config))
    for name in os.listdir(target):
        if name != current.name and PENDING.match(name.removeprefix(".") if name.startswith("..") else name):
            (target / name).unlink()


def refuse_misfits(missing: list[str], unknown: list[str], misshapen: list[str]) -> None:
    """Refuse tensors that are not just those that a config calls for; some of them by name."""
    if missing or unknown or misshapen:
        misfits = _some("missing ", missing) + _some("unknown ", unknown) + _some("", misshapen)
        raise PolicyError(f"the weights do not fit the policy's config: {'; '.join(misfits)}")


def _some(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what}{', '.join(shortened(name, 160) for name in names[:3])}{more}"] if names else []


def check_replaceable(target: Path) -> None:
    """Refuse a place that a policy cannot be saved to."""
    if target.is_dir():
        others = sorted(item.name for item in target.iterdir() if not _ours(item.name))
        if others:
            raise FileError(f"{target} holds {others[0]} besides a policy; give a place that holds nothing else")
    elif target.exists():
        raise FileError(f"{target} is a file, a policy is a directory; give another place")


def _ours(name: str) -> bool:
    """The two files, and what a killed save may have left: the next one sweeps it."""
    return name in (CONFIG, WEIGHTS) or re.match(r"\.(\.?config-|model\.safetensors\.)[0-9a-f]{16}", name) is not None

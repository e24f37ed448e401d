"""Arguments that several verbs share: policies, schedules and observations by name or file."""

from __future__ import annotations

import shlex
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from blockcache.errors import FileError, ObservationError

if TYPE_CHECKING:
    from torch import Tensor

    from blockcache.models.dpt import DiffusionTransformerPolicy
    from blockcache.schedule import Schedule


def load_schedule(source: str) -> Schedule:
    """A schedule file, or a printed schedule by name."""
    from blockcache.schedule import Schedule
    from blockcache.schedule.presets import published_names, published_schedule

    if source in published_names() and not Path(source).exists():
        return published_schedule(source)
    if not Path(source).exists():
        raise FileError(f"no schedule {source!r}: neither a file nor one of {', '.join(published_names())}")
    return Schedule.load(source)


def load_observations(policy: DiffusionTransformerPolicy, source: str, path: str | None) -> Tensor:
    """(N, n_obs_steps, obs_dim) from a .npz or .npy file, or those that ship with the policy."""
    import torch

    file = Path(path) if path else observations_of(source)
    if file is None:
        raise FileError(f"the policy {source} brings no observations; give some with --observations FILE.npz")
    try:
        loaded = np.load(file, allow_pickle=False)
        array = loaded if isinstance(loaded, np.ndarray) else loaded["obs"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FileError(
            f"cannot read observations from {file}: {error}; expected a .npz file with an array 'obs' of shape "
            f"(N, {policy.n_obs_steps}, {policy.obs_dim})"
        ) from error
    if array.ndim != 3 or array.shape[1:] != (policy.n_obs_steps, policy.obs_dim) or not len(array):
        raise ObservationError(
            f"observations in {file} have shape {array.shape}, expected (N, {policy.n_obs_steps}, {policy.obs_dim})"
        )
    if array.dtype.kind not in "fiu":
        raise ObservationError(f"observations in {file} are no numbers but {array.dtype}")
    return torch.as_tensor(array, dtype=torch.float32)


def observations_of(source: str) -> Path | None:
    """The observations that lie beside a policy's weights, if any."""
    from blockcache.models.dpt.checkpoint import policy_directory

    file = policy_directory(source) / "observations.npz"
    return file if file.exists() else None


def typed() -> str:
    """The running verb with what was given to it, as one would type it again."""
    context = click.get_current_context()
    words = ["blockcache", context.info_name or ""]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if isinstance(option, click.Argument):
            words.append(str(value))
        elif given([option.name or ""]):
            words += [option.opts[0], str(value)]
    return shlex.join(words)


def given(names: Iterable[str]) -> list[str]:
    """Those of the running verb's options that somebody asked for, as they are typed."""
    context = click.get_current_context()
    words = {option.name: option.opts[-1] for option in context.command.params}
    asked = click.core.ParameterSource.COMMANDLINE
    return [words[name] for name in names if context.get_parameter_source(name) is asked]


def refuse_sizes_beside_a_policy(sizes: Iterable[str]) -> None:
    """A policy brings its own shape."""
    if options := given(sorted(sizes)):
        raise click.UsageError(f"{', '.join(options)} and --policy exclude one another: a policy has its own shape")


threads_option = click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads for torch."
)

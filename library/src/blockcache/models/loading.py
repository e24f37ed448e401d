"""Policies by what a user names: a shipped one, a directory, a checkpoint, a Python entry, or the policy object itself."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from blockcache.errors import PolicyError, in_one_line, short
from blockcache.files import PathLike, no_writer
from blockcache.models import checkpoint
from blockcache.models.checkpoint import naming
from blockcache.models.dit import lerobot
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dpt import public
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.own_policy import OwnPolicy
from blockcache.models.policy_files import (
    CONFIG,
    SAMPLER,
    WEIGHTS,
    is_checkpoint,
    is_entry,
    policy_directory,
    read_config,
    remember_place,
    shared_file,
    split_entry,
)
from blockcache.models.port import Port
from blockcache.models.rdt.policy import RDTPolicy
from blockcache.models.registry import port_of
from blockcache.samplers import ChosenSampler

FAMILIES: dict[str, type[OwnPolicy]] = {
    policy.CONFIG.FAMILY: policy for policy in (DiffusionTransformerPolicy, DiTPolicy, RDTPolicy)
}


def load_policy(source: PathLike | Any) -> Any:
    """A policy, ready to be accelerated.

    Args:
        source: the name of a shipped policy; a policy directory (this package's, or LeRobot's with a multi_task_dit); a
            checkpoint of the public Diffusion Policy code (FILE.ckpt), which is converted and kept in the cache; a Python
            entry "module:function" whose function takes no arguments and returns a policy object; or such an object, which
            is given back after a look at it.
    """
    if not isinstance(source, str | os.PathLike):
        return port_of(source).policy
    if is_entry(source):
        return _called(str(source))
    if is_checkpoint(source):
        return public.load_checkpoint(source)
    with no_writer(policy_directory(source)):  # a save may be putting the files in order
        config = read_config(source)
    if lerobot.is_lerobot(config):
        policy: Any = lerobot.load_policy(source)
    else:
        family = config.get("family", DiffusionTransformerPolicy.CONFIG.FAMILY)
        if isinstance(family, str) and family not in FAMILIES:
            path, known = policy_directory(source) / CONFIG, ", ".join(sorted(FAMILIES))
            raise PolicyError(f"{path}: policies of family {short(family)} are not known; known are {known}")
        known_class = FAMILIES[family] if isinstance(family, str) else DiffusionTransformerPolicy
        policy = checkpoint.load(known_class, source)
    remember_place(policy, policy_directory(source))
    check_tuned(policy, policy_directory(source))
    return policy


def check_tuned(policy: Any, directory: Path) -> None:
    """Refuse a sampler that was chosen for other weights than those of the policy above, which a directory `tuned` without
    weights of its own takes: `sampler.json` says for which ones it was.

    Args:
        policy: what was loaded.
        directory: from where.
    """
    if shared_file(directory, WEIGHTS) == directory / WEIGHTS:
        return
    file, sampler = directory / SAMPLER, policy.sampler
    with naming(file, "sampler"):
        chosen = ChosenSampler.load(file) if file.is_file() else None
        vouched = chosen is not None and chosen.sampler == sampler and chosen.policy and chosen.policy.weights
        if not vouched and (sampler.type == "fitted" or sampler.timesteps is not None):
            raise PolicyError(
                f"it must say for which weights the sampler in {directory / CONFIG} was chosen, since those of "
                f"{directory.parent} are used; tune the policy again"
            )
        if chosen is not None:
            chosen.check_fit(port_of(policy).fingerprint)


def save_policy(policy: Any, directory: PathLike) -> None:
    """Write a policy's directory, which `load_policy` opens; an older one of that name stays whole until the new one is.

    Args:
        policy: the policy object (or its port); one that only its own code can save is refused.
        directory: where; one that holds anything but a policy is refused.
    """
    port = port_of(policy)
    if not port.save(directory):
        checkpoint.refuse_foreign(port.policy)


def open_port(source: PathLike | Any) -> Port:
    """The port of the policy that a user names.

    Args:
        source: whatever `load_policy` takes.
    """
    return port_of(load_policy(source))


def _called(entry: str) -> Any:
    module, name = split_entry(entry)
    try:
        make = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        reason = in_one_line(error)
        raise PolicyError(f"no policy {entry!r} ({reason}); expected module:function, importable here") from error
    try:
        made = make()
    except Exception as error:
        raise PolicyError(f"{entry} failed ({in_one_line(error)}); it must return a policy") from error
    return port_of(made).policy

"""What `tune` wrote into a directory, for any policy: its sampler and its schedule. Knows nothing of how they were found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockcache.attach.patching import Patches
from blockcache.errors import FileError
from blockcache.files import PathLike, exists
from blockcache.models.policy_files import SAMPLER, SCHEDULE, TUNING
from blockcache.models.port import Port
from blockcache.samplers import ChosenSampler, SamplerConfig
from blockcache.schedule import Schedule


def read_tuned(directory: PathLike, port: Port) -> tuple[SamplerConfig | None, Schedule | None]:
    """The sampler, None for the policy's own, and the schedule, None for every block at every step.

    Args:
        directory: That `tune` or `save_tuned` wrote.
        port: The policy, with its own sampler; a sampler that was chosen for other weights is refused.
    """
    place = Path(directory)
    if not exists(place / TUNING):
        raise FileError(f"{place} has no {TUNING}; name a directory that 'blockcache tune' wrote")
    sampler = None
    if exists(place / SAMPLER):
        chosen = ChosenSampler.load(place / SAMPLER)
        chosen.check_fit(port.fingerprint)
        sampler = chosen.sampler
    return sampler, Schedule.load(place / SCHEDULE) if exists(place / SCHEDULE) else None


def answer_for(policy: Any, port: Port, patches: Patches) -> None:
    """Plan that a port, of the same weights behind another sampler, answers in a policy's place."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return getattr(port.policy, port.entry)(*args, **kwargs)

    patches.replace_entry(policy, port.entry, lambda original: entry)


def tuned_port(directory: PathLike, port: Port) -> tuple[Port, Schedule | None]:
    """The policy with the tuned sampler, sharing its weights, and the schedule to follow."""
    sampler, schedule = read_tuned(directory, port)
    return port if sampler is None else port.with_sampler(sampler), schedule

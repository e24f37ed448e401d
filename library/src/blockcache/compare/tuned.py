"""What a tuning gives back, and the directory that it is written into; `engines.build.read_tuned` reads it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockcache.compare.methods import parse_method
from blockcache.errors import PolicyError
from blockcache.files import PathLike, exists, make_directory
from blockcache.models.checkpoint import check_replaceable
from blockcache.models.policy_files import CONFIG, SAMPLER, SCHEDULE, TUNING
from blockcache.models.registry import port_of
from blockcache.results.tuning import Tuning
from blockcache.samplers import ChosenSampler, SamplerConfig
from blockcache.schedule import Schedule

_OWN = (TUNING, SAMPLER, SCHEDULE)
"""What is written beside a policy."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """What `tune` gives back.

    Args:
        tuning: What was tried, what was chosen, and the evidence.
        chosen: The sampler with its evidence; None is the policy's own.
        schedule: For `accelerate`; None computes every block at every step.
    """

    tuning: Tuning
    chosen: ChosenSampler | None
    schedule: Schedule | None

    @property
    def sampler(self) -> SamplerConfig | None:
        """None is the policy's own. `accelerate(policy, tuned=...)` uses it with the schedule, once they are saved."""
        return None if self.chosen is None else self.chosen.sampler

    @property
    def replan(self) -> int | None:
        """Actions to execute of each chunk before the next is asked for; None for as many as the policy says."""
        executed = parse_method(self.tuning.chosen.method).executed
        return None if executed is None else executed.replan


def save_tuned(policy: Any, tuned: Tuned, directory: PathLike) -> bool:
    """Write a directory with the sampler, the schedule and the evidence, and the policy itself where it can be saved.

    Args:
        policy: The policy object that was tuned, or its port.
        tuned: What `tune` gave.
        directory: Where to write.

    Returns:
        Whether it is a policy directory: a policy that only its own code can save is left out.
    """
    port, place = port_of(policy), Path(directory)
    port = port if tuned.sampler is None else port.with_sampler(tuned.sampler)
    with suppress(PolicyError):  # only its own code says how many it executes; nothing of it is saved here
        port = port if tuned.replan is None else port.executing(tuned.replan)
    if exists(place / CONFIG):  # an earlier tuning, which is replaced; a policy is saved where nothing else lies
        check_replaceable(place, besides=_OWN)
    for name in _OWN:
        (place / name).unlink(missing_ok=True)
    whole = port.save(place)
    if not whole:
        make_directory(place)
    for name, value in ((SAMPLER, tuned.chosen), (SCHEDULE, tuned.schedule)):
        if value is not None:
            value.save(place / name)
    setting = {**tuned.tuning.setting, "holds_policy": whole, "replan": tuned.replan}
    replace(tuned.tuning, setting=setting).save(place / TUNING)
    return whole

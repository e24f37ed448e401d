"""What a part of a method is, and the parts that are samplers; `reuse_parts` has those that reuse block outputs.

A part is a frozen value that parses and names itself, has words for people, and resolves itself to a sampler or a schedule
with what a `Lender` knows of the policy. Knows nothing of policies or of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from blockcache.errors import BlockcacheError
from blockcache.samplers import ChosenSampler, SamplerConfig, sampler_names
from blockcache.schedule import Strategy
from blockcache.solvers import Recording

SPREAD = 0.7
"""The spread that samplers are fitted for by default."""
_STEPS = r"[1-9]\d{0,5}"


class MethodError(BlockcacheError):
    """A method that is unknown or whose parameters make no sense."""


class Resolved(NamedTuple):
    """What a method comes to for one policy: None is the policy's own sampler, and every block computed at every step."""

    sampler: SamplerConfig | None = None
    strategy: Strategy | None = None


class Lender(Protocol):
    """What parts need to know of a policy: `candidates.Calibrations` makes each of it at first use."""

    def recording(self, sampler: SamplerConfig | None, action_costs: bool = False) -> Recording: ...
    def sampler(self, kind: str, steps: int) -> SamplerConfig: ...
    def placed(self, kind: str, steps: int) -> ChosenSampler: ...
    def fitted(self, steps: int, spread: float) -> ChosenSampler: ...
    def sampler_from(self, path: str) -> SamplerConfig: ...
    def tuned(self, directory: str) -> Resolved: ...
    def block_costs(self) -> Mapping[str, float] | None: ...


class Part:
    """The base of all parts. `str` gives the text that `parse` reads.

    kind           what it is for people, such as "BAC"
    setting        what sets it apart from others of its kind, such as "S=10"
    variant        the rest of what it says, such as "n=5 MSE"
    off_the_shelf  whether it takes neither a calibration nor a file
    tuned_in       the directory of `blockcache tune` that it stands for
    """

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def setting(self) -> str:
        return ""

    @property
    def variant(self) -> str:
        return ""

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.kind, self.setting, self.variant)))

    @property
    def off_the_shelf(self) -> bool:
        return False

    @property
    def tuned_in(self) -> str | None:
        return None

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        """`before` with what this part adds."""
        raise NotImplementedError

    def check_files(self) -> None:
        """Refuse a file that cannot be read."""


class SamplerPart(Part):
    """`pattern` is that of its text, its groups are the fields; `solver` is what it is called in "BAC on DDIM"; `by_fit`
    says that it is found by a fit, which raises FitError where it does not beat its start."""

    pattern: ClassVar[str]
    by_fit: ClassVar[bool] = False

    @property
    def solver(self) -> str:
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return f"{self.solver}-N"

    @classmethod
    def from_groups(cls, groups: Mapping[str, Any]) -> SamplerPart:
        """From the groups of the pattern; a MethodError where they make no sense."""
        return cls(**groups)


@dataclass(frozen=True)
class FewerSteps(SamplerPart):
    """A sampler by name with fewer steps, which lie where that sampler puts them, or are placed for the policy."""

    sampler: str
    steps: int
    placed: bool = False
    pattern = rf"(?P<sampler>{'|'.join(map(re.escape, sampler_names()))})-(?P<steps>{_STEPS})(?P<placed>:placed)?"

    @classmethod
    def from_groups(cls, groups: Mapping[str, Any]) -> SamplerPart:
        return cls(groups["sampler"], int(groups["steps"]), groups["placed"] is not None)

    def __str__(self) -> str:
        return f"{self.sampler}-{self.steps}{':placed' if self.placed else ''}"

    @property
    def _printed(self) -> str:
        """As papers write it: "DDPM", "SDE-DPM-Solver++"."""
        return self.sampler.upper().replace("DPMSOLVER", "DPM-Solver")

    @property
    def solver(self) -> str:
        return f"placed {self._printed}" if self.placed else self._printed

    @property
    def setting(self) -> str:
        return f"N={self.steps}"

    @property
    def label(self) -> str:
        return f"{self._printed}-{self.steps}{' placed' if self.placed else ''}"

    @property
    def off_the_shelf(self) -> bool:
        return not self.placed

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        if self.placed:
            return before._replace(sampler=lender.placed(self.sampler, self.steps).sampler)
        return before._replace(sampler=lender.sampler(self.sampler, self.steps))


@dataclass(frozen=True)
class FittedSteps(SamplerPart):
    """A sampler whose constants are all fitted to the policy; the fields are those of `fit_sampler`."""

    steps: int
    spread: float = SPREAD
    pattern = rf"fitted-(?P<steps>{_STEPS})(?::(?P<settings>[^+]*))?"
    solver, by_fit = "fitted", True

    @classmethod
    def from_groups(cls, groups: Mapping[str, Any]) -> SamplerPart:
        steps, settings = int(groups["steps"]), groups["settings"]
        if settings is None:
            return cls(steps)
        name, _, value = settings.partition("=")
        if name != "spread" or not re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII) or not 0 < float(value) <= 1:
            raise MethodError(f"fitted-N takes spread=..., a number above 0 and up to 1, such as 0.7; got {settings!r}")
        return cls(steps, float(value))

    def __str__(self) -> str:
        return f"fitted-{self.steps}" + ("" if self.spread == SPREAD else f":spread={self.spread:g}")

    @property
    def label(self) -> str:
        return str(self).replace(":", " ")

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(sampler=lender.fitted(self.steps, self.spread).sampler)


@dataclass(frozen=True)
class SamplerFile(SamplerPart):
    """A sampler file, such as `place_steps` and `fit_sampler` make."""

    path: str
    pattern = r"sampler:(?P<path>.+?\.json)"
    solver, kind = "a sampler file", "sampler file"

    def __str__(self) -> str:
        return f"sampler:{self.path}"

    @property
    def label(self) -> str:
        return self.path

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(sampler=lender.sampler_from(self.path))

    def check_files(self) -> None:
        SamplerConfig.load(self.path)


@dataclass(frozen=True)
class TunedFiles(SamplerPart):
    """The sampler and the schedule in a directory that `tune` wrote, whichever are there."""

    directory: str
    pattern = r"tuned:(?P<directory>.+)"
    solver = kind = label = "tuned"

    def __str__(self) -> str:
        return f"tuned:{self.directory}"

    @property
    def tuned_in(self) -> str:
        return self.directory

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return lender.tuned(self.directory)


SAMPLER_PARTS: tuple[type[SamplerPart], ...] = (TunedFiles, FewerSteps, FittedSteps, SamplerFile)

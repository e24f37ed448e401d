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
from blockcache.palette import Colour, Marker
from blockcache.samplers import ChosenSampler, SamplerConfig, sampler_names
from blockcache.schedule import Strategy
from blockcache.solvers import Recording
from blockcache_runtime.execution import AS_TRAINED, Execution

SPREAD = 0.7
"""The spread that samplers are fitted for by default."""
_STEPS = r"[1-9]\d{0,5}"


class MethodError(BlockcacheError):
    """A method that is unknown or whose parameters make no sense."""


class Resolved(NamedTuple):
    """What a method comes to for one policy: None is the policy's own sampler, and every block computed at every step."""

    sampler: SamplerConfig | None = None
    strategy: Strategy | None = None
    execution: Execution = AS_TRAINED


class Lender(Protocol):
    """What parts need to know of a policy: `candidates.Calibrations` makes each of it at first use."""

    def recording(self, sampler: SamplerConfig | None, action_costs: bool = False) -> Recording: ...
    def sampler(self, kind: str, steps: int) -> SamplerConfig: ...
    def placed(self, kind: str, steps: int) -> ChosenSampler: ...
    def fitted(self, steps: int, spread: float) -> ChosenSampler: ...
    def sampler_from(self, path: str) -> SamplerConfig: ...
    def tuned(self, directory: str) -> Resolved: ...
    def block_costs(self) -> Mapping[str, float] | None: ...


class Look(NamedTuple):
    """How pictures show a kind; no two that stand beside one another differ by colour alone.

    Args:
        colour: Of its lines and points.
        marker: The shape of its points.
        rank: Its place in legends.
    """

    colour: Colour
    marker: Marker
    rank: int


OTHERS = Look("grey", "circle", 14)
"""What pictures do not tell apart, last in legends."""


@dataclass(frozen=True)
class Facts:
    """What a part is to people.

    Args:
        kind: What it is, such as "BAC".
        look: Of its kind.
        word: What its name begins with, such as "bac" or "ddim".
        setting: What sets it apart from others of its kind, such as "S=10".
        variant: The rest of what it says, such as "n=5 MSE".
        metric: What a schedule is solved by, such as "MSE", unless by the cosine.
        label: All of it; those three unless given.
        solver: What a sampler is called in "BAC on DDIM".
        updates: S: how often each block is computed, where it says so.
        off_the_shelf: Whether it takes neither a calibration nor a file.
        by_fit: Whether a fit finds it, which raises FitError where it does not beat its start.
        tuned_in: The directory of `blockcache tune` that it stands for.
    """

    kind: str
    look: Look
    word: str = ""
    setting: str = ""
    variant: str = ""
    metric: str = ""
    label: str = ""
    solver: str = ""
    updates: int | None = None
    off_the_shelf: bool = False
    by_fit: bool = False
    tuned_in: str | None = None

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", " ".join(filter(None, (self.kind, self.setting, self.variant))))


class Part:
    """The base of all parts. `str` gives the text that `pattern` fits; its groups are the arguments of `parse`."""

    pattern: ClassVar[str]

    @classmethod
    def parse(cls, **groups: Any) -> Part:
        """From the groups of the pattern; a MethodError where they make no sense."""
        return cls(**groups)

    @property
    def facts(self) -> Facts:
        raise NotImplementedError

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        """`before` with what this part adds."""
        raise NotImplementedError

    def check_files(self) -> None:
        """Refuse a file that cannot be read."""


@dataclass(frozen=True)
class FewerSteps(Part):
    """A sampler by name with fewer steps, which lie where that sampler puts them, or are placed for the policy."""

    sampler: str
    steps: int
    placed: bool = False
    looks: ClassVar[Mapping[tuple[str, bool], Look]] = {
        ("ddpm", False): Look("blue", "down", 5),
        ("ddim", False): Look("sky", "up", 6),
        ("dpmsolver++", False): Look("blue", "up", 7),
        ("sde-dpmsolver++", False): Look("grey", "cross", 8),
        ("ddpm", True): Look("pink", "cross", 9),
    }
    pattern = rf"(?P<sampler>{'|'.join(map(re.escape, sampler_names()))})-(?P<steps>{_STEPS})(?P<placed>:placed)?"

    @classmethod
    def parse(cls, **groups: Any) -> Part:
        return cls(groups["sampler"], int(groups["steps"]), groups["placed"] is not None)

    def __str__(self) -> str:
        return f"{self.sampler}-{self.steps}{':placed' if self.placed else ''}"

    @property
    def facts(self) -> Facts:
        printed = self.sampler.upper().replace("DPMSOLVER", "DPM-Solver")  # as papers write it
        solver = f"placed {printed}" if self.placed else printed
        label = f"{printed}-{self.steps}{' placed' if self.placed else ''}"
        return Facts(
            f"{solver}-N",
            self.looks.get((self.sampler, self.placed), OTHERS),  # samplers of other packages too
            self.sampler,
            setting=f"N={self.steps}",
            label=label,
            solver=solver,
            off_the_shelf=not self.placed,
        )

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        if self.placed:
            return before._replace(sampler=lender.placed(self.sampler, self.steps).sampler)
        return before._replace(sampler=lender.sampler(self.sampler, self.steps))


@dataclass(frozen=True)
class FittedSteps(Part):
    """A sampler whose constants are all fitted to the policy; the fields are those of `fit_sampler`."""

    steps: int
    spread: float = SPREAD
    pattern = rf"fitted-(?P<steps>{_STEPS})(?::(?P<settings>[^+]*))?"

    @classmethod
    def parse(cls, **groups: Any) -> Part:
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
    def facts(self) -> Facts:
        look, label = Look("amber", "x", 10), str(self).replace(":", " ")
        return Facts("fitted-N", look, "fitted", label=label, solver="fitted", by_fit=True)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(sampler=lender.fitted(self.steps, self.spread).sampler)


@dataclass(frozen=True)
class NamedPart(Part):
    """A part that is a name, such as a file's, behind a word that says what it is the name of."""

    name: str
    word: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.word}{self.name}"


class SamplerFile(NamedPart):
    """A sampler file, such as `place_steps` and `fit_sampler` make."""

    word, pattern = "sampler:", r"sampler:(?P<name>.+?\.json)"

    @property
    def facts(self) -> Facts:
        return Facts("sampler file", OTHERS, label=self.name, solver="a sampler file")

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(sampler=lender.sampler_from(self.name))

    def check_files(self) -> None:
        SamplerConfig.load(self.name)


class TunedFiles(NamedPart):
    """The sampler and the schedule in a directory that `tune` wrote, whichever are there."""

    word, pattern = "tuned:", r"tuned:(?P<name>.+)"

    @property
    def facts(self) -> Facts:
        return Facts("tuned", Look("orange", "star", 12), solver="tuned", tuned_in=self.name)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return lender.tuned(self.name)


SAMPLER_PARTS: tuple[type[Part], ...] = (TunedFiles, FewerSteps, FittedSteps, SamplerFile)

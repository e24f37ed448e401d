"""Methods by name: what a user writes, parsed to a frozen value; `candidates` makes it ready for a policy.

`NAMES` lists them. Knows nothing of policies or of files: a schedule file is read when it is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from blockcache.errors import BlockcacheError
from blockcache.samplers import sampler_names
from blockcache.solvers import OBJECTIVES
from blockcache.solvers.metrics import METRICS
from blockcache.solvers.solve import BUDGET

NAMES = """\
  full                          everything computed; always among the methods
  uniform:S=10  unified:S=10    schedules, solved from a calibration on the policy's observations;
  blockwise:S=10  bac:S=10,n=5  also metric=cosine|mse|l1|wasserstein, objective=anchor|consecutive,
                                last=1 (all blocks at the last step too, as in BAC's released code)
  action:budget=0.15            where the executed action needs it, at that share of the FLOPs; or S=10 updates on average
  teacache:threshold=0.1        decides while it runs
  ddim-16  sde-dpmsolver++-8    fewer denoising steps instead, by any sampler's name
  ddpm-8:placed                 the same with its steps placed for the policy, on its observations
  fitted-5  fitted-5:spread=1   all constants of so many steps fitted to the policy; below 1 (0.7) its actions are sharper
  sampler:fitted.json           a sampler file, such as 'policy place' and 'policy fit' write
  tuned:DIR                     what 'tune' wrote into that directory for the policy
  ddim-40+bac:S=5,n=3           both, calibrated with that sampler; also ddpm-10+action:budget=0.6
  schedule.json                 a schedule file, also behind a sampler"""


SPREAD = 0.7
"""What is fitted for unless somebody says otherwise."""


class MethodError(BlockcacheError):
    """A method that is unknown or whose parameters make no sense."""


@dataclass(frozen=True)
class FewerSteps:
    """Another sampler, with fewer steps; where they lie is the sampler's own way, or found for the policy."""

    kind: str
    steps: int
    placed: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.steps}{':placed' if self.placed else ''}"


@dataclass(frozen=True)
class FittedSteps:
    """A sampler that is fitted to the policy; the fields are those of `fit_sampler`."""

    steps: int
    spread: float = SPREAD

    def __str__(self) -> str:
        return f"fitted-{self.steps}" + ("" if self.spread == SPREAD else f":spread={self.spread:g}")


@dataclass(frozen=True)
class SamplerFile:
    path: str

    def __str__(self) -> str:
        return f"sampler:{self.path}"


@dataclass(frozen=True)
class TunedFiles:
    """The sampler and the schedule in a directory that `tune` wrote, whichever are there."""

    directory: str

    def __str__(self) -> str:
        return f"tuned:{self.directory}"


@dataclass(frozen=True)
class Solved:
    """A schedule to be solved from a calibration; the fields are those of `solve`."""

    method: str
    updates: int = 10
    union: int = 5
    metric: str = "cosine"
    objective: str = "anchor"
    last: bool = False

    def __str__(self) -> str:
        parts = [f"S={self.updates}"]
        parts += [f"n={self.union}"] if self.method == "bac" else []
        parts += [f"metric={self.metric}"] if self.metric != "cosine" else []
        parts += [f"objective={self.objective}"] if self.objective != "anchor" else []
        parts += ["last=1"] if self.last else []
        return f"{self.method}:{','.join(parts)}"


@dataclass(frozen=True)
class ActionBudget:
    """A schedule to be solved from action costs: the share of the FLOPs, or updates per block on average."""

    budget: float | None = None
    updates: int | None = None

    def __post_init__(self) -> None:
        if self.budget is None and self.updates is None:
            object.__setattr__(self, "budget", BUDGET)

    def __str__(self) -> str:
        return f"action:S={self.updates}" if self.budget is None else f"action:budget={self.budget!r}"


@dataclass(frozen=True)
class TeaCache:
    threshold: float = 0.1

    def __str__(self) -> str:
        return f"teacache:threshold={self.threshold!r}"


@dataclass(frozen=True)
class ScheduleFile:
    path: str

    def __str__(self) -> str:
        return self.path


Reused: TypeAlias = Solved | ActionBudget | TeaCache | ScheduleFile


@dataclass(frozen=True)
class Method:
    """`sampler` None is the policy's own; `reuse` None computes everything. Its `name` parses to the method again."""

    sampler: FewerSteps | FittedSteps | SamplerFile | TunedFiles | None = None
    reuse: Reused | None = None

    @property
    def name(self) -> str:
        return "+".join(str(part) for part in (self.sampler, self.reuse) if part is not None) or "full"


FULL = Method()
_SOLVED = {  # method -> the parameters that it takes
    "uniform": ("S", "last"),
    "unified": ("S", "metric", "objective", "last"),
    "blockwise": ("S", "metric", "objective", "last"),
    "bac": ("S", "n", "metric", "objective", "last"),
}
_OTHERS = {"action": ("budget", "S"), "teacache": ("threshold",)}
_FIELDS = {"S": "updates", "n": "union"}


def parse_method(text: str) -> Method:
    """Strict: anything that is not exactly a method is refused with one sentence."""
    if text.startswith("tuned:") and text != "tuned:":
        return Method(TunedFiles(text.removeprefix("tuned:")))
    names = "|".join(map(re.escape, sampler_names()))
    found = re.fullmatch(
        rf"(?:(?P<kind>{names})-(?P<steps>[1-9]\d{{0,5}})(?P<placed>:placed)?|fitted-(?P<fitted>[1-9]\d{{0,5}})(?::(?P<settings>[^+]*))?"
        r"|sampler:(?P<file>.+?\.json))(?:\+(?P<reuse>.+))?",
        text,
    )
    if found is None:
        return FULL if text == "full" else Method(reuse=_parse_reuse(text, text))
    sampler: FewerSteps | FittedSteps | SamplerFile
    if found["file"] is not None:
        sampler = SamplerFile(found["file"])
    elif found["fitted"] is not None:
        sampler = FittedSteps(int(found["fitted"]), **_parse_spread(found["settings"], text))
    else:
        sampler = FewerSteps(found["kind"], int(found["steps"]), found["placed"] is not None)
    return Method(sampler) if found["reuse"] is None else Method(sampler, _parse_reuse(found["reuse"], text))


def _parse_spread(settings: str | None, text: str) -> dict[str, float]:
    if settings is None:
        return {}
    name, _, value = settings.partition("=")
    if name != "spread" or not re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII) or not 0 < float(value) <= 1:
        raise MethodError(
            f"method {text!r}: fitted-N takes spread=..., a number above 0 and up to 1, such as 0.7; got {settings!r}"
        )
    return {"spread": float(value)}


def _parse_reuse(part: str, text: str) -> Reused:
    if part.endswith(".json"):
        return ScheduleFile(part)
    kind, colon, rest = part.partition(":")
    takes = _SOLVED | _OTHERS
    if kind not in takes:
        raise MethodError(
            f"unknown method {text!r}; known are full, {', '.join(takes)}, "
            f"{', '.join(f'{name}-N' for name in sampler_names())}, fitted-N, a schedule file (.json), and a sampler with "
            "one of these such as ddim-40+bac:S=5,n=3"
        )
    known = takes[kind]
    values: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        name, equals, value = item.partition("=")
        if name not in known or not equals or name in values:
            raise MethodError(
                f"method {text!r}: {kind} takes {', '.join(f'{known_name}=...' for known_name in known)}, each at most "
                f"once and separated by commas, got {item!r}"
            )
        values[name] = _parse_value(name, value, text)
    settings = {_FIELDS.get(name, name): value for name, value in values.items()}
    if kind == "action":
        if len(settings) > 1:
            raise MethodError(f"method {text!r}: action takes budget=... or S=..., not both")
        return ActionBudget(**settings)
    return TeaCache(**settings) if kind == "teacache" else Solved(kind, **settings)


def _parse_value(name: str, value: str, text: str) -> int | float | str:
    choices = {"metric": tuple(METRICS), "objective": OBJECTIVES}
    if name in choices:
        if value in choices[name]:
            return value
        expected = f"one of {', '.join(choices[name])}"
    elif name == "last":
        if value in ("0", "1"):
            return value == "1"
        expected = "0 or 1"
    elif name in ("threshold", "budget"):
        if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d\d?)?", value, re.ASCII) and (
            name == "threshold" or 0 < float(value) <= 1
        ):
            return float(value)
        expected = {"threshold": "a number of at least 0, such as 0.1", "budget": "a number above 0 and at most 1"}[
            name
        ]
    else:
        least = 1 if name == "S" else 0
        if re.fullmatch(r"\d{1,6}", value, re.ASCII) and int(value) >= least:
            return int(value)
        expected = f"a whole number from {least} to 999999"
    raise MethodError(f"method {text!r}: {name} must be {expected}, got {value!r}")

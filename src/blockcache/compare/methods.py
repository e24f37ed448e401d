"""Methods by name: what a user writes, parsed to a frozen value; `candidates` makes it ready for a policy.

`NAMES` lists them. Knows nothing of policies or of files: a schedule file is read when it is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from blockcache.errors import BlockcacheError
from blockcache.samplers import SAMPLERS
from blockcache.solvers import OBJECTIVES
from blockcache.solvers.metrics import METRICS
from blockcache.solvers.solve import BUDGET

NAMES = """\
  full                          everything computed; always among the methods
  uniform:S=10  unified:S=10    schedules, solved from a calibration on the policy's observations;
  blockwise:S=10  bac:S=10,n=5  also metric=cosine|mse|l1|wasserstein, objective=anchor|consecutive
  action:budget=0.15            where the executed action needs it, at that share of the FLOPs; or S=10 updates on average
  teacache:threshold=0.1        decides while it runs
  ddim-16  sde-dpmsolver++-8    fewer denoising steps instead, by any sampler's name
  ddim-40+bac:S=5,n=3           both, calibrated with that sampler; also ddpm-10+action:budget=0.6
  schedule.json                 a schedule file, also behind a sampler"""


class MethodError(BlockcacheError):
    """A method that is unknown or whose parameters make no sense."""


@dataclass(frozen=True)
class FewerSteps:
    """Another sampler, with fewer steps."""

    kind: str
    steps: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.steps}"


@dataclass(frozen=True)
class Solved:
    """A schedule to be solved from a calibration; the fields are those of `solve`."""

    method: str
    updates: int = 10
    union: int = 5
    metric: str = "cosine"
    objective: str = "anchor"

    def __str__(self) -> str:
        parts = [f"S={self.updates}"]
        parts += [f"n={self.union}"] if self.method == "bac" else []
        parts += [f"metric={self.metric}"] if self.metric != "cosine" else []
        parts += [f"objective={self.objective}"] if self.objective != "anchor" else []
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

    sampler: FewerSteps | None = None
    reuse: Reused | None = None

    @property
    def name(self) -> str:
        return "+".join(str(part) for part in (self.sampler, self.reuse) if part is not None) or "full"


FULL = Method()
_SOLVED = {  # method -> the parameters that it takes
    "uniform": ("S",),
    "unified": ("S", "metric", "objective"),
    "blockwise": ("S", "metric", "objective"),
    "bac": ("S", "n", "metric", "objective"),
}
_OTHERS = {"action": ("budget", "S"), "teacache": ("threshold",)}
_FIELDS = {"S": "updates", "n": "union"}


def parse_method(text: str) -> Method:
    """Strict: anything that is not exactly a method is refused with one sentence."""
    names = "|".join(map(re.escape, SAMPLERS))
    found = re.fullmatch(rf"({names})-([1-9]\d*)(?:\+(.+))?", text)
    if found is None:
        return FULL if text == "full" else Method(reuse=_parse_reuse(text, text))
    sampler = FewerSteps(found[1], int(found[2]))
    return Method(sampler) if found[3] is None else Method(sampler, _parse_reuse(found[3], text))


def _parse_reuse(part: str, text: str) -> Reused:
    if part.endswith(".json"):
        return ScheduleFile(part)
    kind, colon, rest = part.partition(":")
    takes = _SOLVED | _OTHERS
    if kind not in takes:
        raise MethodError(
            f"unknown method {text!r}; known are full, {', '.join(takes)}, "
            f"{', '.join(f'{name}-N' for name in SAMPLERS)}, a schedule file (.json), and a sampler with one of these "
            "such as ddim-40+bac:S=5,n=3"
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
        if re.fullmatch(r"\d+", value, re.ASCII) and int(value) >= least:
            return int(value)
        expected = f"a whole number of at least {least}"
    raise MethodError(f"method {text!r}: {name} must be {expected}, got {value!r}")

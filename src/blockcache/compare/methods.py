"""Methods by name: what a user writes, parsed to a frozen value; `candidates` makes it ready for a policy.

`NAMES` lists them. Knows nothing of policies or of files: a schedule file is read when it is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from blockcache.errors import BlockcacheError
from blockcache.samplers import SAMPLERS
from blockcache.solvers import OBJECTIVES
from blockcache.solvers.metrics import METRICS

NAMES = """\
  full                          everything computed; always among the methods
  uniform:S=10  unified:S=10    schedules, solved from a calibration on the policy's observations;
  blockwise:S=10  bac:S=10,n=5  also metric=cosine|mse|l1|wasserstein, objective=anchor|consecutive,
                                last=1 (all blocks at the last step too, as in BAC's released code)
  teacache:threshold=0.1        decides while it runs
  ddim-16  sde-dpmsolver++-8    fewer denoising steps instead, by any sampler's name
  ddim-40+bac:S=5,n=3           both, calibrated with that sampler
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
    last: bool = False

    def __str__(self) -> str:
        parts = [f"S={self.updates}"]
        parts += [f"n={self.union}"] if self.method == "bac" else []
        parts += [f"metric={self.metric}"] if self.metric != "cosine" else []
        parts += [f"objective={self.objective}"] if self.objective != "anchor" else []
        parts += ["last=1"] if self.last else []
        return f"{self.method}:{','.join(parts)}"


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


@dataclass(frozen=True)
class Method:
    """`sampler` None is the policy's own; `reuse` None computes everything. Its `name` parses to the method again."""

    sampler: FewerSteps | None = None
    reuse: Solved | TeaCache | ScheduleFile | None = None

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
_FIELDS = {"S": "updates", "n": "union"}


def parse_method(text: str) -> Method:
    """Strict: anything that is not exactly a method is refused with one sentence."""
    names = "|".join(map(re.escape, SAMPLERS))
    found = re.fullmatch(rf"({names})-([1-9]\d*)(?:\+(.+))?", text)
    if found is None:
        return FULL if text == "full" else Method(reuse=_parse_reuse(text, text))
    sampler = FewerSteps(found[1], int(found[2]))
    return Method(sampler) if found[3] is None else Method(sampler, _parse_reuse(found[3], text))


def _parse_reuse(part: str, text: str) -> Solved | TeaCache | ScheduleFile:
    if part.endswith(".json"):
        return ScheduleFile(part)
    kind, colon, rest = part.partition(":")
    if kind not in _SOLVED and kind != "teacache":
        raise MethodError(
            f"unknown method {text!r}; known are full, {', '.join(_SOLVED)}, teacache, "
            f"{', '.join(f'{name}-N' for name in SAMPLERS)}, a schedule file (.json), and a sampler with one of these "
            "such as ddim-40+bac:S=5,n=3"
        )
    known = _SOLVED.get(kind, ("threshold",))
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
    elif name == "threshold":
        if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d\d?)?", value, re.ASCII):
            return float(value)
        expected = "a number of at least 0, such as 0.1"
    else:
        least = 1 if name == "S" else 0
        if re.fullmatch(r"\d+", value, re.ASCII) and int(value) >= least:
            return int(value)
        expected = f"a whole number of at least {least}"
    raise MethodError(f"method {text!r}: {name} must be {expected}, got {value!r}")

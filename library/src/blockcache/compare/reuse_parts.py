"""The parts of a method that reuse block outputs: schedules by BAC and others, action costs, TeaCache, files. And the part
that says how chunks are executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from blockcache.compare.parts import OTHERS, Facts, Lender, Look, MethodError, NamedPart, Part, Resolved
from blockcache.schedule import Schedule
from blockcache.solvers import OBJECTIVES, fit_teacache, solve
from blockcache.solvers.recording import METRICS
from blockcache.solvers.solve import BUDGET, UNION, UPDATES
from blockcache_runtime.execution import Execution

_METRICS = {"mse": "MSE", "l1": "L1", "wasserstein": "Wasserstein"}


class Setting(NamedTuple):
    """A `name=value` of a part: the field that it sets; how it is read, None where that fails; and what it must be."""

    field: str
    read: Callable[[str], Any]
    expected: str


def _whole(least: int) -> tuple[Callable[[str], Any], str]:
    def read(text: str) -> int | None:
        return int(text) if re.fullmatch(r"\d{1,6}", text, re.ASCII) and int(text) >= least else None

    return read, f"a whole number from {least} to 999999"


def _number(fits: Callable[[float], bool]) -> Callable[[str], Any]:
    def read(text: str) -> float | None:
        known = re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d\d?)?", text, re.ASCII) is not None
        return float(text) if known and fits(float(text)) else None

    return read


_SETTINGS = {
    "S": Setting("updates", *_whole(1)),
    "n": Setting("union", *_whole(0)),
    "metric": Setting("metric", {name: name for name in METRICS}.get, f"one of {', '.join(METRICS)}"),
    "objective": Setting("objective", {name: name for name in OBJECTIVES}.get, f"one of {', '.join(OBJECTIVES)}"),
    "last": Setting("last", {"0": False, "1": True}.get, "0 or 1"),
    "budget": Setting("budget", _number(lambda value: 0 < value <= 1), "a number above 0 and at most 1"),
    "threshold": Setting("threshold", _number(lambda value: True), "a number of at least 0, such as 0.1"),
    "replan": Setting("replan", *_whole(1)),
    "temperature": Setting("temperature", _number(lambda value: value <= 10), "a number from 0 to 10, such as 0.5"),
    "candidates": Setting("candidates", *_whole(2)),
}


class PartWithSettings(Part):
    """A word and, behind a colon, settings by the names that it `takes`."""

    word: ClassVar[str] = ""
    takes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "pattern" not in vars(cls):
            cls.pattern = rf"{cls.word}(?::(?P<settings>(?s:.*)))?"

    @classmethod
    def parse(cls, **groups: Any) -> Part:
        values: dict[str, Any] = {}
        for item in () if groups["settings"] is None else groups["settings"].split(","):
            name, equals, value = item.partition("=")
            if name not in cls.takes or not equals or _SETTINGS[name].field in values:
                raise MethodError(
                    f"{cls.word} takes {', '.join(f'{known}=...' for known in cls.takes)}, each at most once and separated "
                    f"by commas, got {item!r}"
                )
            found = _SETTINGS[name].read(value)
            if found is None:
                raise MethodError(f"{name} must be {_SETTINGS[name].expected}, got {value!r}")
            values[_SETTINGS[name].field] = found
        return cls(**values)


@dataclass(frozen=True)
class Solved(PartWithSettings):
    """A schedule by one of the paper's methods, solved from a calibration; the fields are those of `solve`."""

    updates: int = UPDATES
    union: int = UNION
    metric: str = "cosine"
    objective: str = "anchor"
    last: bool = False
    kind: ClassVar[str] = ""
    look: ClassVar[Look]
    takes: ClassVar[tuple[str, ...]] = ("S", "metric", "objective", "last")

    def __str__(self) -> str:
        given = {"S": self.updates, "n": self.union, "metric": self.metric, "objective": self.objective, "last": 1}
        left_out = {"metric": self.metric == "cosine", "objective": self.objective == "anchor", "last": not self.last}
        return f"{self.word}:" + ",".join(f"{name}={given[name]}" for name in self.takes if not left_out.get(name))

    @property
    def facts(self) -> Facts:
        metric = _METRICS.get(self.metric, "")
        words = [f"n={self.union}"] if "n" in self.takes else []
        words += [metric] if metric else []
        words += [self.objective] if self.objective != "anchor" else []
        words += ["and the last step"] if self.last else []
        setting, variant = f"S={self.updates}", " ".join(words)
        return Facts(self.kind, self.look, self.word, setting, variant, metric, updates=self.updates)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        recording = lender.recording(before.sampler)
        settings = self.updates, self.union, self.metric, self.word, self.objective, self.last
        return before._replace(strategy=solve(recording, *settings))


class Uniform(Solved):
    word, kind, takes = "uniform", "Uniform", ("S", "last")
    look = Look("grey", "square", 4)


class Unified(Solved):
    word, kind, look = "unified", "Unified ACS", OTHERS


class BlockWise(Solved):
    word, kind, look = "blockwise", "Block-wise ACS", OTHERS


class BAC(Solved):
    word, kind, takes = "bac", "BAC", ("S", "n", "metric", "objective", "last")
    look = Look("orange", "circle", 1)


@dataclass(frozen=True)
class ActionBudget(PartWithSettings):
    """A schedule from action costs: the share of the FLOPs, or updates per block on average."""

    budget: float | None = None
    updates: int | None = None
    word, takes = "action", ("budget", "S")

    def __post_init__(self) -> None:
        if self.budget is not None and self.updates is not None:
            raise MethodError("action takes budget=... or S=..., not both")
        if self.budget is None and self.updates is None:
            object.__setattr__(self, "budget", BUDGET)

    def __str__(self) -> str:
        return f"action:S={self.updates}" if self.budget is None else f"action:budget={self.budget!r}"

    @property
    def facts(self) -> Facts:
        setting = f"S={self.updates}" if self.budget is None else f"{self.budget:g}"
        return Facts("Action costs", Look("green", "diamond", 2), self.word, setting, updates=self.updates)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        recording = lender.recording(before.sampler, action_costs=True)
        costs = None if self.budget is None else lender.block_costs()
        schedule = solve(recording, self.updates, method="action", budget=self.budget, costs=costs)
        return before._replace(strategy=schedule)


@dataclass(frozen=True)
class TeaCache(PartWithSettings):
    """TeaCache's rule, which decides while it runs."""

    threshold: float = 0.1
    word, takes = "teacache", ("threshold",)

    def __str__(self) -> str:
        return f"teacache:threshold={self.threshold!r}"

    @property
    def facts(self) -> Facts:
        return Facts("TeaCache", Look("green", "cross", 3), self.word, f"{self.threshold:g}")

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(strategy=fit_teacache(lender.recording(before.sampler), self.threshold))


class ScheduleFile(NamedPart):
    """A schedule file."""

    pattern = r"(?P<name>(?s:.*)\.json)"

    @property
    def facts(self) -> Facts:
        return Facts("schedule file", OTHERS, label=self.name)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(strategy=Schedule.load(self.name))

    def check_files(self) -> None:
        Schedule.load(self.name)


class UnknownPart(NamedPart):
    """What a file of another version names; it can be shown, and not run."""

    @property
    def facts(self) -> Facts:
        return Facts("another method", OTHERS, label=self.name)

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        raise MethodError(f"{self.name!r} is no method that this version knows")


@dataclass(frozen=True)
class Executed(PartWithSettings):
    """How chunks are asked for and drawn: the last part of a method. The fields are those of `Execution`."""

    replan: int | None = None
    temperature: float = 1.0
    candidates: int = 1
    word, takes = "execution", ("replan", "temperature", "candidates")
    pattern = r"(?:(?P<before>(?s:.+))\+)?(?P<settings>(?:replan|temperature|candidates)=(?s:.*))"

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in self.execution.describe().items())

    @property
    def execution(self) -> Execution:
        """As it is handed on."""
        return Execution(self.replan, self.temperature, self.candidates)

    @property
    def facts(self) -> Facts:
        return Facts("other execution", Look("sky", "star", 13), label=str(self).replace(",", " "))

    def resolve(self, lender: Lender, before: Resolved) -> Resolved:
        return before._replace(execution=replace(self.execution, replan=self.replan or before.execution.replan))


REUSE_PARTS: tuple[type[Part], ...] = (ScheduleFile, Uniform, Unified, BlockWise, BAC, ActionBudget, TeaCache)

"""What all samplers have in common: settings that are checked when made, their dict and their file.

A sampler is a frozen dataclass that names itself (`type`), says what its settings may be, and writes down its table.
Making the class is all it takes to register it. Knows nothing of any sampler, of torch or of the denoiser.
"""

from __future__ import annotations

import functools
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from blockcache.errors import SamplerError, short
from blockcache.files import Format, PathLike
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.samplers.coefficients import Array, SamplerTable

# a sampler that was chosen for one policy also says for which, and why
FORMAT = Format(
    "blockcache.sampler",
    "sampler",
    {"sampler": dict, "policy": dict, "evidence": dict},
    optional=("policy", "evidence"),
)
DEFAULT_STEPS, MOST_STEPS = 100, 10_000


def one_of(*choices: object) -> dict[str, Any]:
    """A setting's metadata: the values that it may have."""
    return {"choices": choices}


def number(kind: Callable[[Any], float], low: float, high: float) -> dict[str, Any]:
    """A setting's metadata: int or float, and its range, ends included."""
    return {"number": (kind, low, high)}


@dataclass(frozen=True)
class DiffusersForm:
    """The scheduler of diffusers that does the same as a sampler.

    Args:
        scheduler: Its class.
        lacks: Settings of the sampler that it does not take.
        fixed: Settings of its own that it must have.
    """

    scheduler: str
    lacks: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(ABC):
    """The settings of a sampler, validated on creation; subclasses are the samplers.

    Args:
        num_inference_steps: How often the denoiser is called; not given, it is the number of `timesteps`, or 100.
        timesteps: Where the steps lie, in execution order, whole or not; without them the sampler spaces them itself.
    """

    type: ClassVar[str]
    in_diffusers: ClassVar[DiffusersForm | None] = None
    trained_for: ClassVar[str] = "flow"
    """Samplers of one kind of training can run the same policy."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Settings that another sampler of the same policy takes over."""
    needs_fitting: ClassVar[bool] = False
    """Whether it has constants that no number of steps tells."""

    num_inference_steps: int = field(default=None, metadata=number(int, 1, MOST_STEPS))  # type: ignore[assignment]
    timesteps: tuple[float, ...] | None = None

    def __init_subclass__(cls) -> None:
        if "type" in vars(cls):
            SAMPLERS[cls.type] = cls

    def __post_init__(self) -> None:
        count = DEFAULT_STEPS
        if self.timesteps is not None:
            object.__setattr__(self, "timesteps", _numbers(self.timesteps))
            count = len(self.timesteps)
        if self.num_inference_steps is None:
            object.__setattr__(self, "num_inference_steps", count)
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata.get("choices", ())
            # 1 == True and 2 == 2.0 in Python, so the type is compared too.
            same = [choice for choice in choices if choice.__class__ is value.__class__]
            self.require(item.name, not choices or value in same, "one of " + ", ".join(map(repr, choices)))
            if "number" in item.metadata:
                kind, low, high = item.metadata["number"]
                fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
                words = f"{'an int' if kind is int else 'a number'} from {low} to {high}"
                self.require(item.name, fits and low <= value <= high, words)
                object.__setattr__(self, item.name, kind(value))
        matches = self.timesteps is None or count == self.num_inference_steps
        self.require("num_inference_steps", matches, f"{count}, the number of timesteps, or none given")

    @abstractmethod
    def times(self) -> Array:
        """The timesteps in execution order, (K,)."""

    @abstractmethod
    def tabulate(self) -> SamplerTable:
        """The coefficients of the whole loop; callers use `table`, which remembers them."""

    def require(self, name: str, holds: bool, expected: str, got: str | None = None) -> None:
        """Refuse a setting with one sentence unless it `holds`; `got` is its value unless told otherwise."""
        if not holds:
            found = short(getattr(self, name)) if got is None else got
            raise SamplerError(f"sampler setting {name}: expected {expected}; got {found}")

    def require_order(self, inside: Callable[[float], bool], where: str, rising: bool) -> None:
        """Refuse explicit timesteps that leave the range, repeat or run the other way."""
        given = self.timesteps or ()
        for value in given:
            self.require("timesteps", inside(value), f"numbers {where}", f"{value}")
        way = "rising" if rising else "falling"
        for before, after in pairwise(given):
            self.require("timesteps", before != after, "each number once", f"{after} twice")
            self.require("timesteps", (before < after) is rising, f"{way} numbers", f"{after} after {before}")

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> SamplerConfig:
        """The sampler of a plain dict, such as the "sampler" of a checkpoint; unknown settings are refused."""
        if not isinstance(settings, Mapping) or "type" not in settings:
            raise SamplerError(f"sampler settings: expected a dict with at least a 'type'; got {short(settings)}")
        kind = sampler_class(settings["type"])
        known = [item.name for item in fields(kind)]
        given = {name: value for name, value in settings.items() if name != "type"}
        unknown = [str(name) for name in given if name not in known]
        if unknown:
            raise SamplerError(f"sampler settings of {kind.type}: expected only {known}; got unknown {short(unknown)}")
        return kind(**given)

    def to_dict(self) -> dict[str, Any]:
        """The settings in JSON types; `from_dict` gives back an equal sampler. `timesteps` only if they were given."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        if (timesteps := settings.pop("timesteps")) is not None:
            settings["timesteps"] = timesteps
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        return {"type": self.type, **plain}

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically."""
        FORMAT.save(path, {"sampler": self.to_dict()})

    @staticmethod
    def load(path: PathLike) -> SamplerConfig:
        """Read a JSON file, of a chosen sampler too; unknown versions, keys and settings are refused."""
        return ChosenSampler.load(path).sampler


SAMPLERS: dict[str, type[SamplerConfig]] = {}  # by name, in files and on the command line


def sampler_class(name: object) -> type[SamplerConfig]:
    """The sampler of that name, or a sentence with the names that there are."""
    if not isinstance(name, str) or name not in SAMPLERS:
        raise SamplerError(f"sampler setting type: expected one of {', '.join(map(repr, SAMPLERS))}; got {short(name)}")
    return SAMPLERS[name]


def sampler_names() -> list[str]:
    """Of the samplers that a number of steps is enough for."""
    return [name for name, kind in SAMPLERS.items() if not kind.needs_fitting]


def fewer_steps(own: SamplerConfig, kind: str, steps: int) -> SamplerConfig:
    """The same diffusion (or flow), drawn by another sampler in fewer steps: what a user would try first.

    Args:
        own: The policy's sampler, whose noise levels, prediction and clipping are kept.
        kind: The name of the sampler to use; its own settings take their defaults.
        steps: How many; spaced as that sampler does by default, whatever the policy's own spacing, since not every
            spacing can have every number of steps.
    """
    chosen = sampler_class(kind)
    if chosen.needs_fitting:
        raise SamplerError(
            f"the constants of a {kind} sampler follow from no number of steps; fit one with fit_sampler"
        )
    if chosen.trained_for != own.trained_for:
        raise SamplerError(
            f"a policy trained for {own.type} cannot be run by {kind}: one denoises, the other follows a flow; "
            f"use {own.type}-{steps}, or train it anew"
        )
    settings: dict[str, Any] = {name: getattr(own, name) for name in chosen.kept if name in own.kept}
    return chosen(**settings, num_inference_steps=steps)


@dataclass(frozen=True)
class ChosenSampler:
    """What `place_steps` and `fit_sampler` give back: `policy.with_sampler(chosen.sampler)` uses it.

    Args:
        sampler: Like any other.
        policy: What it was chosen for, with the policy's own sampler in it; None for any policy.
        evidence: How it was found and what it is worth, in JSON types.
    """

    sampler: SamplerConfig
    policy: Fingerprint | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check_fit(self, policy: Fingerprint) -> None:
        """Refuse a policy for which it was not chosen. The policy's sampler may be any: it is what gets replaced.

        Args:
            policy: The fingerprint of the policy that it is to be used with.
        """
        if self.policy is None:
            return
        found = fingerprint_differences(self.policy, policy, ignore=("sampler", "steps"))
        if found:
            raise SamplerError(
                f"this {self.sampler.type} sampler was chosen for another policy ({'; '.join(found)}); choose one for this "
                "policy with blockcache policy place or blockcache policy fit"
            )

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically; `SamplerConfig.load` reads the sampler of it.

        Args:
            path: The file.
        """
        bound = {} if self.policy is None else {"policy": self.policy.to_dict()}
        FORMAT.save(path, {"sampler": self.sampler.to_dict(), **bound, "evidence": dict(self.evidence)})

    @staticmethod
    def load(path: PathLike) -> ChosenSampler:
        """Read a JSON file, of a sampler alone too.

        Args:
            path: The file.
        """
        content = FORMAT.load(path)
        with FORMAT.reading(path):
            policy = Fingerprint.from_dict(content["policy"]) if "policy" in content else None
            return ChosenSampler(SamplerConfig.from_dict(content["sampler"]), policy, content.get("evidence", {}))


@functools.lru_cache(maxsize=256)
def table(config: SamplerConfig) -> SamplerTable:
    """The coefficients of the whole loop, made once for each config.

    Args:
        config: The sampler's settings.
    """
    return config.tabulate()


def _numbers(given: Any) -> tuple[float, ...]:
    """Whole numbers as int, so that 70 and 70.0 make the same dict."""
    values = given.tolist() if isinstance(given, np.ndarray) else given
    listed = isinstance(values, Sequence) and not isinstance(values, str) and 0 < len(values) <= MOST_STEPS
    if not listed or not all(map(_is_number, values)):
        raise SamplerError(
            f"sampler setting timesteps: expected a list of one or more numbers, {MOST_STEPS:,} at most; got {short(given)}"
        )
    return tuple(int(value) if float(value).is_integer() else float(value) for value in values)


def _is_number(value: object) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and -(2**63) <= value < 2**63  # type: ignore[operator]  # false for NaN, too

"""The files that a page is made from: recognised by their headers, read strictly, and all of one policy.

A directory stands for the files of these kinds in it and in its `tuned`. Knows nothing of what a page says.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import BlockcacheError, FileError, entry_failure, short
from blockcache.files import PathLike, parse_json, read_json, read_metadata
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.results.bench import FORMAT as BENCH
from blockcache.results.check import Check
from blockcache.results.rollouts import Results
from blockcache.results.summary import MethodSummary, most_rollouts, summarise
from blockcache.results.timings import Timings
from blockcache.results.tuning import Tuning
from blockcache.schedule.schedule import FORMAT as SCHEDULE
from blockcache.schedule.schedule import Schedule
from blockcache.solvers.recording import FORMAT as RECORDING
from blockcache.solvers.recording import Recording

T = TypeVar("T")

Readers: TypeAlias = Mapping[str, tuple[str, Callable[[str], Any]]]
"""By the name of a file's format, the field of `Sources` that it belongs to, and what reads it."""

POLICY, NAMELESS = "blockcache.policy", "a policy"
SAMPLER_FREE = ("sampler", "steps")
"""Of a fingerprint: the same weights may be run with another sampler, and are the same policy."""


@dataclass(frozen=True, eq=False)
class Source(Generic[T]):
    """A value and the file that it came from, as somebody named it."""

    path: str
    value: T


@dataclass(frozen=True, eq=False)
class Shown:
    """A schedule, where it is from, and what is known of it.

    Args:
        errors: (blocks, K), and `what` they are.
        own: The blocks' own steps, before the union added any.
    """

    title: str
    origin: str
    schedule: Schedule
    errors: NDArray[np.float64] | None = None
    what: str = ""
    own: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, eq=False)
class Brought:
    """A file that another package reads, as the page sees it.

    Args:
        kind: What it is called, such as "analysis".
        policy: The policy as the file names it, or "".
        fingerprint: What the file is bound to; None binds nothing.
        command: What made it; POLICY in it stands for the policy's name.
        value: What the package's own sections are made of.
        schedules: Those that it knows the errors of, the one to show first at the front.
        shifts: By method, how far its actions are from the policy's own: their energy beyond its spread.
        bench: A benchmark in it, as the file of one holds it.
    """

    kind: str
    policy: str
    fingerprint: Fingerprint | None
    command: str
    value: Any
    schedules: tuple[Shown, ...] = ()
    shifts: Mapping[str, float] = field(default_factory=dict)
    bench: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Sources:
    """Everything that is known of one policy, each kind in the order in which it was given."""

    recordings: tuple[Source[Recording], ...] = ()
    schedules: tuple[Source[Schedule], ...] = ()
    results: tuple[Source[Results], ...] = ()
    clocked: tuple[Source[Results], ...] = ()  # results of rollouts on the clock, which others are not compared with
    timings: tuple[Source[Timings], ...] = ()
    tunings: tuple[Source[Tuning], ...] = ()
    checks: tuple[Source[Check], ...] = ()
    brought: tuple[Source[Brought], ...] = ()  # by readers of other packages, such as analyses
    benches: tuple[Source[Mapping[str, Any]], ...] = ()  # of no policy but of a shape
    policies: tuple[Source[Mapping[str, Any]], ...] = ()  # configs
    command: str = "blockcache report"

    def __post_init__(self) -> None:
        for (first, one), (path, other) in combinations(self.fingerprints, 2):  # all: one may leave fields open
            if differences := fingerprint_differences(one, other, ignore=SAMPLER_FREE):
                raise FileError(
                    f"{path} is of another policy than {first} ({'; '.join(differences)}); a report is on one policy, so "
                    "leave out one of them"
                )

    @property
    def runs(self) -> tuple[Source[Any], ...]:
        """The files that say where their policy came from."""
        return (*self.results, *self.clocked, *self.tunings, *self.checks)

    @cached_property
    def fingerprints(self) -> list[tuple[str, Fingerprint]]:
        """What each file is bound to; benchmarks and configs say nothing of weights."""
        bound = (*self.runs, *self.recordings, *self.schedules, *self.brought)
        found = [(one.path, one.value.fingerprint) for one in bound]
        found += [(one.path, one.value.policy) for one in self.timings]
        return [(path, fingerprint) for path, fingerprint in found if fingerprint is not None]

    @property
    def benchmarks(self) -> list[Source[Mapping[str, Any]]]:
        """Those of their own files, then those that others hold."""
        held = [Source(one.path, one.value.bench) for one in self.brought if one.value.bench is not None]
        return [*self.benches, *held]

    @cached_property
    def rows(self) -> dict[str, MethodSummary]:
        """Each method's row, from the results in which it has the most rollouts."""
        return most_rollouts(row for source in self.results for row in summarise(source.value))

    @property
    def name(self) -> str:
        """The policy as somebody called it."""
        named = [one.value.policy["source"] for one in self.runs]
        named += [one.value.policy for one in self.brought]
        named += [one.value.get("task") or Path(one.path).parent.name for one in self.policies]
        return next((name for name in named if name), NAMELESS)

    @property
    def typed(self) -> str:
        """The policy in a command."""
        return "POLICY" if self.name == NAMELESS else shlex.quote(self.name)

    @property
    def task(self) -> str | None:
        tasks = [one.value.task["name"] for one in (*self.results, *self.clocked)]
        tasks += [one.value.get("task") for one in self.policies]
        return next((task for task in tasks if task), None)

    def timed(self) -> Timings | None:
        """Milliseconds by method."""
        return self.timings[0].value if self.timings else None


def _policy(path: str) -> Any:
    """The task that it was trained for; other settings of a config belong to its family."""
    task = _header(path).get("task")
    return {"task": task if isinstance(task, str) else None}


_READERS: Readers = {
    RECORDING.name: ("recordings", Recording.load),
    SCHEDULE.name: ("schedules", Schedule.load),
    Results.FORMAT.name: ("results", Results.load),
    Timings.FORMAT.name: ("timings", Timings.load),
    Tuning.FORMAT.name: ("tunings", Tuning.load),
    Check.FORMAT.name: ("checks", Check.load),
    BENCH.name: ("benches", BENCH.load),
    POLICY: ("policies", _policy),
}
_SUFFIXES = (".json", ".json.gz", ".safetensors")
_EXPECTED = (
    "a policy's directory, a recording, schedule, results, timings, tuning, check, benchmark, or, where blockcache-lab is "
    "installed, an analysis, distances or performance"
)


def load_sources(places: Mapping[str, PathLike], command: str = "blockcache report") -> Sources:
    """Read all files, and those of all directories; what is of no known kind is refused where it was named itself.

    Args:
        places: For each name as somebody gave it, where that is.
        command: What was typed.
    """
    found: dict[str, tuple[Source[Any], ...]] = {}
    points = entry_points(group="blockcache.files")  # each a function of a path that returns a Brought
    readers: Readers = {**{point.name: ("brought", partial(_read_brought, point)) for point in points}, **_READERS}
    for given, place in places.items():
        is_directory = os.path.isdir(place)
        files = _inside(given, Path(place)) if is_directory else {given: os.fspath(place)}
        kinds = {shown: _header(file).get("format") for shown, file in files.items()}
        known = [shown for shown, kind in kinds.items() if isinstance(kind, str) and kind in readers]
        if not known and is_directory:
            raise FileError(f"nothing in the directory {given} can be reported on; expected {_EXPECTED}")
        if not known:
            raise FileError(f"{given} cannot be reported on: its format is {short(kinds[given])}, expected {_EXPECTED}")
        for shown in known:
            name, load = readers[str(kinds[shown])]
            value = load(files[shown])
            name = "clocked" if isinstance(value, Results) and value.clocked else name
            found[name] = (*found.get(name, ()), Source(shown, value))
    return Sources(**found, command=command)


def _read_brought(point: EntryPoint, path: str) -> Brought:
    try:
        found: Brought = point.load()(path)
    except BlockcacheError:
        raise
    except Exception as error:
        raise FileError(f"{path} cannot be read: {entry_failure('reader', point, error)}") from error
    return found


def _inside(given: str, directory: Path) -> dict[str, str]:
    """The files in it and in its `tuned` that may be of a known kind, by the name of the directory as it was given."""
    files = [file for place in (directory, directory / "tuned") if place.is_dir() for file in sorted(place.iterdir())]
    return {
        str(Path(given) / file.relative_to(directory)): str(file)
        for file in files
        if file.name.endswith(_SUFFIXES)
        and not (file.suffix == ".gz" and file.with_suffix("").exists())  # NAME.json is the newer one
    }


def _header(path: PathLike) -> dict[str, Any]:
    """A JSON file, or the header in a safetensors file of this package; none of its tensors is read."""
    if not os.fspath(path).endswith(".safetensors"):
        return read_json(path, "file")
    text = read_metadata(path, "file").get("blockcache", "{}")
    return parse_json(text.encode(errors="replace"), "header of the file", path)

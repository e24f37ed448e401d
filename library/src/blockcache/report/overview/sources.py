"""The files that a page is made from: recognised by their headers, read strictly, and all of one policy.

A directory stands for the files of these kinds in it and in its `tuned`. Knows nothing of what a page says.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar

from blockcache.errors import FileError, short
from blockcache.files import PathLike, parse_json, read_json, read_metadata
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.results.analysis import FORMAT as ANALYSIS
from blockcache.results.analysis import Analysis
from blockcache.results.bench import FORMAT as BENCH
from blockcache.results.bench import PERFORMANCE
from blockcache.results.distances import FrontierDistances
from blockcache.results.rollouts import Results
from blockcache.results.summary import MethodSummary, most_rollouts, summarise
from blockcache.results.timings import Timings
from blockcache.results.tuning import Tuning
from blockcache.schedule.schedule import FORMAT as SCHEDULE
from blockcache.schedule.schedule import Schedule
from blockcache.solvers.recording import FORMAT as RECORDING
from blockcache.solvers.recording import Recording

T = TypeVar("T")

POLICY, NAMELESS = "blockcache.policy", "a policy"
SAMPLER_FREE = ("sampler", "steps")
"""Of a fingerprint: the same weights may be run with another sampler, and are the same policy."""


@dataclass(frozen=True, eq=False)
class Source(Generic[T]):
    """A value and the file that it came from, as somebody named it."""

    path: str
    value: T


@dataclass(frozen=True, eq=False)
class Sources:
    """Everything that is known of one policy, each kind in the order in which it was given."""

    recordings: tuple[Source[Recording], ...] = ()
    schedules: tuple[Source[Schedule], ...] = ()
    results: tuple[Source[Results], ...] = ()
    timings: tuple[Source[Timings], ...] = ()
    distances: tuple[Source[FrontierDistances], ...] = ()
    tunings: tuple[Source[Tuning], ...] = ()
    analyses: tuple[Source[Analysis], ...] = ()
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

    @cached_property
    def fingerprints(self) -> list[tuple[str, Fingerprint]]:
        """What each file is bound to; benchmarks and configs say nothing of weights."""
        bound: tuple[Source[Any], ...] = (
            *self.results,
            *self.tunings,
            *self.recordings,
            *self.schedules,
            *self.analyses,
        )
        timed: tuple[Source[Any], ...] = (*self.timings, *self.distances)
        return [(one.path, one.value.fingerprint) for one in bound] + [(one.path, one.value.policy) for one in timed]

    @cached_property
    def rows(self) -> dict[str, MethodSummary]:
        """Each method's row, from the results in which it has the most rollouts."""
        return most_rollouts(row for source in self.results for row in summarise(source.value))

    @property
    def name(self) -> str:
        """The policy as somebody called it."""
        named = [one.value.policy["source"] for one in self.results]
        named += [one.value.policy["source"] for one in self.tunings]
        named += [one.value.source for one in self.analyses]
        named += [one.value.get("task") or Path(one.path).parent.name for one in self.policies]
        return next((name for name in named if name), NAMELESS)

    @property
    def typed(self) -> str:
        """The policy in a command."""
        return "POLICY" if self.name == NAMELESS else shlex.quote(self.name)

    @property
    def task(self) -> str | None:
        tasks = [one.value.task["name"] for one in self.results] + [one.value.get("task") for one in self.policies]
        return next((task for task in tasks if task), None)

    def timed(self) -> Timings | None:
        """Milliseconds by method."""
        return self.timings[0].value if self.timings else None


_KINDS = tuple(item.name for item in fields(Sources) if item.name != "command")


def _performance(path: str) -> Any:
    return PERFORMANCE.load(path)["bench"]


def _policy(path: str) -> Any:
    """Only which task it was trained for: what else is in a config is its family's business."""
    task = _header(path).get("task")
    return {"task": task if isinstance(task, str) else None}


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    RECORDING.name: ("recordings", Recording.load),
    SCHEDULE.name: ("schedules", Schedule.load),
    Results.FORMAT.name: ("results", Results.load),
    Timings.FORMAT.name: ("timings", Timings.load),
    FrontierDistances.FORMAT.name: ("distances", FrontierDistances.load),
    Tuning.FORMAT.name: ("tunings", Tuning.load),
    ANALYSIS.name: ("analyses", Analysis.load),
    BENCH.name: ("benches", BENCH.load),
    PERFORMANCE.name: ("benches", _performance),
    POLICY: ("policies", _policy),
}
_SUFFIXES = (".json", ".json.gz", ".safetensors")
_EXPECTED = "a policy's directory, a recording, schedule, results, timings, tuning, analysis or benchmark"


def load_sources(places: Mapping[str, PathLike], command: str = "blockcache report") -> Sources:
    """Read all files, and those of all directories; what is of no known kind is refused where it was named itself.

    Args:
        places: For each name as somebody gave it, where that is.
        command: What was typed.
    """
    found: dict[str, list[Source[Any]]] = {name: [] for name in _KINDS}
    for given, place in places.items():
        if os.path.isdir(place):
            files = {str(Path(given) / inner): str(Path(place) / inner) for inner in _inside(Path(place))}
            kinds = {shown: (file, _format(file)) for shown, file in files.items()}
            known = {shown: found_kind for shown, found_kind in kinds.items() if found_kind[1] in _READERS}
            if not known:
                raise FileError(f"nothing in the directory {given} can be reported on; expected {_EXPECTED}")
        else:
            known = {given: (os.fspath(place), _format(place))}
        for shown, (file, kind) in known.items():
            if kind is None or kind not in _READERS:
                raise FileError(f"{shown} cannot be reported on: its format is {short(kind)}, expected {_EXPECTED}")
            name, load = _READERS[kind]
            found[name].append(Source(shown, load(file)))
    return Sources(**{name: tuple(sources) for name, sources in found.items()}, command=command)


def _inside(directory: Path) -> list[str]:
    """The names of files in it that may be of a known kind, and in its `tuned`."""
    places = [place for place in (directory, directory / "tuned") if place.is_dir()]
    files = [file for place in places for file in sorted(place.iterdir()) if file.name.endswith(_SUFFIXES)]
    plain = [
        file for file in files if file.suffix != ".gz" or not file.with_suffix("").exists()
    ]  # NAME.json is the newer one
    return [str(file.relative_to(directory)) for file in plain]


def _format(path: PathLike) -> str | None:
    """What a file's header says it is; None where it has none."""
    kind = _header(path).get("format")
    return kind if isinstance(kind, str) else None


def _header(path: PathLike) -> dict[str, Any]:
    """A JSON file, or the header of ours in a safetensors file; none of its tensors is read."""
    if not os.fspath(path).endswith(".safetensors"):
        return read_json(path, "file")
    text = read_metadata(path, "file").get("blockcache", "{}")
    return parse_json(text.encode(errors="replace"), "header of the file", path)

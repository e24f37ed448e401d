"""Runs cases in a process of its own, so that a crash, a hang or a flood of memory is a finding and not the end.

A case is a format and a number: with the seed it is always the same damaged file. Time is that of the processor: a machine
that has other things to do, or that was stopped meanwhile, makes no finding. Knows nothing of formats.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEGABYTES = 10.0, 300.0  # a case that takes more is a finding
POLL = 0.5  # seconds between two looks at a child that gives no sign
LONGEST, LINES = 1000, 4  # of a message


@dataclass(frozen=True)
class Sample:
    """One format.

    make  writes sound files into an empty directory and returns those of them that are to be damaged
    use   reads the file and does with it what the package does; in the directory where it was made
    """

    make: Callable[[Path], list[Path]]
    use: Callable[[Path], Any]


def sample_of(examples: Iterable[Any], name: str) -> Sample:
    """One of the examples of all tests that try files, where reading it is all that is done with it."""
    example = next(item for item in examples if item.name == name)
    return Sample(lambda place: [example.write(place)], example.load)


@dataclass(frozen=True)
class Finding:
    """A case that neither loaded nor was refused in one clear sentence."""

    format: str
    case: int
    file: str
    mutation: str
    error: str

    def line(self) -> str:
        return f"{self.format} {self.case} ({self.file}; {self.mutation}): {self.error}"


@dataclass(frozen=True)
class Outcome:
    cases: int
    loaded: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Plan:
    """Some cases of one format; without a seed they are those of the corpus."""

    format: str
    seed: int | None
    first: int
    count: int


def damaged(plan: Plan, case: int, whole: dict[str, bytes]) -> tuple[str, bytes, str]:
    """The file of a case: which one, its bytes, what was done to it."""
    from .mutations import MUTATIONS
    from .offenders import OFFENDERS

    if plan.seed is None:
        offender = [item for item in OFFENDERS if item.format == plan.format][case]
        name = next(name for name in sorted(whole) if name.endswith(offender.file))
        return name, offender.change(whole[name]), offender.what
    chance = random.Random(f"{plan.seed}/{plan.format}/{case}")
    name = chance.choice(sorted(whole))
    while True:  # now and then a file is changed into itself
        data, note = MUTATIONS[Path(name).suffix](whole[name], chance)
        if data != whole[name]:
            return name, data, note


def verdict(use: Callable[[Path], Any], path: Path) -> tuple[bool, str | None]:
    """Whether the file was taken, and what is wrong with how it was refused."""
    from blockcache.errors import BlockcacheError

    started = time.process_time()
    loaded, wrong = True, None
    try:
        use(path)
    except BlockcacheError as error:
        loaded, text = False, str(error)
        if len(text) > LONGEST + len(str(path)) or text.count("\n") >= LINES:
            wrong = f"a message of {len(text)} characters in {text.count(chr(10)) + 1} lines: {text[:200]!r}"
    except (Exception, RecursionError) as error:
        loaded, place = False, traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        wrong = f"{words} (at {Path(place.filename).name}:{place.lineno})"
    took = time.process_time() - started
    if took > SECONDS:
        wrong = f"took {took:.0f} s"
    if took > 0.02 and (grown := _grown()) > MEGABYTES:  # to look is not cheap, and so much memory takes its time
        wrong = f"took {grown:.0f} MB"
    return loaded, wrong


def _grown() -> float:
    """How much more memory this process has taken than ever when this was asked before, MB."""
    global _most
    before, _most = _most, _peak()
    return _most - before


def _peak() -> float:
    """The most memory that this process ever took, MB. What `resource` says of it begins with its parent's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


_most = 0.0


def work(pipe: Any, place: str, now: Any, samples: str) -> None:
    """The child: for each plan that comes in, findings and a count go out; `now` is the case at hand."""
    os.environ |= {"BLOCKCACHE_CACHE": f"{place}/cache", "OMP_NUM_THREADS": "1"}
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries complain there of what we break
        os.dup2(quiet, stream)
    known = importlib.import_module(samples).SAMPLES
    made: dict[str, dict[str, bytes]] = {}
    while (plan := pipe.recv()) is not None:
        directory = Path(place) / plan.format
        if plan.format not in made:
            now.value = -1
            try:
                made[plan.format] = prepare(known[plan.format], directory)
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
                return
        loaded, _ = 0, _grown()
        for case in range(plan.first, plan.first + plan.count):
            now.value = case
            name, data, note = damaged(plan, case, made[plan.format])
            path = directory / name
            path.write_bytes(data)
            fine, wrong = verdict(known[plan.format].use, path)
            path.write_bytes(made[plan.format][name])
            loaded += fine
            if wrong is not None:
                pipe.send(Finding(plan.format, case, name, note, wrong))
        pipe.send((plan.count, loaded))


def prepare(sample: Sample, directory: Path) -> dict[str, bytes]:
    """Sound files by name; all of them are read once, so that what is loaded and kept then is no case's fault."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    paths = sample.make(directory)
    for path in paths:
        sample.use(path)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


class _Watch:
    """How long a process has been at one thing: computing, or asleep."""

    def __init__(self, process: int) -> None:
        self._file = Path(f"/proc/{process}/stat")
        self._thing: int | None = None

    def spent(self, thing: int) -> float:
        """Seconds since it began with this; asked every POLL seconds."""
        with contextlib.suppress(OSError):  # it has just died, which the pipe tells
            state, *numbers = self._file.read_text().rpartition(")")[2].split()
            computed = (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")
            if thing != self._thing:
                self._thing, self._began, self._last, self._asleep = thing, computed, computed, 0.0
            if state == "S" and computed == self._last:
                self._asleep += POLL
            self._last = computed
            return max(computed - self._began, self._asleep)
        return 0.0


class Runner:
    """One child at a time; a new one after a crash or a hang. To be closed.

    samples  the module whose SAMPLES are the formats
    seconds  after which a case that gives no sign is given up
    """

    def __init__(self, samples: str = f"{__package__}.samples", seconds: float = SECONDS) -> None:
        self._samples, self._seconds = samples, seconds
        memory = Path("/dev/shm")  # where it is there: what is written is asked to be on the disk each time
        self._place = tempfile.mkdtemp(prefix="blockcache-fuzz-", dir=memory if memory.is_dir() else None)
        self._child: Any = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._pipe.send(None)
            self._child.join(5)
        self._stop()
        shutil.rmtree(self._place, ignore_errors=True)

    def run(self, plan: Plan, tick: Callable[[int], Any] = lambda cases: None) -> Outcome:
        """All cases of a plan, in pieces; `tick` is told how many are done."""
        findings: list[Finding] = []
        loaded, case, end = 0, plan.first, plan.first + plan.count
        while case < end:
            piece = min(100, end - case)
            for message in self._piece(Plan(plan.format, plan.seed, case, piece)):
                if isinstance(message, Finding):
                    findings.append(message)
                elif isinstance(message, tuple):
                    loaded += message[1]
                else:  # the child is gone: go on behind the case that it had
                    piece = message + 1 - case
            tick(piece)
            case += piece
        return Outcome(plan.count, loaded, tuple(findings))

    def _piece(self, plan: Plan) -> Iterator[Finding | tuple[int, int] | int]:
        self._start()
        self._pipe.send(plan)
        watch = _Watch(self._child.pid)
        while True:
            if self._pipe.poll(POLL):
                try:
                    message = self._pipe.recv()
                except EOFError:
                    yield from self._lost(plan, "the process died")
                    return
                if isinstance(message, str):
                    raise RuntimeError(f"no sound file of format {plan.format} could be made and read: {message}")
                yield message
                if isinstance(message, tuple):
                    return
            elif watch.spent(case := self._now.value) > (self._seconds if case != -1 else 60 + self._seconds):
                yield from self._lost(plan, f"still not done after {self._seconds:.0f} s")
                return

    def _lost(self, plan: Plan, reason: str) -> Iterator[Finding | int]:
        case = self._now.value
        self._child.join(2)
        code = self._child.exitcode
        self._stop()
        if not plan.first <= case < plan.first + plan.count:
            raise RuntimeError(f"no sound file of format {plan.format} was made: {reason} ({code=})")
        yield Finding(plan.format, case, "?", "repeat it to see", f"{reason}, exit code {code}")
        yield case

    def _start(self) -> None:
        if self._child is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._now = context.Value("q", -1, lock=False)
            self._child = context.Process(
                target=work, args=(theirs, self._place, self._now, self._samples), daemon=True
            )
            self._child.start()
            theirs.close()

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child = None

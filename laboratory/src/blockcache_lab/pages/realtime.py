"""docs/generated/realtime.md, from the files of suite realtime only: what each method keeps when its chunks are late.

A delay counts in control ticks, so that a latency at a rate is looked up among the delays that were run; one that was not run
stands for the next longer one, for which a robot could wait. Every verdict is computed. Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.files import PathLike, exists
from blockcache.measure.statistics import Estimate
from blockcache.report.chart import Panel
from blockcache.report.clock import clock_panels
from blockcache.report.document import Bullets, Document, Figure, Paragraph, Section, Table, plain, table
from blockcache.report.methods import estimate
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache_lab.pages.published import printed_robot
from blockcache_lab.pages.suite_parts import PolicySuite, made_from
from blockcache_lab.studies.suite_results import SuiteResults, paired
from blockcache_lab.studies.suites import MODES, RATE, REALTIME

PICTURE = "realtime.png"
RATES = (10, 20, 30, 40, 50)
MOST = 100
"""Ticks: files of longer delays are not looked for."""
_TITLES = {"async": "Asynchronous", "rtc": "Asynchronous, told of the chunk before (RTC)", "stop": "Stop and think"}
_PRINTED = {"ddpm_100": BASELINE, "bac_s7_n3": "bac:S=7,n=3", "bac_s5_n3": "bac:S=5,n=3"}


@dataclass(frozen=True, eq=False)
class RealtimeSuite(PolicySuite):
    """One policy's cells: a delay in a mode each, and its times if they are there."""

    NAMES = tuple(f"{REALTIME}-{mode}-{delay}" for delay in range(MOST) for mode in MODES)

    @classmethod
    def load(cls, directory: PathLike, names: Sequence[str] = ()) -> RealtimeSuite:
        if not any(exists(Path(directory) / f"{name}.json") for name in cls.NAMES):
            raise FileError(
                f"no files of suite realtime in {directory}; run 'blockcache paper suite realtime POLICY' first"
            )
        return super().load(directory, names)

    def cell(self, mode: str, delay: int) -> SuiteResults | None:
        """The results at a delay in a mode; without a delay `rtc` is `async`, since nothing was committed before."""
        return self.suites.get(f"{REALTIME}-{'async' if not delay and mode == 'rtc' else mode}-{delay}")

    @property
    def methods(self) -> list[str]:
        return [method.name for method in self.first.methods]

    def delays(self, mode: str) -> list[int]:
        return [delay for delay in range(MOST) if self.cell(mode, delay) is not None]

    def mean(self, mode: str, delay: int, method: str) -> Estimate | None:
        cell = self.cell(mode, delay)
        return None if cell is None else cell.mean(method)

    def told(self, method: str, delay: int) -> Estimate | None:
        """What being told of the chunk before (RTC) changes in a method's score at a delay, pair by pair."""
        told, not_told = self.cell("rtc", delay), self.cell("async", delay)
        return None if told is None or not_told is None else paired(told.scores(method), not_told.scores(method))

    def panels(self) -> tuple[Panel, ...]:
        found = [cell for mode in MODES for delay in self.delays(mode) if (cell := self.cell(mode, delay)) is not None]
        results = {id(cell.results): cell.results for cell in found}
        return clock_panels(list(results.values()), f"{self.task}: ")

    def command(self) -> str:
        first = self.first
        chosen = " ".join(f"--delay {delay}" for delay in self.delays("async"))
        amount = " --quick" if self.quick else f" --rollouts {first.setting['rollouts']}"
        return f"blockcache paper suite {REALTIME} {first.policy['source']} -o {self.directory}{amount} {chosen}{self.tuned_option}"


def page(suites: Sequence[RealtimeSuite]) -> Document:
    """The whole page; its picture lies beside it.

    Args:
        suites: The suite's files of each policy.
    """
    command = f"blockcache paper {REALTIME} {' '.join(item.directory for item in suites)}"
    about = (
        f"A chunk is drawn from the observation at which it is asked for and arrives some control ticks later ({RATE:g} ticks a "
        "second in the picture). *Asynchronous*: the old chunk goes on, a new one is asked for after half of the executed "
        "actions, and what is late is skipped; where a chunk runs out, its last action is held. *Told* (RTC): each chunk is told "
        "the actions that will have been executed when it arrives. *Stop and think*: the last action is held until the chunk is "
        "there. Engines that draw the same actions share their rollouts: latency and rate decide no more than the delay in ticks. "
        "The simulators know no seconds: at a higher rate the same actions are executed faster."
    )
    picture = Figure(
        PICTURE, "score against delay, for each task and mode", "Score against delay; intervals are in the tables."
    )
    results = [line for item in suites for line in _results(item)]
    return Document(
        "On the clock: what methods keep when their chunks are late",
        (
            made_from("suite realtime", command),
            Bullets(tuple(results)),
            picture,
            Paragraph(about),
            *map(_policy, suites),
        ),
    )


def _results(suite: RealtimeSuite) -> list[str]:
    """In a sentence each: where plain torch is too slow, what is kept there, and what RTC does."""
    name, said = suite.task, list[str]()
    for source, rows in _latencies(suite).items():
        rate, first = _too_fast(suite, rows), rows[0]
        kept = [
            f"{plain(row.words)} {best.text('{:.2f}')} ({mode})"
            for row in rows[1:]
            if (chosen := _best(suite, row, rate)) is not None
            for mode, best in [chosen]
        ]
        own = _best(suite, first, rate)
        keeps = "is later than any delay that was run" if own is None else f"keeps {own[1].text('{:.2f}')} ({own[0]})"
        said.append(
            f"{name}, {plain(source)}: at {rate} Hz {plain(first.words)} ({1e3 * first.seconds:.0f} ms a chunk, "
            f"{first.ticks(rate)} ticks) {keeps}; in its best mode each other method keeps: {', '.join(kept)}."
        )
    gaps = {delay: _gaps(suite, delay) for delay in suite.delays("rtc") if delay}
    for word, sign in (("better", 1), ("worse", -1)):
        sure = {
            delay: [name for name, gap in each.items() if sign * gap.mean > 0 and gap.low * gap.high > 0]
            for delay, each in gaps.items()
        }
        counts = [
            f"{len(names)} of {len(gaps[delay])} methods at {delay} ticks" for delay, names in sure.items() if names
        ]
        said.append(f"{name}: being told (RTC) is {word} than not for {', '.join(counts) or 'no method at any delay'}.")
    full = [f"{each[BASELINE].text('{:+.2f}')} at {delay}" for delay, each in gaps.items() if BASELINE in each]
    return [*said, f"{name}: being told against not, full precision: {', '.join(full)}."]


def _gaps(suite: RealtimeSuite, delay: int) -> dict[str, Estimate]:
    """By method, what being told changes at a delay."""
    gaps = {method: suite.told(method, delay) for method in suite.methods}
    return {method: gap for method, gap in gaps.items() if gap is not None}


def _policy(suite: RealtimeSuite) -> Section:
    first = suite.first
    said = [
        f"Command: `{suite.command()}`.",
        f"{first.setting['rollouts']} paired episodes a cell, from seed {first.setting['first_seed']}, on which nothing was "
        f"chosen; success: {plain(first.task['success'])}. 95 % intervals.",
    ]
    if suite.quick:
        said.insert(0, "**From a quick run: no figure means anything.**")
    return Section(
        suite.task,
        (
            Bullets(tuple(said)),
            *(_rates(suite, source, rows) for source, rows in _latencies(suite).items()),
            Section("Told against not told (RTC - asynchronous)", (_told(suite),)),
            *(_scores(suite, mode) for mode in ("async", "stop")),
        ),
    )


def _grid(
    suite: RealtimeSuite, delays: Sequence[int], form: str, value: Callable[[str, int], Estimate | None]
) -> Table:
    """A figure of each method at each delay."""
    rows = [
        [plain(method_named(name).label), *(estimate(value(name, delay), form) for delay in delays)]
        for name in suite.methods
    ]
    return table(["method", *(f"{delay} ticks" for delay in delays)], rows)


def _scores(suite: RealtimeSuite, mode: str) -> Section:
    scores = _grid(suite, suite.delays(mode), "{:.2f}", lambda name, delay: suite.mean(mode, delay, name))
    return Section(f"{_TITLES[mode]}: score", (scores,))


def _told(suite: RealtimeSuite) -> Table:
    """What being told of the chunk before changes."""
    delays = [delay for delay in suite.delays("rtc") if delay and delay in suite.delays("async")]
    return _grid(suite, delays, "{:+.2f}", lambda name, delay: suite.told(name, delay))


@dataclass(frozen=True)
class _Timed:
    """A method with the latency that somebody measured, and the success that somebody printed beside it."""

    words: str
    method: str
    seconds: float
    printed: str = ""

    def ticks(self, rate: float) -> int:
        return math.ceil(self.seconds * rate - 1e-9)


def _latencies(suite: RealtimeSuite) -> dict[str, list[_Timed]]:
    """By where they come from: of this machine, where it was timed, and of the paper's robot; the slowest first."""
    timings, sources = suite.timings, dict[str, list[_Timed]]()
    words = {name: method_named(name).label for name in suite.methods}
    if timings is not None:
        own = [
            ("plain torch", BASELINE, PLAIN),
            *((f"{words[name]}, fast engine", name, name) for name in suite.methods),
        ]
        rows = [_Timed(said, name, ms / 1e3) for said, name, timed in own if (ms := timings.ms(timed)) is not None]
        machine = timings.machine
        load = "".join(f", load average {value:.1f}" for value in machine.get("load_average", ())[:1])
        sources[f"latencies of this machine ({machine['processor']}{load})"] = rows
    robot = printed_robot()
    sources["the paper's latencies"] = [
        _Timed(words[name], name, 1 / robot[key]["hz"], f"{robot[key]['success']:.0%} at {robot[key]['hz']:g} Hz")
        for key, name in _PRINTED.items()
        if name in words
    ]
    return {source: rows for source, rows in sources.items() if rows}


def _best(suite: RealtimeSuite, row: _Timed, rate: float) -> tuple[str, Estimate] | None:
    """The mode in which a method keeps most at its delay, and what it keeps; None if it is later than what was run."""
    known = {}
    for mode in MODES:
        used = min((one for one in suite.delays(mode) if one >= row.ticks(rate)), default=None)
        if used is not None and (score := suite.mean(mode, used, row.method)) is not None:
            known[mode] = score
    return max(known.items(), key=lambda item: item[1].mean) if known else None


def _too_fast(suite: RealtimeSuite, rows: Sequence[_Timed]) -> int:
    """The first rate at which the slowest is later than any delay that was run; the fastest rate if there is none."""
    return next((rate for rate in RATES if _best(suite, rows[0], rate) is None), RATES[-1])


def _rates(suite: RealtimeSuite, source: str, rows: Sequence[_Timed]) -> Section:
    """Ticks late at each rate, and what the method keeps there in its best mode."""

    def cell(row: _Timed, rate: int) -> str:
        best = _best(suite, row, rate)
        return f"{row.ticks(rate)}: " + ("not run" if best is None else f"{best[1].text('{:.2f}')} {best[0]}")

    printed = ["printed success"] if any(row.printed for row in rows) else []
    cells = [
        [
            plain(row.words),
            f"{1e3 * row.seconds:.1f}",
            *(row.printed for _ in printed),
            *(cell(row, rate) for rate in RATES),
        ]
        for row in rows
    ]
    heads = ["method", "ms", *printed, *(f"{rate} Hz" for rate in RATES)]
    note = (
        "Ticks late, and the score in the mode that keeps most; a delay that was not run counts as the next longer one."
    )
    return Section(f"What is kept, with {plain(source)}", (Paragraph(note), table(heads, cells)))

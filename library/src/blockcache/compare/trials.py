"""Trials of methods: how far each one's actions are from the policy's own, and how long a chunk takes.

A finished trial is kept under all that it depends on. Knows nothing of what is chosen by it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockcache._version import __version__
from blockcache.compare.block_times import block_milliseconds
from blockcache.compare.candidates import Calibrations, Candidate, Running, running
from blockcache.compare.dealing import CALIBRATION, DISTANCES, FITTING
from blockcache.compare.methods import Method, method_named
from blockcache.compare.parts import FewerSteps, SamplerFile
from blockcache.compare.reuse_parts import ScheduleFile
from blockcache.compare.store import Outcome, Store, digest
from blockcache.errors import BlockcacheError, in_one_line
from blockcache.files import read
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.distance import Cloud, Distances, distances
from blockcache.measure.features import flattened
from blockcache.measure.latency import measure
from blockcache.models.port import Port
from blockcache.observations import batch_size, hash_observations, rows
from blockcache.progress import progress_bar
from blockcache.results.check import predicted_loss
from blockcache.results.rollouts import PLAIN
from blockcache.results.tuning import Point, TuningError
from blockcache.samplers import ChosenSampler, Diffusion
from blockcache.schedule import Schedule
from blockcache_runtime.cores import cores

FIRST_SAMPLES, FINAL_SAMPLES = 12, 48
"""Chunks drawn for each observation: to see what is promising, and to choose among that."""
FIRST_CALLS, FINAL_CALLS = 8, 40
"""Timed calls: in a trial, and when the finalists are timed in turn."""
FIRST_SHARE = 0.75
"""Of the time for first trials; the rest is for the finalists."""


class TimeLimit:
    """Minutes that may be used; no first trial begins in the last part of them."""

    def __init__(self, minutes: float) -> None:
        self._started, self._seconds = time.monotonic(), 60 * minutes * FIRST_SHARE

    @property
    def passed(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.passed > self._seconds


class Trials:
    """Trials of one policy's methods on one machine.

    Args:
        port: The policy.
        dealt: Observations by purpose, see `dealing`: to calibrate on, to fit samplers on, to measure distances at.
        state: The directory that keeps finished trials, recordings and samplers.
        limit: When no first trial begins any more.
        engine: For every method.
        seed: Of all noise.
        progress: Whether to show bars.
    """

    def __init__(
        self,
        port: Port,
        dealt: Mapping[str, Any],
        state: Path,
        limit: TimeLimit,
        *,
        engine: str,
        seed: int,
        progress: bool,
    ) -> None:
        self.port, self.state, self.limit, self.engine = port, state, limit, engine
        self.seed, self.progress = seed, progress
        self.observations = dealt[DISTANCES]
        self.candidates: dict[str, Candidate] = {}
        self.notes: list[str] = []
        self._calibrations = Calibrations(
            port,
            dealt[CALIBRATION],
            seed=seed,
            keep=state / "made",
            fitting=dealt[FITTING],
            block_costs=self._block_costs,
            progress=progress,
        )
        self._store = Store(state / "looks")

    def measure(self, methods: Sequence[Method], samples: int, *, even_late: bool = False) -> list[Point]:
        """A point for each method; what cannot be made is noted with the reason, and so is what there was no time for."""
        points, late = [], []
        title = f"{samples} chunks at {batch_size(self.observations)} states"
        with progress_bar(methods, title, unit="method", disable=not self.progress) as bar:
            for method in bar:
                if self.limit.over and not even_late:
                    late.append(method.name)
                    continue
                bar.set_postfix_str(method.name)
                try:
                    points.append(self._point(method, samples))
                except BlockcacheError as error:
                    self.notes.append(f"{method} was left out: {in_one_line(error)}")
        if late:
            self.notes.append(f"not tried, as the time was up: {', '.join(late)}")
        return points

    def check_deadline(self, deadline_ms: float) -> None:
        """Refuse a deadline that not even a single denoising step keeps."""
        if not isinstance(self.port.sampler, Diffusion):
            return
        one = self._calibrations.candidate(Method(FewerSteps(self.port.sampler.type, 1)), self.engine)
        fastest = min(self._milliseconds({"one": (one, threads)}, 5)["one"][0] for threads in (1, cores()))
        if deadline_ms < fastest:
            raise TuningError(
                f"a deadline of {deadline_ms:g} ms cannot be met here: a chunk of one single denoising step takes "
                f"{fastest:.2g} ms; allow more, or use a faster machine"
            )

    def timed(self, points: Sequence[Point]) -> tuple[float, list[Point]]:
        """The plain policy's milliseconds, and the points with theirs: in every engine that runs the whole loop, with one
        thread and with all, interleaved in one run. The fastest way of each point is kept."""
        if not points:
            raise TuningError(f"no method could be tried: {'; '.join(self.notes)}")
        ways = {point.method: tuple(product(self._engines(point), sorted({1, cores()}))) for point in points}
        asked: dict[Any, tuple[Candidate, int]] = {PLAIN: (Candidate(), cores())}
        for method, own in ways.items():
            for engine, threads in own:
                asked[method, engine, threads] = replace(self.candidates[method], engine=engine), threads
        times = self._milliseconds(asked, FINAL_CALLS)
        found = []
        for point in points:
            engine, threads = min(ways[point.method], key=lambda way: times[(point.method, *way)])
            p50, p95 = times[point.method, engine, threads]
            found.append(replace(point, engine=engine, threads=threads, p50_ms=p50, p95_ms=p95))
        return times[PLAIN][0], found

    def _engines(self, point: Point) -> tuple[str, ...]:
        """Those that are worth timing: what onnx runs the loop engine runs too. The actions are the same in all of them."""
        return ("onnx", "loop") if (self.engine, point.engine) == ("auto", "onnx") else (point.engine,)

    def sampler_of(self, method: str) -> ChosenSampler | None:
        """The sampler of a method that was tried, with its evidence; None is the policy's own."""
        sampler = self.candidates[method].sampler
        return None if sampler is None else self._calibrations.with_evidence(sampler)

    def schedule_of(self, method: str) -> Schedule | None:
        """The schedule of a method that was tried; None computes every block at every step."""
        strategy = self.candidates[method].strategy
        return strategy if isinstance(strategy, Schedule) else None

    def as_files(self, method: str) -> Method:
        """A method that was tried by the files of what was made for it, so that nothing is made anew from other
        observations."""
        stem, sampler, schedule = self.state / digest({"method": method})[:8], None, None
        if (chosen := self.sampler_of(method)) is not None:
            sampler = SamplerFile(f"{stem}-sampler.json")
            chosen.save(sampler.path)
        if (made := self.schedule_of(method)) is not None:
            schedule = ScheduleFile(f"{stem}-schedule.json")
            made.save(schedule.path)
        return Method(sampler, schedule) if sampler or schedule else method_named(method)

    def _point(self, method: Method, samples: int) -> Point:
        candidate = self._calibrations.candidate(method, self.engine)
        self.candidates[method.name] = candidate
        origin = self._origin(method=candidate.describe(self.port), samples=samples)
        found = self._store.outcome(origin, lambda: self._measured(candidate, samples))
        measured = read(Distances, found["distances"])
        return Point(
            method=method.name,
            engine=found["engine"],
            threads=cores(),
            p50_ms=found["p50_ms"],
            p95_ms=found["p95_ms"],
            flops=candidate.flops(self.port, 0.0),
            chunks=batch_size(self.observations) * samples,
            distances=measured,
            loss=predicted_loss(measured, found["features"]),
        )

    def _measured(self, candidate: Candidate, samples: int) -> Outcome:
        own = self._own[:, :samples]
        with running(self.port, candidate) as fast:
            found = own if candidate == self._as_it_is else self._cloud(fast, samples)
            timed = measure({"it": fast.timed(self._one)}, FIRST_CALLS, progress=False)["it"]
        return {
            "distances": asdict(distances(found, own)),
            "features": found.shape[-1],
            "p50_ms": 1e3 * timed.percentile(50),
            "p95_ms": 1e3 * timed.percentile(95),
            "engine": fast.engine,
        }

    def _block_costs(self) -> Outcome:
        origin = self._origin(blocks=self.engine)
        return self._store.outcome(origin, lambda: dict(block_milliseconds(self.port, self._one, self.engine)))

    @cached_property
    def _own(self) -> Cloud:
        """The policy's own cloud with as many chunks as a final trial: the first ones are those of a first trial."""

        def drawn() -> Outcome:
            with running(self.port, self._as_it_is) as full:
                return {"cloud": self._cloud(full, FINAL_SAMPLES, "the policy as it is").tolist()}

        return np.asarray(self._store.outcome(self._origin(own=True, samples=FINAL_SAMPLES), drawn)["cloud"])

    @property
    def _as_it_is(self) -> Candidate:
        return Candidate(engine=self.engine)

    @property
    def _one(self) -> Any:
        return rows(self.observations, 0, 1)

    def _cloud(self, fast: Running, samples: int, shown: str | None = None) -> Cloud:
        """All with the same noise: that makes distances steadier and adds no bias."""
        progress = shown if self.progress else None
        scale = self.port.action_scale
        return flattened(draw_chunks(fast.act, self.observations, samples, scale, self.seed, progress=progress))

    def _origin(self, **what: Any) -> dict[str, Any]:
        """All that a trial depends on."""
        policy, observed = self.port.fingerprint.to_dict(), hash_observations(self.observations)
        return {"made_by": __version__, "policy": policy, "observations": observed, "seed": self.seed, **what}

    def _milliseconds(self, asked: Mapping[Any, tuple[Candidate, int]], calls: int) -> dict[Any, tuple[float, float]]:
        """p50 and p95 of one chunk, batch 1, by whatever they were asked for; all interleaved."""
        before = torch.get_num_threads()
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, before)
            calls_of = {}
            for name, (candidate, threads) in asked.items():
                torch.set_num_threads(threads)
                calls_of[str(name)] = stack.enter_context(running(self.port, candidate)).timed(self._one)
            torch.set_num_threads(cores())
            found = measure(calls_of, calls, progress=False)
        return {name: (1e3 * found[str(name)].percentile(50), 1e3 * found[str(name)].percentile(95)) for name in asked}

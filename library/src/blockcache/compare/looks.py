"""Looking at methods, one after the other: how far their actions are from the policy's own, and how long a chunk takes.

A look is kept as a finished job under all that it depends on. Knows nothing of what is chosen by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from blockcache.compare.candidates import Calibrations, Candidate, Running, digest, running
from blockcache.compare.clouds import draw_chunks, flattened
from blockcache.compare.jobs import Outcome, Store
from blockcache.compare.methods import parse_method
from blockcache.errors import BlockcacheError, in_one_line
from blockcache.files import make_directory, read
from blockcache.measure.distance import Cloud, Distances, distances
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

GLANCE_CALLS, TIMED_CALLS = 8, 40
GLANCE, LONG = 12, 48
"""Chunks drawn for each observation: to see what is promising, and to choose among that."""
FOR_GLANCES = 0.75
"""Of the time."""


class Clock:
    """Minutes that may be used. Nothing new is begun in the last part of them, which is for the longer looks."""

    def __init__(self, minutes: float) -> None:
        self._started, self._seconds = time.monotonic(), 60 * minutes * FOR_GLANCES

    @property
    def passed(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.passed > self._seconds


class Looks:
    """port      the policy
    seen      observations by purpose: calibration, fitting, distances
    state     where finished looks, recordings and samplers are kept
    clock     after which nothing new is looked at
    """

    def __init__(
        self, port: Port, seen: Mapping[str, Any], state: Path, clock: Clock, *, engine: str, seed: int, progress: bool
    ) -> None:
        self.port, self.state, self.clock, self.engine = port, state, clock, engine
        self.seed, self.progress = seed, progress
        self.at_observations = seen["distances"]
        self.candidates: dict[str, Candidate] = {}
        self.notes: list[str] = []
        self._calibrations = Calibrations(
            port,
            seen["calibration"],
            seed=seed,
            keep=state / "made",
            fitting=seen["fitting"],
            block_costs=self._block_costs,
            progress=progress,
        )
        self._store = Store(state / "looks")

    def at(self, methods: Sequence[str], samples: int, *, even_late: bool = False) -> list[Point]:
        """A point for each method; what cannot be made is noted with the reason, and so is what there was no time for."""
        points, late = [], []
        title = f"{samples} chunks at {batch_size(self.at_observations)} states"
        with progress_bar(methods, title, unit="method", disable=not self.progress) as bar:
            for method in bar:
                if self.clock.over and not even_late:
                    late.append(method)
                    continue
                bar.set_postfix_str(method)
                try:
                    points.append(self._look(method, samples))
                except BlockcacheError as error:
                    self.notes.append(f"{method} was left out: {in_one_line(error)}")
        if late:
            self.notes.append(f"not tried, as the time was up: {', '.join(late)}")
        return points

    def check_deadline(self, deadline_ms: float) -> None:
        """Refuse a deadline that not even a single denoising step keeps."""
        if not isinstance(self.port.sampler, Diffusion):
            return
        one = self._calibrations.candidate(parse_method(f"{self.port.sampler.type}-1"), self.engine)
        fastest = min(self._milliseconds({"one": (one, threads)}, 5)["one"][0] for threads in (1, cores()))
        if deadline_ms < fastest:
            raise TuningError(
                f"a deadline of {deadline_ms:g} ms cannot be met here: a chunk of one single denoising step takes "
                f"{fastest:.2g} ms; allow more, or use a faster machine"
            )

    def timed(self, points: Sequence[Point]) -> tuple[float, list[Point]]:
        """The plain policy's milliseconds, and the points with theirs, in every engine that runs the whole loop, with one
        thread and with all: interleaved in one run. The fastest way of each point is kept."""
        if not points:
            raise TuningError(f"no method could be looked at: {'; '.join(self.notes)}")
        ways = {point.method: tuple(product(self._engines(point), sorted({1, cores()}))) for point in points}
        asked: dict[Any, tuple[Candidate, int]] = {PLAIN: (Candidate(), cores())}
        for method, own in ways.items():
            for engine, threads in own:
                asked[method, engine, threads] = replace(self.candidates[method], engine=engine), threads
        times = self._milliseconds(asked, TIMED_CALLS)
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
        """The sampler of a method that was looked at, with its evidence; None is the policy's own."""
        sampler = self.candidates[method].sampler
        return None if sampler is None else self._calibrations.with_evidence(sampler)

    def as_files(self, method: str) -> str:
        """The same method by the files of what was made for it, so that nobody makes it anew from other observations."""
        candidate, parts = self.candidates[method], []
        stem = self.state / digest({"method": method})[:8]
        if (sampler := self.sampler_of(method)) is not None:
            sampler.save(path := f"{stem}-sampler.json")
            parts.append(f"sampler:{path}")
        if isinstance(candidate.strategy, Schedule):
            candidate.strategy.save(path := f"{stem}-schedule.json")
            parts.append(path)
        return "+".join(parts) or method

    def _look(self, method: str, samples: int) -> Point:
        candidate = self._calibrations.candidate(parse_method(method), self.engine)
        self.candidates[method] = candidate
        what = {"method": candidate.describe(self.port), "samples": samples}
        found = self._kept(what, lambda: self._measured(candidate, samples))
        measured = read(Distances, found["distances"])
        return Point(
            method=method,
            engine=found["engine"],
            threads=cores(),
            p50_ms=found["p50_ms"],
            p95_ms=found["p95_ms"],
            flops=candidate.flops(self.port, 0.0),
            chunks=batch_size(self.at_observations) * samples,
            distances=measured,
            loss=predicted_loss(measured, found["features"]),
        )

    def _measured(self, candidate: Candidate, samples: int) -> Outcome:
        own = self._own[:, :samples]
        with running(self.port, candidate) as fast:
            found = own if candidate == self._as_it_is else self._cloud(fast, samples)
            timed = measure({"it": fast.timed(rows(self.at_observations, 0, 1))}, GLANCE_CALLS, progress=False)["it"]
        return {
            "distances": asdict(distances(found, own)),
            "features": found.shape[-1],
            "p50_ms": 1e3 * timed.percentile(50),
            "p95_ms": 1e3 * timed.percentile(95),
            "engine": fast.engine,
        }

    def _block_costs(self) -> Outcome:
        one = rows(self.at_observations, 0, 1)
        return self._kept({"blocks": self.engine}, lambda: dict(block_milliseconds(self.port, one, self.engine)))

    @cached_property
    def _own(self) -> Cloud:
        """The policy's own cloud, as long as anybody looks: the first chunks are those of a glance."""

        def drawn() -> Outcome:
            with running(self.port, self._as_it_is) as full:
                return {"cloud": self._cloud(full, LONG, "the policy as it is").tolist()}

        return np.asarray(self._kept({"own": True, "samples": LONG}, drawn)["cloud"])

    @property
    def _as_it_is(self) -> Candidate:
        return Candidate(engine=self.engine)

    def _cloud(self, fast: Running, samples: int, shown: str | None = None) -> Cloud:
        """All with the same noise: that makes distances steadier and adds no bias."""
        progress = shown if self.progress else None
        scale = self.port.action_scale
        return flattened(draw_chunks(fast.act, self.at_observations, samples, scale, self.seed, progress=progress))

    def _kept(self, what: Mapping[str, Any], make: Callable[[], Outcome]) -> Outcome:
        key = digest(
            {
                "made_by": __version__,
                "policy": self.port.fingerprint.to_dict(),
                "observations": hash_observations(self.at_observations),
                "seed": self.seed,
                **what,
            }
        )
        found = self._store.get(key)
        if found is None:
            make_directory(self.state)
            self._store.put(key, found := make())
        return found

    def _milliseconds(self, asked: Mapping[Any, tuple[Candidate, int]], calls: int) -> dict[Any, tuple[float, float]]:
        """p50 and p95 of one chunk, batch 1, by whatever they were asked for; all interleaved."""
        one = rows(self.at_observations, 0, 1)
        before = torch.get_num_threads()
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, before)
            calls_of = {}
            for name, (candidate, threads) in asked.items():
                torch.set_num_threads(threads)
                calls_of[str(name)] = stack.enter_context(running(self.port, candidate)).timed(one)
            torch.set_num_threads(cores())
            found = measure(calls_of, calls, progress=False)
        return {name: (1e3 * found[str(name)].percentile(50), 1e3 * found[str(name)].percentile(95)) for name in asked}

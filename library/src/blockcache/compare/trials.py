"""Trials of methods: how far each one's actions are from the policy's own, and how long a chunk takes.

What was drawn and timed is kept under all that it depends on, as it grows. Knows nothing of what is chosen by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockcache._version import __version__
from blockcache.compare.block_times import CALLS, block_milliseconds
from blockcache.compare.candidates import Calibrations, Candidate, Running, running
from blockcache.compare.checker import predicted_from
from blockcache.compare.dealing import CALIBRATION, DISTANCES, FITTING
from blockcache.compare.methods import Method
from blockcache.compare.parts import FewerSteps, SamplerFile
from blockcache.compare.reuse_parts import ScheduleFile
from blockcache.compare.store import Outcome, Store
from blockcache.compare.time_box import TimeBox, TimeUpError
from blockcache.errors import BlockcacheError, in_one_line
from blockcache.files import digest
from blockcache.fitting.clouds import BATCH, seed_of
from blockcache.measure.distance import Cloud, distances
from blockcache.measure.latency import measure
from blockcache.models.port import Port
from blockcache.observations import batch_size, hash_observations, parts, rows
from blockcache.progress import progress_bar
from blockcache.results.losses import Prediction
from blockcache.results.rollouts import BASELINE, PLAIN
from blockcache.results.tuning import Point, TuningError
from blockcache.samplers import ChosenSampler, Diffusion
from blockcache.schedule import Schedule
from blockcache_runtime.cores import cores

FIRST_SAMPLES, FINAL_SAMPLES, LEAST_SAMPLES = 12, 48, 4
"""Chunks drawn for each observation: to see what is promising, to choose among that, and at least."""
LEAST_STATES = 8
"""Observations to draw chunks at, where time is short."""
FIRST_CALLS, FINAL_CALLS, LEAST_CALLS, WARMUP = 8, 40, 5, 2
"""Timed calls: in a trial, and when the finalists are timed in turn, and then at least; and calls before them."""
REFERENCE, TIMING, FIRST, FINAL, ALL = 0.25, 0.02, 0.6, 0.8, 0.97
"""Shares of the time: for the policy's own first cloud, and to time one method; ends of first trials, finals, timings."""
CALL_SECONDS, SAVE_SECONDS = 0.5, 5.0
"""What one call may take, since an interrupt waits for it; and after how long what was drawn is saved."""


class Trials:
    """Trials of one policy's methods on one machine.

    Args:
        port: The policy.
        dealt: Observations by purpose, see `dealing`: to calibrate on, to fit samplers on, to measure distances at.
        state: The directory that keeps what was drawn, timed, recorded and chosen.
        box: The time that there is.
        engine: For every method.
        rate_hz: How often a control loop asks for a chunk: so often are timed calls made.
        seed: Of all noise.
        progress: Whether to show bars.
    """

    def __init__(
        self,
        port: Port,
        dealt: Mapping[str, Any],
        state: Path,
        box: TimeBox,
        *,
        engine: str,
        rate_hz: float,
        seed: int,
        progress: bool,
    ) -> None:
        self.port, self.state, self.box, self.engine, self.period = port, state, box, engine, 1 / rate_hz
        self.seed, self.progress = seed, progress and not box.tells
        self.candidates: dict[str, Candidate] = {}
        self.refused: dict[Method, str] = {}  # what cannot be made, and the sentence that says why
        self.predicted = Prediction(0.0, 0.0)  # of some method: where the policy lies, and why nothing may be promised
        self.late: list[str] = []  # methods that there was no time for
        self._everywhere, self._opening = dealt[DISTANCES], 0.0
        self._as_it_is, self._one = Candidate(engine=engine), rows(dealt[DISTANCES], 0, 1)
        self._calibrations = Calibrations(
            port,
            dealt[CALIBRATION],
            seed=seed,
            keep=state / "made",
            fitting=dealt[FITTING],
            block_costs=self._block_costs,
            begin=lambda generations: self.box.check(generations * self.pace, FIRST),
            progress=progress,
        )
        self._store = Store(state / "trials")

    @cached_property
    def pace(self) -> float:
        """Seconds that the policy as it is takes for a chunk, roughly."""
        with self._running(self._as_it_is) as fast:
            call = fast.timed(self._one)
            call()
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

    @cached_property
    def batch(self) -> int:
        """Observations in one call; the same for all methods, so that they get the same noise."""
        fitting = min(BATCH, max(1, round(CALL_SECONDS / self.pace)))
        return int(self._store.outcome(self._origin(batch=True), lambda: {"batch": fitting})["batch"])

    @cached_property
    def observations(self) -> Any:
        """Those that distances are measured at: fewer where the policy's own cloud would take too much of the time."""
        most, room = batch_size(self._everywhere), REFERENCE * self.box.seconds / self.pace
        count = min(most, max(LEAST_STATES, int(room / LEAST_SAMPLES)))
        return rows(self._everywhere, 0, min(most, math.ceil(count / self.batch) * self.batch))

    @cached_property
    def first_samples(self) -> int:
        """Chunks for each observation of a first trial."""
        room = REFERENCE * self.box.seconds / self.pace / batch_size(self.observations)
        return min(FIRST_SAMPLES, max(LEAST_SAMPLES, int(room)))

    def final_samples(self, count: int) -> int:
        """Chunks for each observation of so many final trials, in the time that is left for them and the policy's own."""
        room = self.box.left(FINAL) / self.pace / batch_size(self.observations)
        return min(FINAL_SAMPLES, max(self.first_samples, self.first_samples + int(room / (1 + 0.2 * count))))

    @property
    def minutes_needed(self) -> float:
        """In which the least that can be tried has its time."""
        chunks = math.ceil(LEAST_STATES / self.batch) * self.batch * LEAST_SAMPLES
        calls = 2 * FIRST_CALLS * max(self.period, 3 * self.pace)
        return math.ceil(2 * (1.2 * chunks * self.pace / REFERENCE + 4 * self._opening + calls) / 60) / 2

    def measure(self, methods: Sequence[Method], samples: int, share: float = FIRST) -> list[Point]:
        """A point for each method; what cannot be made is refused with the reason, and what there is no time for is late.

        Args:
            methods: Which.
            samples: Chunks for each observation.
            share: Of the time, after which nothing more is begun or goes on.
        """
        points = []
        with progress_bar(methods, f"{samples} chunks", unit="method", disable=not self.progress) as bar:
            for method in bar:
                bar.set_postfix_str(method.name)
                try:
                    with self.box.working(method.name, share):
                        points.append(self._point(method, samples, share))
                except TimeUpError:
                    self.late.append(method.name)
                except BlockcacheError as error:
                    self.refused[method] = f"{method} was left out: {in_one_line(error)}"
        return points

    def begin(self, deadline_ms: float | None) -> None:
        """Time the plain policy, of which a call takes longest, while there is time; and refuse a deadline that not even a
        single denoising step keeps."""
        self._times(Candidate())
        if deadline_ms is None or not isinstance(self.port.sampler, Diffusion):
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
        thread and with all, interleaved in one run. The fastest way of each point is kept.

        Args:
            points: The most wanted first: the last ones keep the times of their trials where time is short.
        """
        plain_ms: float = self._times(Candidate())["p50_ms"]
        room, turn = self.box.left(ALL), 0.0  # seconds: that are left, and of one call each
        asked: dict[Any, tuple[Candidate, int]] = {}
        if LEAST_CALLS * plain_ms / 1e3 < room / 3:
            asked[PLAIN], turn = (Candidate(), cores()), max(self.period, plain_ms / 1e3)
        for point in points:
            # what onnx runs the loop engine runs too, with the same actions
            engines = ("onnx", "loop") if (self.engine, point.engine) == ("auto", "onnx") else (point.engine,)
            ways = list(product(engines, sorted({1, cores()})))
            more = turn + len(ways) * max(self.period, point.p50_ms / 1e3)
            if len(ways) * self._opening + (WARMUP + LEAST_CALLS) * more > room:
                break
            turn, room = more, room - len(ways) * self._opening
            for way in ways:
                asked[(point.method, *way)] = replace(self.candidates[point.method], engine=way[0]), way[1]
        if not set(asked) - {PLAIN}:
            return plain_ms, list(points)
        try:
            with self.box.working("timing", 1.05):
                times = self._milliseconds(asked, min(FINAL_CALLS, int(room / turn) - WARMUP))
        except TimeUpError:
            return plain_ms, list(points)
        plain_ms, found = times.pop(PLAIN, (plain_ms,))[0], {point.method: point for point in points}
        for (method, engine, threads), (p50, p95) in sorted(times.items(), key=lambda way: way[1], reverse=True):
            found[method] = replace(found[method], engine=engine, threads=threads, p50_ms=p50, p95_ms=p95)
        return plain_ms, [*found.values()]  # the fastest way of each came last

    def sampler_of(self, method: Method) -> ChosenSampler | None:
        """The sampler of a method that was tried, with its evidence; None is the policy's own."""
        sampler = self._candidate(method).sampler
        return None if sampler is None else self._calibrations.with_evidence(sampler)

    def schedule_of(self, method: Method) -> Schedule | None:
        """The schedule of a method that was tried; None computes every block at every step."""
        strategy = self._candidate(method).strategy
        return strategy if isinstance(strategy, Schedule) else None

    def as_files(self, method: Method) -> Method:
        """A method that was tried by the files of what was made for it: nothing is made anew from other observations."""
        stem, sampler, schedule = self.state / digest({"method": method.name})[:8], None, None
        if (chosen := self.sampler_of(method)) is not None:
            sampler = SamplerFile(f"{stem}-sampler.json")
            chosen.save(sampler.name)
        if (made := self.schedule_of(method)) is not None:
            schedule = ScheduleFile(f"{stem}-schedule.json")
            made.save(schedule.name)
        return Method(sampler, schedule, method.executed)

    def _candidate(self, method: Method) -> Candidate:
        """What was tried of a method; how its chunks are executed plays no part there."""
        return self.candidates[replace(method, executed=None).name]

    def _point(self, method: Method, samples: int, share: float) -> Point:
        candidate = self._calibrations.candidate(method, self.engine)
        flops = candidate.flops(self.port, 0.0)
        own = self._cloud(self._as_it_is, samples, share)
        found = own if candidate == self._as_it_is else self._cloud(candidate, samples, share)
        times, measured = self._times(candidate), distances(found, own)
        predicted = Prediction(0.0, 0.0) if found is own else predicted_from(self.port, found, own, measured)
        self.predicted = predicted if predicted.where else self.predicted
        self.candidates[method.name] = candidate
        return Point(
            method=method.name,
            engine=times["engine"],
            threads=cores(),
            p50_ms=times["p50_ms"],
            p95_ms=times["p95_ms"],
            flops=flops,
            chunks=found.shape[0] * samples,
            distances=measured,
            loss=predicted.loss,
            bound=1.0 if predicted.bound is None else predicted.bound,
        )

    def _times(self, candidate: Candidate) -> Outcome:
        """Of one chunk of a trial, and the engine that ran it."""

        def make() -> Outcome:
            with self._running(candidate) as fast:
                call = fast.timed(self._one)
                timed = measure({"it": call}, 1, warmup=0, progress=False)["it"]
                calls = min(FIRST_CALLS, int(TIMING * self.box.seconds / max(timed.p50, self.period)))
                if calls > 1:  # one that takes long is not worth another one
                    timed = measure({"it": call}, calls, 1, progress=False, period=self.period)["it"]
            return {"p50_ms": 1e3 * timed.p50, "p95_ms": 1e3 * timed.percentile(95), "engine": fast.engine}

        return self._store.outcome(self._origin(times=candidate.describe(self.port), period=self.period), make)

    def _block_costs(self) -> Outcome:
        kinds = len({(block.kind, block.cost) for block in self.port.adapter.blocks}) + 1
        self.box.check(kinds * (self._opening + CALLS * self.pace), FIRST)
        origin = self._origin(blocks=self.engine)
        return self._store.outcome(origin, lambda: dict(block_milliseconds(self.port, self._one, self.engine)))

    def _cloud(self, candidate: Candidate, samples: int, share: float) -> Cloud:
        """So many chunks of a candidate at each observation: what is missing of them is drawn, and all of it kept. All
        candidates have the same noise: that makes distances steadier and adds no bias."""
        batches = parts(self.observations, self.batch)
        how = self._origin(cloud=candidate.describe(self.port), batch=self.batch)
        keys = [digest({**how, "place": place}) for place in range(len(batches))]
        kept: list[list[Any]] = [(self._store.get(key) or {"chunks": []})["chunks"] for key in keys]
        asked = [(n, place) for n in range(samples) for place in range(len(batches)) if n >= len(kept[place])]
        if asked:
            part = len(candidate.on(self.port).timesteps) / len(self.port.timesteps)
            seconds, own = self.batch * self.pace * part, candidate == self._as_it_is
            # until a method was compared, whatever fits: the same command goes on from there
            partly = own or not self.candidates.keys() - {BASELINE}
            drawn = asked[: max(0, int(self.box.left(share) / seconds))] if partly else asked
            self.box.check(max(1, len(drawn)) * seconds, share)
            with self._running(candidate) as fast:
                started = time.monotonic()
                try:
                    self._draw(fast, batches, drawn, kept, keys)
                finally:
                    self._save(keys, kept)
                if own:
                    self.pace = (time.monotonic() - started) / (len(drawn) * self.batch)
            if len(drawn) < len(asked):
                raise TimeUpError(f"{len(asked) - len(drawn)} calls are missing")
        return np.concatenate([np.stack(one[:samples], axis=1) for one in kept])

    def _draw(
        self, fast: Running, batches: Sequence[Any], asked: Sequence[Any], kept: list[list[Any]], keys: Sequence[str]
    ) -> None:
        """Draw what is asked for, (sample, batch), behind what is kept for each batch."""
        saved = time.monotonic()
        with progress_bar(asked, unit="call", leave=False, disable=not self.progress) as bar:
            for sample, place in bar:
                chunks = fast.act(batches[place], seed_of(self.seed, sample, place)) * self.port.action_scale
                kept[place].append(chunks.reshape(len(chunks), -1).tolist())
                if time.monotonic() > saved + SAVE_SECONDS:
                    self._save(keys, kept)
                    saved = time.monotonic()

    def _save(self, keys: Sequence[str], kept: Sequence[Sequence[Any]]) -> None:
        for key, chunks in zip(keys, kept, strict=True):
            self._store.put(key, {"chunks": chunks})

    @contextmanager
    def _running(self, candidate: Candidate) -> Iterator[Running]:
        """Set a candidate going, and learn how long that takes."""
        started = time.monotonic()
        with running(self.port, candidate) as fast:
            self._opening = max(self._opening, time.monotonic() - started)
            yield fast

    def _origin(self, **what: Any) -> dict[str, Any]:
        """All that a trial depends on."""
        policy, observed = self.port.fingerprint.to_dict(), hash_observations(self._everywhere)
        return {"made_by": __version__, "policy": policy, "observations": observed, "seed": self.seed, **what}

    def _milliseconds(self, asked: Mapping[Any, tuple[Candidate, int]], calls: int) -> dict[Any, tuple[float, float]]:
        """p50 and p95 of one chunk, batch 1, by whatever they were asked for; all interleaved."""
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            calls_of = {}
            for name, (candidate, threads) in asked.items():
                torch.set_num_threads(threads)
                calls_of[name] = stack.enter_context(running(self.port, candidate)).timed(self._one)
            torch.set_num_threads(cores())
            found = measure(calls_of, calls, WARMUP, progress=False, period=self.period)
        return {name: (1e3 * one.p50, 1e3 * one.percentile(95)) for name, one in found.items()}

"""The benchmark: one table from one interleaved run, what users run today beside every engine.

Measures whatever policy is behind a port. Knows nothing of tasks or families.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.compare.candidates import Running
from blockcache.compare.results import EAGER
from blockcache.engines import accelerate
from blockcache.engines.accelerate import build_checked
from blockcache.engines.build import Build
from blockcache.engines.loop import Loop
from blockcache.engines.onnx import export
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.errors import EngineError, FileError, in_one_line
from blockcache.files import Format
from blockcache.measure import machine
from blockcache.measure.latency import Latency, measure
from blockcache.models.noise import draw_all
from blockcache.models.pairing import generate
from blockcache.models.port import Port
from blockcache.models.program import Program
from blockcache.observations import batch_size
from blockcache.samplers import fewer_steps
from blockcache.schedule import Schedule
from blockcache.schedule.cost import generation
from blockcache.solvers import uniform
from blockcache.studies.savings import DiffusersLoop

FORMAT = Format(
    "blockcache.bench",
    "benchmark",
    dict.fromkeys(("shape", "schedule", "machine", "peak_gflops", "unavailable"), dict)
    | {"repeats": int, "eager": str, "rows": list},
    optional=("made_by",),
)
Call = Callable[[], Any]


@dataclass(frozen=True)
class Measurement:
    """One candidate. Milliseconds of whole generations; `max_difference` in normalised units, None across samplers."""

    name: str
    engine: str
    threads: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    chunk_hz: float
    action_hz: float
    speedup: float
    over_full: float | None  # over the fastest full precision in the same engine and with the same threads
    gflop: float
    gflops: float
    of_peak: float
    max_difference: float | None
    samples_ms: list[float] = field(repr=False)


@dataclass(frozen=True)
class Bench:
    """A whole run; its fields are the keys of the file."""

    shape: dict[str, Any]
    schedule: dict[str, Any]
    machine: dict[str, Any]
    peak_gflops: dict[str, float]
    repeats: int
    eager: str
    rows: list[Measurement]
    unavailable: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class _Timed:
    name: str
    engine: str
    threads: int
    call: Call
    flops: int
    full: tuple[str, ...] = ()  # candidates that are full precision in the same engine; the fastest counts
    comparable: bool = True  # whether the same noise should give almost the same actions

    def answer(self) -> Any:
        """With the same noise as all others, also where a policy draws it from torch's global generator."""
        return generate(lambda _: self.call(), None, seed=0)


def run_bench(
    port: Port,
    schedule: Schedule,
    observations: Any,
    shape: dict[str, Any],
    *,
    threads: int,
    repeats: int,
    quick: bool = False,
    progress: bool = True,
) -> Bench:
    """Measure all candidates in one interleaved run.

    port          the policy
    schedule      what BAC stands for in the table
    observations  the batch that every call answers
    shape         the policy's sizes, for the record
    threads       engines are measured with one thread and with this many
    repeats       interleaved rounds
    quick         leaves out torch.compile, the samplers with fewer steps and the savings one by one
    """
    counts = sorted({1, threads})
    peaks = {str(count): machine.peak_gflops(count) for count in counts}
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        maker = _Maker(stack, port, schedule, observations)
        for count in counts:
            maker.eager(count)
        if not quick:
            maker.compiled(threads)
            maker.fewer(16, 10, 50)
        maker.engines(counts, quick)
        if not quick:
            maker.savings()
        candidates = maker.candidates
        latencies = measure({c.name: c.call for c in candidates}, repeats, progress=progress)
        found = {c.name: port.action_of(c.answer()).detach() for c in candidates if c.comparable}
        plain, scale = found[candidates[0].name], port.action_scale
        gaps = {name: np.abs((action - plain).cpu().numpy() * scale).max() for name, action in found.items()}
    eager = min((c.name for c in candidates[: len(counts)]), key=lambda name: latencies[name].p50)
    batch = batch_size(observations)
    return Bench(
        shape=shape,
        schedule={"computed": schedule.computed, "reused_share": schedule.reused_share, **dict(schedule.origin)},
        machine=machine.describe(),
        peak_gflops=peaks,
        repeats=repeats,
        eager=eager,
        rows=[_row(c, latencies, eager, port.n_action_steps, batch, peaks, gaps.get(c.name)) for c in candidates],
        unavailable=maker.unavailable,
    )


class _Maker:
    """Makes candidates, each on a copy of the policy; what cannot be made is `unavailable`, with the reason."""

    def __init__(self, stack: ExitStack, port: Port, schedule: Schedule, obs: Any) -> None:
        self.stack, self.port, self.schedule, self.obs = stack, port, schedule, obs
        self.steps = len(port.timesteps)
        self.everything = Schedule.every_step(self.steps, schedule.blocks)
        self.candidates: list[_Timed] = []
        self.unavailable: dict[str, str] = {}

    def eager(self, threads: int) -> None:
        name = f"{EAGER}, {_threads(threads)}"
        self._add(name, EAGER, threads, self._plain_call(self.port.copy(), threads), self._plain(None))

    def compiled(self, threads: int) -> None:
        own, name = self.port.copy(), f"{EAGER} + torch.compile, {_threads(threads)}"
        try:
            own.adapter.denoiser.compile()
            call = self._plain_call(own, threads)
            call()  # compiles, or says that it cannot
        except Exception as error:
            self.unavailable[f"{EAGER} + torch.compile"] = in_one_line(error)[:200]
            return
        self._add(name, EAGER, threads, call, self._plain(None))

    def fewer(self, *counts: int) -> None:
        """A sampler with fewer steps shares the initial noise only, so its actions are not compared here."""
        own = self.port.sampler
        if own is None:
            self.unavailable["fewer steps"] = self.port.untabulated
            return
        kind = "euler" if own.type == "euler" else "ddim"
        for count in sorted((count for count in counts if count < self.steps), reverse=True):
            other = self.port.with_sampler(fewer_steps(own, kind, count)).copy()
            cost = generation(self.port.adapter.blocks, self.port.adapter.every_step, count)
            name = f"{kind.upper()}-{count}, {EAGER}"
            self._add(name, EAGER, 1, self._plain_call(other, 1), cost, comparable=False)

    def engines(self, counts: list[int], quick: bool) -> None:
        reduced = self.schedule
        self._accelerated("BAC, patched", "patched", reduced, 1, self._plain(reduced), (f"{EAGER}, 1 thread",))
        try:
            built = build_checked(self.port, reduced, "loop")
        except EngineError as error:
            self.unavailable["loop and onnx"] = str(error)
            return
        full = self._accelerated("full precision, loop", "loop", None, 1, _flops(built.program, self.everything))
        self._accelerated("BAC, loop", "loop", reduced, 1, _flops(built.program, reduced), full)
        for count in counts:
            name = f"full precision, onnx, {_threads(count)}"
            full = self._accelerated(name, "onnx", None, count, _flops(built.program, self.everything))
            if full and not quick:
                full += self._unrolled(count, built)
            name = f"BAC, onnx, {_threads(count)}"
            self._accelerated(name, "onnx", reduced, count, _flops(built.program, reduced), full)
        count, even = counts[-1], self._uniform_at_equal_flops()
        name = f"Uniform at equal FLOPs, onnx, {_threads(count)}"
        self._accelerated(name, "onnx", even, count, _flops(built.program, even), full)
        if built.program.causal:  # else the tokens behind the executed actions have a say in them
            cost = _flops(built.actions_only().program, reduced)
            name = f"BAC, onnx, {_threads(count)}, executed actions only"
            self._accelerated(name, "onnx", reduced, count, cost, full, output="action")

    def savings(self) -> None:
        """Full precision in the loop engine, the exact savings added one by one."""
        if "loop and onnx" in self.unavailable:
            return
        built = build_checked(self.port, self.everything, "loop")
        assert self.port.sampler is not None
        for name, program in built.program.without_savings().items():
            loop = DiffusersLoop(Loop(program, built.plan, built.sampler), self.port.sampler)
            call = partial(self._with_diffusers, loop, self._observed(program))
            self._add(f"savings: {name}", "loop", 1, _on_threads(1, call), _flops(program, self.everything))
        self._runner("savings: + constant sampler", built)
        if built.program.causal:
            self._runner("savings: + executed actions only", built.actions_only())

    def _with_diffusers(self, loop: DiffusersLoop, obs: dict[str, Tensor]) -> Any:
        """The sampler draws its noise itself here: handing it over takes diffusers a detour of its own."""
        return self.port.answer(loop(obs, generator=_generator()))

    def _runner(self, name: str, built: Build) -> None:
        loop = Loop(built.program, built.plan, built.sampler)
        self._add(name, "loop", 1, self._drawing(loop, built), _flops(built.program, self.everything))

    def _unrolled(self, threads: int, built: Build) -> tuple[str, ...]:
        """Full precision unrolled: too large and too slow to load to be the engine's own form, but it runs faster."""
        full = Build(built.program, self.everything, built.sampler)
        path = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "full.onnx"
        export(full, self.port.fingerprint, path, unrolled=True)
        name = f"full precision, onnx unrolled, {_threads(threads)}"
        call = self._drawing(OnnxRunner(path, threads), full)
        return self._add(name, "onnx", threads, call, _flops(built.program, self.everything))

    def _drawing(self, runner: Callable[..., dict[str, Tensor]], built: Build) -> Call:
        """Draws its noise in the timed call, as every candidate does."""
        obs, like = self._observed(built.program), built.program.like
        chunk = (batch_size(self.obs), *built.program.chunk)
        return _on_threads(1, lambda: self.port.answer(runner(obs, draw_all(built.sampler, chunk, like, _generator()))))

    def _observed(self, program: Program) -> dict[str, Tensor]:
        return self.port.observe(self.port.given(self.obs), program.like)

    def _accelerated(
        self,
        name: str,
        engine: str,
        schedule: Schedule | None,
        threads: int,
        cost: int,
        full: tuple[str, ...] = (),
        output: str = "chunk",
    ) -> tuple[str, ...]:
        own = self.port.copy()
        try:
            self.stack.enter_context(accelerate(own, schedule, engine, output, threads=threads))
        except (EngineError, FileError) as error:
            self.unavailable[name] = str(error)
            return ()
        return self._add(name, engine, threads, self._plain_call(own, 1), cost, full)

    def _add(
        self, name: str, engine: str, threads: int, call: Call, flops: int, *full: Any, **more: Any
    ) -> tuple[str, ...]:
        self.candidates.append(_Timed(name, engine, threads, call, flops, *full, **more))
        return (name,)

    def _plain_call(self, port: Port, threads: int) -> Call:
        return _on_threads(threads, Running(port, EAGER, lambda: None).timed(self.obs))

    def _plain(self, schedule: Schedule | None) -> int:
        return generation(self.port.adapter.blocks, self.port.adapter.every_step, self.steps, schedule)

    def _uniform_at_equal_flops(self) -> Schedule:
        goal, names, origin = self._plain(self.schedule), self.schedule.blocks, {"method": "uniform"}
        spaced = [dict.fromkeys(names, uniform(self.steps, count)) for count in range(1, self.steps + 1)]
        options = [Schedule(self.steps, updates, origin=origin) for updates in spaced]
        return min(options, key=lambda option: abs(self._plain(option) - goal))


def _flops(program: Program, schedule: Schedule) -> int:
    """What remains of a generation after the program's exact savings."""
    return program.once + generation(program.blocks, program.every_step, schedule.steps, schedule)


def _row(
    candidate: _Timed,
    latencies: dict[str, Latency],
    eager: str,
    n_action_steps: int,
    batch: int,
    peaks: dict[str, float],
    difference: float | None,
) -> Measurement:
    latency = latencies[candidate.name]
    rate = batch * candidate.flops / latency.p50 / 1e9
    return Measurement(
        name=candidate.name,
        engine=candidate.engine,
        threads=candidate.threads,
        p50_ms=latency.p50 * 1e3,
        p95_ms=latency.percentile(95) * 1e3,
        p99_ms=latency.percentile(99) * 1e3,
        chunk_hz=1 / latency.p50,
        action_hz=n_action_steps / latency.p50,
        speedup=latency.over(latencies[eager]),
        over_full=min((latency.over(latencies[name]) for name in candidate.full), default=None),
        gflop=candidate.flops / 1e9,
        gflops=rate,
        of_peak=rate / peaks[str(candidate.threads)],
        max_difference=None if difference is None else float(difference),
        samples_ms=[round(float(value) * 1e3, 4) for value in latency.seconds],
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _on_threads(threads: int, call: Call) -> Call:
    def run() -> Any:
        torch.set_num_threads(threads)
        return call()

    return run


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"

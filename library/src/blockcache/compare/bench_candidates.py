"""What the benchmark times: the plain policy, fewer steps, every engine, and what other packages add.

Knows nothing of families or of tables.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockcache.attach.generation import first_denoiser_call
from blockcache.attach.patching import Patches
from blockcache.compare.candidates import Candidate, Running, program_flops
from blockcache.engines import accelerate
from blockcache.engines.build import Build
from blockcache.engines.loop import Constants, TorchBackend, by_moment
from blockcache.engines.onnx import OnnxRunner, export, open_cached
from blockcache.engines.rehearsal import rehearsed_build
from blockcache.engines.walk import perceive
from blockcache.errors import EngineError, FileError, in_one_line
from blockcache.models.port import Port
from blockcache.models.program import Program
from blockcache.models.sampling import draw_all, generate
from blockcache.observations import batch_size
from blockcache.results.rollouts import EAGER
from blockcache.samplers import fewer_steps
from blockcache.schedule import Schedule
from blockcache.solvers import uniform

Call = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Timed:
    name: str
    engine: str
    threads: int
    call: Call
    flops: int
    full: tuple[str, ...] = ()  # candidates that are full precision in the same engine; the fastest counts
    comparable: bool = True  # whether the same noise should give almost the same actions
    saving: str | None = None
    limit: bool = False

    def answer(self) -> Any:
        """With the same noise as all others, also where a policy draws it from torch's global generator."""
        return generate(lambda _: self.call(), None, seed=0)


class CandidateMaker:
    """Makes candidates, each on a copy of the policy; what cannot be made is `unavailable`, with the reason."""

    def __init__(self, stack: ExitStack, port: Port, schedule: Schedule, obs: Any, named: str = "BAC") -> None:
        self.stack, self.port, self.schedule, self.obs, self.named = stack, port, schedule, obs, named
        self.steps = len(port.timesteps)
        self.everything = Schedule.every_step(self.steps, schedule.blocks)
        self.candidates: list[Timed] = []
        self.unavailable: dict[str, str] = {}

    def eager(self, threads: int) -> None:
        name = f"{EAGER}, {_threads(threads)}"
        self.add(name, EAGER, threads, self._plain_call(self.port.copy(), threads), self._plain(None))

    def compiled(self, threads: int) -> None:
        own, name = self.port.copy(), f"{EAGER} + torch.compile, {_threads(threads)}"
        try:
            own.adapter.denoiser.compile()
            call = self._plain_call(own, threads)
            call()  # compiles, or says that it cannot
        except Exception as error:
            self.unavailable[f"{EAGER} + torch.compile"] = in_one_line(error)[:200]
            return
        self.add(name, EAGER, threads, call, self._plain(None))

    def fewer(self, *counts: int) -> None:
        """A sampler with fewer steps shares the initial noise only, so its actions are not compared here."""
        own = self.port.sampler
        if own is None:
            self.unavailable["fewer steps"] = self.port.sampling.unknown
            return
        kind = "euler" if own.type == "euler" else "ddim"
        for count in sorted((count for count in counts if count < self.steps), reverse=True):
            less = Candidate(sampler=fewer_steps(own, kind, count))
            call, cost = self._plain_call(less.on(self.port).copy(), 1), less.flops(self.port, 0.0)
            self.add(f"{kind.upper()}-{count}, {EAGER}", EAGER, 1, call, cost, comparable=False)

    def engines(self, counts: list[int], quick: bool) -> None:
        reduced, named, whole = self.schedule, self.named, "full precision"
        self._accelerated(named, "patched", reduced, self._plain(reduced), full=(f"{EAGER}, 1 thread",))
        try:
            built = rehearsed_build(self.port, reduced, "loop")
        except EngineError as error:
            self.unavailable["loop and onnx"] = str(error)
            return
        most, cost = _flops(built.program, self.everything), _flops(built.program, reduced)
        full = self._accelerated(whole, "loop", None, most)
        self._accelerated(named, "loop", reduced, cost, full=full)
        for count in counts:
            full = self._accelerated(whole, "onnx", None, most, count)
            if full and not quick and not self.port.begins_after_encoder:
                full += self._unrolled(count, built)
            self._accelerated(named, "onnx", reduced, cost, count, full, limit=True)
        even = self._uniform_at_equal_flops()
        self._accelerated("Uniform at equal FLOPs", "onnx", even, _flops(built.program, even), counts[-1], full)
        if built.program.causal:  # else the tokens behind the executed actions have a say in them
            fewer = _flops(built.actions_only().program, reduced)
            self._accelerated(named, "onnx", reduced, fewer, counts[-1], full, only_executed=True)

    def _unrolled(self, threads: int, built: Build) -> tuple[str, ...]:
        """Full precision unrolled: with many steps too large and too slow to load to be the engine's own form."""
        full = Build(built.program, self.everything, built.sampler)
        path = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "full.onnx"
        export(full, self.port.fingerprint, path, unrolled=True)
        name = f"full precision, onnx unrolled, {_threads(threads)}"
        call = self.drawing(OnnxRunner(path, threads), full)
        return self.add(name, "onnx", threads, call, _flops(built.program, self.everything))

    def encoder(self, counts: list[int]) -> list[Timed]:
        """The encoder by itself, in the policy's own code and in the engines that hold it; none without
        cameras.

        Args:
            counts: Of threads, for the policy's own and for onnx.
        """
        if not self.port.begins_after_encoder and not self.port.cameras:
            return []

        def one(engine: str, threads: int, call: Call, torch_threads: int = 1) -> Timed:
            name = f"encoder, {engine}, {threads}"
            return Timed(name, engine, threads, on_threads(torch_threads, call), self.port.encoder_flops)

        own, patches = self.port.copy(), Patches()
        encode = first_denoiser_call(own, getattr(own.policy, own.entry), patches)
        self.stack.enter_context(patches)
        given = own.prepare_observation(self.obs)
        found = [one(EAGER, count, lambda: encode(given), count) for count in counts]
        if self.port.begins_after_encoder or "loop and onnx" in self.unavailable:
            return found
        built = rehearsed_build(self.port, self.schedule, "loop")
        program, constants, observed = built.program, Constants(built.program), self.observed(built.program)

        @torch.no_grad()
        def encode_in_loop() -> Any:
            return perceive(TorchBackend(constants, batch_size(self.obs)), program, by_moment(observed, program))

        found.append(one("loop", 1, encode_in_loop))
        for count in counts:
            try:
                runner = open_cached(built, self.port.fingerprint, count)
            except (EngineError, FileError):
                break
            found.append(one("onnx", count, partial(runner.features, observed)))
        return found

    def drawing(self, runner: Callable[..., dict[str, Tensor]], built: Build) -> Call:
        """Draws its noise in the timed call, as every candidate does."""
        obs, like = self.observed(built.program), built.program.like
        chunk = (batch_size(self.obs), *built.program.chunk)
        return on_threads(
            1, lambda: self.port.entry_result(runner(obs, draw_all(built.sampler, chunk, like, fixed_generator())))
        )

    def observed(self, program: Program) -> dict[str, Tensor]:
        """The observation as a program takes it."""
        return self.port.read_observation(self.port.prepare_observation(self.obs), program.like)

    def _accelerated(
        self,
        what: str,
        engine: str,
        schedule: Schedule | None,
        cost: int,
        threads: int = 1,
        full: tuple[str, ...] = (),
        only_executed: bool = False,
        limit: bool = False,
    ) -> tuple[str, ...]:
        """One engine under one schedule; the candidate's name, or nothing where that engine cannot run it."""
        own, output = self.port.copy(), "action" if only_executed else "chunk"
        name = f"{what}, {engine}" + f", {_threads(threads)}" * (engine == "onnx")
        name += ", executed actions only" * only_executed
        try:
            self.stack.enter_context(accelerate(own, schedule, engine, output, threads=threads, trust=True))
        except (EngineError, FileError) as error:
            self.unavailable[name] = str(error)
            return ()
        return self.add(name, engine, threads, self._plain_call(own, 1), cost, full, limit=limit)

    def add(
        self, name: str, engine: str, threads: int, call: Call, flops: int, *full: Any, **more: Any
    ) -> tuple[str, ...]:
        """One more candidate, arguments as the fields of `Timed`; its name, as `full` takes it."""
        self.candidates.append(Timed(name, engine, threads, call, flops, *full, **more))
        return (name,)

    def _plain_call(self, port: Port, threads: int) -> Call:
        return on_threads(threads, Running(port, EAGER, lambda: None).timed(self.obs))

    def _plain(self, schedule: Schedule | None) -> int:
        return Candidate(schedule, "patched").flops(self.port, 0.0)

    def _uniform_at_equal_flops(self) -> Schedule:
        goal, names, origin = self._plain(self.schedule), self.schedule.blocks, {"method": "uniform"}
        spaced = [dict.fromkeys(names, uniform(self.steps, count)) for count in range(1, self.steps + 1)]
        options = [Schedule(self.steps, updates, origin=origin) for updates in spaced]
        return min(options, key=lambda option: abs(self._plain(option) - goal))


def _flops(program: Program, schedule: Schedule) -> int:
    return program_flops(program, schedule.steps, schedule)


def fixed_generator() -> torch.Generator:
    """Always draws the same noise."""
    return torch.Generator().manual_seed(0)


def on_threads(threads: int, call: Call) -> Call:
    """The call with so many threads of torch's.

    Args:
        threads: How many.
        call: What is run with them.
    """

    def run() -> Any:
        torch.set_num_threads(threads)
        return call()

    return run


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"

"""The benchmark: one table from one interleaved run, what users run today beside every engine.

Measures a random-weight policy of any shape (speed does not depend on the weights) or a real one. Knows nothing of tasks.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from blockcache.compare.results import EAGER
from blockcache.engines import accelerate
from blockcache.engines.compiled import compile_policy
from blockcache.engines.loop import Loop, Memory, TabulatedMemory
from blockcache.engines.onnx import export
from blockcache.engines.onnx_runner import OnnxRunner
from blockcache.files import Format
from blockcache.measure import machine
from blockcache.measure.latency import Latency, measure
from blockcache.models import flops
from blockcache.models.dpt import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.dpt.denoiser import DiffusionTransformer
from blockcache.models.dpt.flops import DPTShape, whole_loop
from blockcache.models.noise import draw_all
from blockcache.models.port import examine
from blockcache.samplers import SamplerConfig, fewer_steps, table
from blockcache.schedule import Schedule
from blockcache.schedule.cost import generation
from blockcache.schedule.plan import compile_plan
from blockcache.schedule.presets import published_schedule
from blockcache.solvers import uniform
from blockcache.studies.savings import DiffusersLoop, EncodedMemory, ProjectedMemory

FORMAT = Format(
    "blockcache.bench",
    "benchmark",
    dict.fromkeys(("shape", "schedule", "machine", "peak_gflops", "unavailable"), dict)
    | {"repeats": int, "eager": str, "rows": list},
    optional=("made_by",),
)
Call = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Shape:
    """A policy to measure. The defaults are the paper's: 15.74 GFLOP in full."""

    width: int = 256
    layers: int = 8
    heads: int = 4
    horizon: int = 10
    n_obs_steps: int = 2
    obs_dim: int = 66
    action_dim: int = 2
    n_action_steps: int = 8
    sampler: str = "ddpm"
    steps: int = 100
    batch: int = 1

    def policy(self) -> DiffusionTransformerPolicy:
        """Random weights, always the same ones."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return DiffusionTransformerPolicy(
                DPTConfig(
                    obs_dim=self.obs_dim,
                    action_dim=self.action_dim,
                    horizon=self.horizon,
                    n_obs_steps=self.n_obs_steps,
                    n_action_steps=self.n_action_steps,
                    n_layer=self.layers,
                    n_head=self.heads,
                    n_emb=self.width,
                    sampler=SamplerConfig.from_dict({"type": self.sampler, "num_inference_steps": self.steps}),
                )
            ).eval()


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
class _Candidate:
    name: str
    engine: str
    threads: int
    call: Call
    flops: int
    full: tuple[str, ...] = ()  # candidates that are full precision in the same engine; the fastest counts
    comparable: bool = True  # whether the same noise should give almost the same actions


def preset_for(shape: Shape) -> Schedule:
    """The paper's square_ph schedule, stretched to another number of steps or layers where need be."""
    printed = published_schedule("square_ph")
    rows = {}
    for index in range(shape.layers):
        source = index * 8 // shape.layers
        for kind in ("SA", "CA", "FFN"):
            steps = printed.updates[f"layers.{source}.{kind}"]
            rows[f"layers.{index}.{kind}"] = sorted({step * shape.steps // 100 for step in steps})
    stretched = shape.layers != 8 or shape.steps != 100
    return Schedule(shape.steps, rows, origin={"method": "bac", "source": "paper, square_ph", "stretched": stretched})


def run_bench(
    shape: Shape,
    policy: DiffusionTransformerPolicy,
    schedule: Schedule,
    *,
    threads: int,
    repeats: int,
    quick: bool = False,
    progress: bool = True,
) -> Bench:
    """Measure all candidates in one interleaved run. `quick` leaves out torch.compile and the fewer-step samplers."""
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(shape.batch, policy.n_obs_steps, policy.obs_dim, generator=generator)
    counts = sorted({1, threads})
    peaks = {str(count): machine.peak_gflops(count) for count in counts}
    before = torch.get_num_threads()
    unavailable: dict[str, str] = {}
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        maker = _Maker(stack, policy, schedule, observations)
        candidates = [maker.eager(count) for count in counts]
        if not quick:
            try:
                candidates.append(maker.compiled(threads))
            except Exception as error:
                unavailable["eager + torch.compile"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            candidates += [maker.fewer(steps) for steps in (50, 16, 10) if steps < policy.num_inference_steps]
        candidates += maker.engines(counts, quick)
        if not quick:
            candidates += maker.savings()
        latencies = measure({c.name: c.call for c in candidates}, repeats, progress=progress)
        full = candidates[0].call()["action"]
        differences = {c.name: _difference(policy, c.call()["action"], full) for c in candidates if c.comparable}
    eager = min((c.name for c in candidates[: len(counts)]), key=lambda name: latencies[name].p50)
    rows = [_row(c, latencies, eager, policy, shape.batch, peaks, differences.get(c.name)) for c in candidates]
    return Bench(
        shape=asdict(shape),
        schedule={"computed": schedule.computed, "reused_share": schedule.reused_share, **dict(schedule.origin)},
        machine=machine.describe(),
        peak_gflops=peaks,
        repeats=repeats,
        eager=eager,
        rows=rows,
        unavailable=unavailable,
    )


class _Maker:
    """Makes candidates, each on a copy of the policy."""

    def __init__(self, stack: ExitStack, policy: DiffusionTransformerPolicy, schedule: Schedule, obs: Tensor) -> None:
        self.stack, self.policy, self.schedule, self.obs = stack, policy, schedule, obs
        self.target = examine(policy)
        self.shape = DPTShape(
            width=policy.config.n_emb,
            layers=policy.config.n_layer,
            tokens=policy.horizon,
            cond_tokens=1 + policy.n_obs_steps,
            cond_dim=policy.obs_dim,
            input_dim=policy.action_dim,
            output_dim=policy.action_dim,
        )

    def eager(self, threads: int) -> _Candidate:
        return _Candidate(
            f"eager, {_threads(threads)}", EAGER, threads, self._call(self.policy, threads), self._plain(None)
        )

    def compiled(self, threads: int) -> _Candidate:
        own = copy.deepcopy(self.policy)
        own.model = cast(DiffusionTransformer, torch.compile(own.model))
        call = self._call(own, threads)
        call()  # compiles, or says that it cannot
        return _Candidate(f"eager + torch.compile, {_threads(threads)}", EAGER, threads, call, self._plain(None))

    def fewer(self, steps: int) -> _Candidate:
        """A sampler with fewer steps shares the initial noise only, so its actions are not compared here."""
        own = copy.deepcopy(self.policy).with_sampler(fewer_steps(self.policy.sampler, "ddim", steps))
        cost = generation(self.shape.blocks, self.shape.every_step, steps)
        return _Candidate(f"DDIM-{steps}, eager", EAGER, 1, self._call(own, 1), cost, comparable=False)

    def engines(self, counts: list[int], quick: bool) -> list[_Candidate]:
        reduced, everything = self.schedule, None
        remaining = self._remaining(reduced)
        found = [
            self._accelerated("BAC, patched", "patched", reduced, 1, self._plain(reduced), ("eager, 1 thread",)),
            self._accelerated("full precision, loop", "loop", everything, 1, self._remaining(None)),
            self._accelerated("BAC, loop", "loop", reduced, 1, remaining, ("full precision, loop",)),
        ]
        for count in counts:
            name = f"full precision, onnx, {_threads(count)}"
            folded, all_folded = self._remaining(reduced, folded=True), self._remaining(None, folded=True)
            found.append(self._accelerated(name, "onnx", everything, count, all_folded))
            full: tuple[str, ...] = (name,)
            if not quick:
                found.append(self._unrolled(count, all_folded))
                full = (name, found[-1].name)
            found.append(self._accelerated(f"BAC, onnx, {_threads(count)}", "onnx", reduced, count, folded, full))
        count = counts[-1]
        even = self._uniform_at_equal_flops()
        name = f"Uniform at equal FLOPs, onnx, {_threads(count)}"
        found.append(self._accelerated(name, "onnx", even, count, self._remaining(even, folded=True), full))
        if compile_policy(self.target, "onnx").causal:  # else the tokens behind the executed actions have a say in them
            cost = self._remaining(reduced, folded=True, tokens=self.policy.config.executed.stop)
            name = f"BAC, onnx, {_threads(count)}, executed actions only"
            found.append(self._accelerated(name, "onnx", reduced, count, cost, full, output="action"))
        return found

    def savings(self) -> list[_Candidate]:
        """Full precision in the loop engine, the exact savings added one by one."""
        compiled, plan = compile_policy(self.target, "loop"), compile_plan(self._every_step())
        plain, saved = self._plain(None), self._remaining(None)
        memories: list[tuple[str, Callable[..., Memory], int]] = [
            ("conditions encoded at every step", EncodedMemory, plain - self._embeddings()),
            ("+ conditions encoded once", ProjectedMemory, saved + self._projections()),
        ]
        memories.append(("+ keys and values once", TabulatedMemory, saved))
        found = [
            self._runner(f"savings: {name}", self._with_diffusers(Loop(compiled, plan, memory)), cost)
            for name, memory, cost in memories
        ]
        found.append(self._runner("savings: + constant sampler", Loop(compiled, plan), saved))
        if compiled.causal:
            stop = self.policy.config.executed.stop
            cut = Loop(compiled.cut(stop), plan)
            found.append(self._runner("savings: + executed actions only", cut, self._remaining(None, tokens=stop)))
        return found

    def _with_diffusers(self, loop: Loop) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """The sampler draws its noise itself here: handing it over takes diffusers a detour of its own."""
        runner = DiffusersLoop(loop, self.policy.sampler)
        return lambda obs, noise: runner(obs, generator=_generator())

    def _unrolled(self, threads: int, cost: int) -> _Candidate:
        """Full precision unrolled: too large and too slow to load to be the engine's own form, but it runs faster."""
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(directory) / "full.onnx"
        export(compile_policy(self.target, "onnx"), self._every_step(), self.target.fingerprint, path, unrolled=True)
        name = f"full precision, onnx unrolled, {_threads(threads)}"
        return self._runner(name, OnnxRunner(path, threads), cost, "onnx", threads)

    def _runner(
        self,
        name: str,
        runner: Callable[[Tensor, Tensor], dict[str, Tensor]],
        cost: int,
        engine: str = "loop",
        threads: int = 1,
    ) -> _Candidate:
        """Draws its noise in the timed call, as every candidate does."""
        policy = self.policy
        chunk, sampler = (len(self.obs), policy.horizon, policy.action_dim), table(policy.sampler)
        call = _on_threads(1, lambda: runner(self.obs, draw_all(sampler, chunk, self.obs, _generator())))
        return _Candidate(name, engine, threads, call, cost)

    def _accelerated(
        self,
        name: str,
        engine: str,
        schedule: Schedule | None,
        threads: int,
        cost: int,
        full: tuple[str, ...] = (),
        output: str = "chunk",
    ) -> _Candidate:
        own = copy.deepcopy(self.policy)
        self.stack.enter_context(accelerate(own, schedule, engine, output, threads=threads))
        return _Candidate(name, engine, threads, self._call(own, 1), cost, full)

    def _call(self, policy: DiffusionTransformerPolicy, threads: int) -> Call:
        return _on_threads(threads, lambda: policy.predict_action(self.obs, generator=_generator()))

    def _every_step(self) -> Schedule:
        return Schedule.every_step(len(self.target.timesteps), self.schedule.blocks)

    def _plain(self, schedule: Schedule | None) -> int:
        return generation(self.shape.blocks, self.shape.every_step, len(self.target.timesteps), schedule)

    def _remaining(self, schedule: Schedule | None, folded: bool = False, tokens: int | None = None) -> int:
        heads = self.policy.config.n_head if folded else None
        return whole_loop(self.shape, len(self.target.timesteps), schedule, tokens, heads)

    def _embeddings(self) -> int:
        """What embedding the observations at all steps but one costs: no variant of the loop does that."""
        shape = self.shape
        return (len(self.target.timesteps) - 1) * flops.linear(shape.cond_tokens - 1, shape.cond_dim, shape.width)

    def _projections(self) -> int:
        """What projecting keys and values at every use costs over a generation, less doing it once.

        The time tokens are then encoded in each generation as well: their table holds keys and values.
        """
        shape, steps = self.shape, len(self.target.timesteps)
        each = flops.linear(shape.cond_tokens, shape.width, 2 * shape.width)
        once = flops.linear(shape.cond_tokens - 1, shape.width, 2 * shape.width)
        return shape.layers * (steps * each - once) + flops.feed_forward(steps, shape.width, 4 * shape.width)

    def _uniform_at_equal_flops(self) -> Schedule:
        steps, goal = len(self.target.timesteps), self._plain(self.schedule)
        options = [
            Schedule(steps, dict.fromkeys(self.schedule.blocks, uniform(steps, count)), origin={"method": "uniform"})
            for count in range(1, steps + 1)
        ]
        return min(options, key=lambda option: abs(self._plain(option) - goal))


def _row(
    candidate: _Candidate,
    latencies: dict[str, Latency],
    eager: str,
    policy: DiffusionTransformerPolicy,
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
        action_hz=policy.n_action_steps / latency.p50,
        speedup=latency.over(latencies[eager]),
        over_full=min((latency.over(latencies[name]) for name in candidate.full), default=None),
        gflop=candidate.flops / 1e9,
        gflops=rate,
        of_peak=rate / peaks[str(candidate.threads)],
        max_difference=difference,
        samples_ms=[round(float(value) * 1e3, 4) for value in latency.seconds],
    )


def _difference(policy: DiffusionTransformerPolicy, found: Tensor, expected: Tensor) -> float:
    scale = np.asarray(policy.normalizer.action.scale)
    return float((np.abs(np.asarray(found) - np.asarray(expected)) * scale).max())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _on_threads(threads: int, call: Call) -> Call:
    def run() -> dict[str, Tensor]:
        torch.set_num_threads(threads)
        return call()

    return run


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"

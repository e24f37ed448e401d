"""Candidates: methods made ready for one policy, and set going. What is compared, timed and rolled out.

Knows nothing of tasks, and of policies no more than their port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache._version import __version__
from blockcache.attach.recorder import calibrate
from blockcache.compare.methods import Method
from blockcache.compare.parts import FewerSteps, FittedSteps, MethodError, Part, Resolved
from blockcache.compare.reuse_parts import ActionBudget
from blockcache.compare.store import Store
from blockcache.engines import Stats, accelerate
from blockcache.engines.build import read_tuned
from blockcache.files import PathLike, digest
from blockcache.fitting import Clouds, Effort, fit, place
from blockcache.models.port import Port
from blockcache.models.program import Program
from blockcache.models.sampling import generate, takes_generator
from blockcache.observations import batch_size, hash_observations, parts, pick
from blockcache.results.rollouts import EAGER
from blockcache.samplers import ChosenSampler, SamplerConfig, fewer_steps
from blockcache.schedule import Strategy, generation_flops
from blockcache.solvers.recording import Recording
from blockcache_runtime.chunks import Previous
from blockcache_runtime.execution import AS_TRAINED, Execution, medoids

RECORDED, COSTED = 4, 30
"""Recording a generation takes about so many of the fastest engine; with action costs."""
PLACED, FITTED = 400, 4
"""Placing tries about so many generations of the few steps for each observation; differentiating one takes so many."""


@dataclass(frozen=True)
class Candidate:
    """`sampler` None is the policy's own, `engine` None is the plain policy, untouched."""

    strategy: Strategy | None = None
    engine: str | None = None
    sampler: SamplerConfig | None = None
    execution: Execution = AS_TRAINED

    def __post_init__(self) -> None:
        if self.engine is None and self.strategy is not None:
            raise MethodError("the plain policy follows no schedule; name an engine, such as auto")

    def on(self, port: Port) -> Port:
        """The policy with the candidate's sampler; weights are shared."""
        return port if self.sampler is None else port.with_sampler(self.sampler)

    def flops(self, port: Port, reused: float) -> int:
        """FLOPs by formula, for as many actions as the policy executes of a chunk: one generation unless the execution asks
        for more. `reused`, as measured, counts where nothing is decided beforehand."""
        own = self.on(port)
        steps = generation_flops(own.adapter.blocks, own.adapter.every_step, len(own.timesteps), self.strategy, reused)
        return round((own.encoder_flops + steps) * self.execution.generations(port.n_action_steps))

    def shares_all_noise(self, port: Port) -> bool:
        """Whether paired rollouts get the very noise of the policy as it is."""
        return self.execution == AS_TRAINED and self.on(port).sampling.settings == port.sampling.settings

    def describe(self, port: Port) -> dict[str, Any]:
        """All that decides the actions besides the weights, in JSON types."""
        reuse = None if self.strategy is None else self.strategy.describe()
        told = {"engine": self.engine, "sampler": dict(self.on(port).sampling.settings), "reuse": reuse}
        return told if self.execution == AS_TRAINED else {**told, "execution": self.execution.describe()}


def program_flops(program: Program, steps: int, strategy: Strategy | None = None) -> int:
    """What remains of a generation after the program's exact savings.

    Args:
        program: The denoiser, folded.
        steps: Of one generation.
        strategy: What is reused; None computes every block at every step.
    """
    return program.once + generation_flops(program.blocks, program.every_step, steps, strategy)


@dataclass(frozen=True, eq=False)
class Running:
    """A candidate at work, on its own copy of the policy. The plain policy counts nothing."""

    port: Port
    engine: str
    stats: Callable[[], Stats | None]
    execution: Execution = AS_TRAINED

    def act(self, obs: Any, seed: int = 0, noise: Tensor | None = None) -> NDArray[np.float64]:
        """Executed actions (B, n_action_steps, A) of a batch of observations, with noise that depends on the seed alone; or
        with given noise, for policies that take it: (1 + draws, B, T, D), where there are several candidates for each
        observation B times as many, those for one observation together."""
        return self._generate(obs, noise, seed, None, self.port.action_of)

    def chunk(self, obs: Any, previous: Previous | None, noise: Tensor | None, seed: int) -> NDArray[np.float64]:
        """Whole chunks (B, actions, A), their first actions due now, told of those before; drawn by `seed` without noise."""
        return self._generate(obs, noise, seed, previous, self.port.chunk_of)

    def _generate(
        self, obs: Any, noise: Tensor | None, seed: int, previous: Previous | None, read: Callable[[Any], Tensor]
    ) -> NDArray[np.float64]:
        entry: Callable[..., Any] = self._entry if previous is None else partial(self._entry, previous=previous)
        how, port = self.execution, self.port
        if how.candidates > 1:
            if previous is not None:
                raise MethodError("candidates are not told of the chunk before; leave out either candidates or rtc")
            obs = pick(obs, np.repeat(np.arange(batch_size(obs)), how.candidates))
        if noise is None and not how.keeps_noise:
            noise = port.draw_noise(batch_size(obs), torch.Generator().manual_seed(seed))
        given = port.prepare_observation(obs)
        returned = generate(entry, given, seed) if noise is None else entry(given, noise=how.noise(noise))
        found = np.asarray(read(returned).detach().cpu(), dtype=np.float64)
        if how.candidates == 1:
            return found
        return medoids(found, how.candidates, port.action_scale, how.replan or port.n_action_steps)

    def timed(self, obs: Any) -> Callable[[], Any]:
        """One chunk and nothing else, to be timed: always the same noise, drawn within, where that can be."""
        if self.execution.candidates > 1:
            return partial(self.act, obs, 0)
        entry, given = self._entry, self.port.prepare_observation(obs)
        if takes_generator(entry):
            return lambda: entry(given, generator=torch.Generator().manual_seed(0))
        return partial(entry, given)

    @property
    def _entry(self) -> Callable[..., Any]:
        entry: Callable[..., Any] = getattr(self.port.policy, self.port.entry)
        return entry


@contextmanager
def running(port: Port, candidate: Candidate, rtc: bool = False) -> Iterator[Running]:
    """Set a candidate going on a copy of the policy, so that several can run side by side.

    Whatever the engine, it gets as many threads as torch has, so that figures can be compared.

    Args:
        port: The policy.
        candidate: What it runs as.
        rtc: Whether chunks may be told of those before.
    """
    own = candidate.on(port.copy())
    if candidate.engine is None:
        yield Running(own, EAGER, lambda: None, candidate.execution)
        return
    with accelerate(own, candidate.strategy, engine=candidate.engine, threads=torch.get_num_threads(), rtc=rtc) as fast:
        yield Running(own, fast.engine, fast.stats, candidate.execution)


class Calibrations:
    """Recordings of one policy, one for each sampler, and samplers that are placed or fitted for it: made when a method
    first needs them.

    Args:
        port: The policy.
        observations: A batch: one generation is recorded for each sample.
        seed: Of all noise.
        keep: A directory to keep them in: each is made once and read from there the next time.
        fitting: Another batch, to place and fit samplers on.
        effort: How much work a fit is.
        block_costs: Gives what one update of each block costs by its name, such as milliseconds, when a budget is first
            split; FLOPs count without it.
        begin: Is told, before anything is made, about how many generations of the policy that takes; it may raise instead.
        progress: Whether to show bars.
    """

    def __init__(
        self,
        port: Port,
        observations: Any,
        *,
        seed: int = 0,
        keep: PathLike | None = None,
        fitting: Any = None,
        effort: Effort | None = None,
        block_costs: Callable[[], Mapping[str, float]] | None = None,
        begin: Callable[[float], object] = lambda generations: None,
        progress: bool = True,
    ) -> None:
        self.port, self._block_costs, self._begin = port, block_costs, begin
        self._fitting, self._effort = fitting, effort or Effort()
        self._chosen: dict[Part, ChosenSampler] = {}
        self.observations = observations
        self.seed = seed
        self._store = Store(keep)
        self._progress = progress
        self._made: dict[SamplerConfig | None, Recording] = {}

    def candidate(self, method: Method, engine: str | None = "auto") -> Candidate:
        """Solve or read what the method follows."""
        sampler, strategy, execution = method.resolve(self)
        execution.check(self.port.horizon - self.port.executed[0])
        if not execution.keeps_noise and not self.port.takes_noise:
            raise MethodError(
                "this policy draws its noise itself: neither temperature nor candidates can be chosen for it"
            )
        return Candidate(strategy, engine, sampler, execution)

    def action_budget(self, flops: int) -> Method:
        """The schedule from action costs with so many FLOPs: its budget is a share of what the steps cost."""
        once, full = self.port.encoder_flops, Candidate().flops(self.port, 0.0)
        return Method(reuse=ActionBudget(budget=float(f"{(flops - once) / (full - once):.4g}")))

    def recording(self, sampler: SamplerConfig | None = None, action_costs: bool = False) -> Recording:
        """With that sampler, or the policy's own; with action costs, which take a while, if somebody needs them."""
        sampler = None if sampler == self.port.sampler else sampler
        made = self._made.get(sampler)
        if made is None or (action_costs and made.action_costs is None):
            made = self._made[sampler] = self._recording(Candidate(sampler=sampler).on(self.port), action_costs)
        return made

    def sampler(self, kind: str, steps: int) -> SamplerConfig:
        """A sampler of that kind with so many steps, in place of the policy's own."""
        if self.port.sampler is None:
            raise MethodError(
                f"{self.port.sampling.unknown} cannot be exchanged for another: it is not one that blockcache knows"
            )
        return fewer_steps(self.port.sampler, kind, steps)

    def placed(self, kind: str, steps: int) -> ChosenSampler:
        """A sampler of that kind whose steps are placed for the policy, with the evidence."""

        def make(clouds: Clouds) -> ChosenSampler:
            self._begin(self._own_cloud(clouds) + PLACED * steps / len(self.port.timesteps) * len(clouds.chosen_on))
            return place(clouds, steps, kind)

        return self._choose(FewerSteps(kind, steps, placed=True), make)

    def fitted(self, steps: int, spread: float) -> ChosenSampler:
        """A sampler that is fitted to the policy, with the evidence; it starts from placed steps."""

        def make(clouds: Clouds) -> ChosenSampler:
            start, effort = self.placed("ddpm", steps).sampler, self._effort
            chunks = effort.iterations * effort.observations * effort.samples
            self._begin(self._own_cloud(clouds) + FITTED * chunks * steps / len(self.port.timesteps))
            return fit(clouds, steps, spread, start, effort=effort)

        return self._choose(FittedSteps(steps, spread), make)

    def sampler_from(self, path: PathLike) -> SamplerConfig:
        """The sampler of a file, if it was chosen for this policy or for none."""
        file = ChosenSampler.load(path)
        file.check_fit(self.port.fingerprint)
        return file.sampler

    def tuned(self, directory: str) -> Resolved:
        """What `tune` wrote into a directory, for this policy."""
        return Resolved(*read_tuned(directory, self.port))

    def block_costs(self) -> Mapping[str, float] | None:
        """What one update of each block costs, by its name; None counts in FLOPs."""
        return None if self._block_costs is None else self._block_costs()

    def with_evidence(self, sampler: SamplerConfig) -> ChosenSampler:
        """A candidate's sampler bound to the policy, with what is known of it where it was placed or fitted here."""
        made = (chosen for chosen in self._chosen.values() if chosen.sampler == sampler)
        return next(made, ChosenSampler(sampler, self.port.fingerprint))

    def _choose(self, wanted: Part, make: Callable[[Clouds], ChosenSampler]) -> ChosenSampler:
        if wanted not in self._chosen:
            if self._fitting is None:
                raise MethodError(
                    f"{wanted} needs observations besides those to calibrate and to compare on, and there are none; give "
                    "more, or choose it once with 'blockcache policy place' or 'blockcache policy fit' and name sampler:FILE"
                )
            origin = {**self._origin(self.port, self._fitting), "sampler": str(wanted), "effort": asdict(self._effort)}
            name = f"sampler-{digest(origin)[:16]}.json"
            self._chosen[wanted] = self._store.value(name, ChosenSampler.load, lambda: make(self._clouds))
        return self._chosen[wanted]

    @staticmethod
    def _own_cloud(clouds: Clouds) -> int:
        """Generations that the policy's own cloud takes, if it was not drawn yet."""
        return 0 if "own" in vars(clouds) else batch_size(clouds.observations) * clouds.samples

    @cached_property
    def _clouds(self) -> Clouds:
        return Clouds(self.port, self._fitting, seed=self.seed, progress=self._progress)

    def _recording(self, port: Port, action_costs: bool) -> Recording:
        def make() -> Recording:
            each = (COSTED if action_costs else RECORDED) * len(port.timesteps) / len(self.port.timesteps)
            self._begin(each * batch_size(self.observations))
            batches = [port.prepare_observation(one) for one in parts(self.observations, 1)]
            return calibrate(port, batches, seed=self.seed, action_costs=action_costs, progress=self._progress)

        name = digest(self._origin(port, self.observations))[:16]
        without, with_costs = (f"recording-{name}{end}.safetensors" for end in ("", "-action"))
        # costs come on top of the same recording
        names = (with_costs,) if action_costs else (without, with_costs)
        return self._store.value(names[0], Recording.load, make, *names[1:])

    def _origin(self, port: Port, observations: Any) -> dict[str, Any]:
        """What a recording or a sampler is made from."""
        seen, fingerprint = hash_observations(observations), port.fingerprint.to_dict()
        return {"made_by": __version__, "policy": fingerprint, "observations": seen, "seed": self.seed}

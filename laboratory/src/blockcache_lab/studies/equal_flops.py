"""Methods of another kind with as many FLOPs, so that rivals are compared at equal cost. Knows nothing of suites."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from blockcache.compare.candidates import Calibrations, Candidate, program_flops
from blockcache.compare.methods import Method
from blockcache.compare.paired import one_thread
from blockcache.compare.parts import FewerSteps
from blockcache.compare.reuse_parts import BAC, BlockWise, Solved, TeaCache, Unified, Uniform
from blockcache.models.port import Port
from blockcache.samplers import sampler_names, table
from blockcache.solvers.teacache import TeaCacheRule
from blockcache_lab.studies.suites import Equal

NEAR = 0.05  # a rival within this share of the FLOPs counts as equal


def equal_flops(calibrations: Calibrations) -> Equal:
    """Finds, for a method, the member of another kind that has as many FLOPs.

    Of samplers with fewer steps within 5 % of the FLOPs the one that starts at the most noise is taken: with diffusers'
    spacing 17 of 100 steps start at timestep 80 and 16 at 90, and a rival shall not lose by that. Otherwise the nearest
    counts, of two equally near ones the larger.
    """
    port = calibrations.port
    steps, once = len(port.timesteps), port.encoder_flops

    @cache
    def flops(method: Method, reused: float = 0.0) -> int:
        with one_thread():
            return calibrations.candidate(method).flops(port, reused)

    def teacache(wanted: int) -> Method:
        usual = Method(reuse=TeaCache())
        full, least = flops(usual, 0.0), flops(usual, 1.0)
        rule = calibrations.candidate(usual).strategy
        assert isinstance(rule, TeaCacheRule)
        changes = calibrations.recording().input_change
        return Method(reuse=TeaCache(teacache_threshold(rule, changes, (full - wanted) / (full - least))))

    def fewer(sampler: str, wanted: int) -> Method:
        step = flops(Method(FewerSteps(sampler, 1))) - once
        costs = {count: once + count * step for count in range(1, steps + 1)}
        near = [count for count in costs if abs(costs[count] - wanted) <= NEAR * wanted]
        begins = {n: int(table(calibrations.sampler(sampler, n)).timesteps[0]) for n in near}
        near = [count for count in near if begins[count] == max(begins.values())] or list(costs)
        return Method(FewerSteps(sampler, min(near, key=lambda count: (abs(costs[count] - wanted), -count))))

    def updates(part: type[Solved], wanted: int) -> Method:
        """With the S whose FLOPs are nearest; where the S steps of a block lie does not change them."""
        first, second = (flops(Method(reuse=Uniform(s))) for s in (1, 2))
        best = min(range(1, steps + 1), key=lambda s: (abs(first + (s - 1) * (second - first) - wanted), -s))
        return Method(reuse=part(best))

    finders: dict[str, Callable[[int], Method]] = {
        "teacache": teacache,
        "action": calibrations.action_budget,
        **{name: partial(fewer, name) for name in sampler_names()},
        **{part.word: partial(updates, part) for part in (BAC, BlockWise, Unified, Uniform)},
    }
    return lambda kind, method: finders[kind](flops(method))


def engine_flops(port: Port, candidate: Candidate) -> int:
    """What the candidate's engine computes of one generation: whole-loop engines save exactly what does not change in it."""
    if candidate.engine not in ("loop", "onnx"):
        return candidate.flops(port, 0.0)
    own = candidate.on(port)
    before = own.encoder_flops if own.begins_after_encoder else 0
    once = before + program_flops(own.program(), len(own.timesteps), candidate.strategy)
    return round(once * candidate.execution.generations(port.n_action_steps))


def teacache_threshold(rule: TeaCacheRule, changes: npt.NDArray[np.float64], reused: float) -> float:
    """The threshold, to three digits, with which a run that sees these input changes (samples, K - 1) reuses that share.

    An estimate: what TeaCache reuses changes its later inputs. What it really computes is counted when it runs.
    """
    estimates = np.abs(np.polyval(rule.coefficients, changes))
    low, high = 0.0, float(estimates.sum(axis=1).max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _reused_share(estimates, middle) < reused else (low, middle)
    rounded = [float(f"{value:.3g}") for value in (high, high * 1.005)]  # rounding may fall just short of a jump
    return min(rounded, key=lambda value: abs(_reused_share(estimates, value) - reused))


def _reused_share(estimates: npt.NDArray[np.float64], threshold: float) -> float:
    samples, transitions = estimates.shape
    drift, reused = np.zeros(samples), 0
    for step in range(transitions - 1):  # the first and the last step are always computed
        drift += estimates[:, step]
        computed = ~(drift < threshold)
        reused += int(samples - computed.sum())
        drift[computed] = 0.0
    return float(reused / (samples * (transitions + 1)))

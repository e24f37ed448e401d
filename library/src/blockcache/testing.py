"""The contract: what a family must promise, as tests that other packages can run over theirs.

    class TestMyFamily(PolicyContract):
        def policy(self):
            return my_small_random_policy()

        def observation(self, batch):
            return {"state": torch.randn(batch, 2, 7)}

pytest finds the methods; any other runner may call them one by one. A broken promise is an AssertionError that says which.
Policies should be small (a few layers, a few steps) and have weights large enough for every block to matter.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockcache import errors
from blockcache.attach.recorder import calibrate
from blockcache.block import FEED_FORWARD
from blockcache.engines import accelerate
from blockcache.fingerprint import fingerprint_differences
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.models.sampling import generate, takes_generator
from blockcache.schedule import Schedule
from blockcache.solvers import solve

CLOSE = 1e-5  # between engines, relative to the largest action where that is above 1


class PolicyContract:
    """Subclass it, say how to make a policy and an observation, and which engines must support it."""

    engines: tuple[str, ...] = ("patched", "loop", "onnx")
    tolerance = 0.0
    """How far patched may be from the plain policy with every step an update; 1e-6 where torch's fused path is off."""
    union_has_nothing_to_do = False
    """Set it where the family has no feed-forward blocks behind others, so that BAC is no more than ACS per block."""
    declares_observations = True
    """False where the policy does not say the names and shapes of its observations: then none can be made up, and a
    whole-loop engine compares itself with the policy at the first observation that comes."""

    def policy(self) -> Any:
        """A fresh policy object, in eval mode; always the same weights."""
        raise NotImplementedError

    def observation(self, batch: int) -> Any:
        """A batch of observations as the policy takes them; always the same ones."""
        raise NotImplementedError

    # -- what is seen of it

    def test_the_port_says_what_the_policy_is(self) -> None:
        port = self._port()
        blocks = port.adapter.blocks
        names = [block.name for block in blocks]
        assert len(set(names)) == len(names), f"block names repeat: {names}"
        assert [block.order for block in blocks] == list(range(len(blocks))), "blocks are not in execution order"
        routed = [name for layer in port.adapter.layers for name in layer.blocks]
        assert routed == names, f"the layers route {routed}, the adapter lists {names}"
        assert all(block.cost >= 0 for block in blocks)
        assert len(port.timesteps) > 0
        start, stop = port.executed
        assert 0 <= start < stop <= port.horizon, f"executed {port.executed} of {port.horizon}"
        assert len(port.action_scale) == port.action_of(self._run(port, 1)).shape[-1]

    def test_the_union_has_something_to_do(self) -> None:
        """The bubbling union computes upstream blocks wherever a feed-forward block behind them is computed."""
        blocks = self._port().adapter.blocks
        behind = [block.name for block in blocks[1:] if block.kind == FEED_FORWARD]
        kinds = ", ".join(sorted({block.kind for block in blocks}))
        said = (
            f"the family's block kinds ({kinds}) leave the union with nothing to do: no block of kind {FEED_FORWARD} stands "
            "behind another, so BAC is ACS per block; if that is meant, set union_has_nothing_to_do = True"
        )
        assert bool(behind) is not self.union_has_nothing_to_do, said

    def test_two_policies_with_the_same_weights_have_one_fingerprint(self) -> None:
        one, other = self._port(), self._port()
        assert one.fingerprint == other.fingerprint
        copied = one.copy()
        assert copied.fingerprint == one.fingerprint
        assert copied.adapter.denoiser is not one.adapter.denoiser, "a copy shares its weights"
        assert _same(self._run(copied, 1), self._run(one, 1)), "a copy acts differently"
        with torch.no_grad():
            next(other.adapter.denoiser.parameters()).add_(1.0)
        assert fingerprint_differences(one.fingerprint, port_of(other.policy).fingerprint), (
            "other weights, same fingerprint"
        )

    def test_another_sampler_shares_the_weights(self) -> None:
        port = self._port()
        if port.sampler is None:
            return
        before, fewer = self._run(port, 1), _halved(port)
        other = port.with_sampler(fewer)
        assert len(other.timesteps) == fewer.num_inference_steps
        assert other.adapter.denoiser is port.adapter.denoiser, "the weights were copied"
        calls: list[int] = []
        hook = port.adapter.denoiser.register_forward_hook(lambda *_: calls.append(1))
        self._run(other, 1)
        hook.remove()
        assert len(calls) == len(other.timesteps), (
            f"the other sampler has {len(other.timesteps)} steps, took {len(calls)}"
        )
        assert _same(self._run(port, 1), before), "a second sampler changed the policy itself"

    def test_synthetic_observations_are_taken(self) -> None:
        """Whole-loop engines try them on a policy whose code they do not know."""
        port = self._port()
        if not self.declares_observations:
            refused = _raised(errors.PolicyError, partial(port.synthetic_observations, 2))
            assert refused, "the policy says what it observes after all; set declares_observations = True"
            return
        if not self._whole_loops():
            return
        made = port.synthetic_observations(2)
        assert {name: tuple(value.shape[1:]) for name, value in made.items()} == dict(port.inputs)
        action = port.action_of(self._generate(port, port.prepare_observation(made), 0))
        start, stop = port.executed
        assert tuple(action.shape) == (2, stop - start, len(port.action_scale))

    # -- engines

    def test_every_step_an_update_is_the_plain_policy(self) -> None:
        for batch in (1, 3):
            port = self._port()
            plain = self._run(port, batch)
            with accelerate(port.policy, engine="patched"):
                gap = _gap(self._run(port, batch), plain)
            assert gap <= self.tolerance, f"patched differs from the plain policy by {gap:g}"

    def test_engines_agree_under_any_schedule(self) -> None:
        for seed, batch in ((0, 1), (1, 3), (2, 2)):
            port = self._port()
            schedule = _random_schedule(port, seed) if seed else None
            with accelerate(port.policy, schedule, "patched"):
                expected = self._run(port, batch)
            for engine in self.engines:
                with accelerate(port.policy, schedule, engine, threads=1):
                    gap = _gap(self._run(port, batch), expected)
                assert gap <= CLOSE, f"{engine} differs from patched by {gap:g} (schedule {seed}, batch {batch})"

    def test_a_skipped_block_is_not_computed(self) -> None:
        port = self._port()
        names, steps = [block.name for block in port.adapter.blocks], len(port.timesteps)
        for engine in self.engines:
            with accelerate(port.policy, Schedule(steps, {name: [0] for name in names}), engine) as fast:
                self._run(port, 1)
                stats = fast.stats()
            assert set(stats.computed.values()) == {1}, f"{engine} computed {stats.computed}"
            assert set(stats.reused.values()) == {steps - 1}

    def test_the_same_seed_gives_the_same_action_in_every_engine(self) -> None:
        port = self._port()
        plain = self._run(port, 2, seed=5)
        assert not _same(self._run(port, 2, seed=6), plain), "noise does not depend on the seed"
        for engine in self.engines:
            with accelerate(port.policy, engine=engine, threads=1):
                assert _gap(self._run(port, 2, seed=5), plain) <= CLOSE, engine

    # -- coming and going

    def test_undo_is_exact(self) -> None:
        for engine in self.engines:
            port = self._port()
            before, held, state = self._run(port, 2), _held(port), _state(port.policy)
            fast = accelerate(port.policy, _random_schedule(port, 1), engine)
            assert _same_state(_state(port.policy), state), f"{engine}: state_dict changes while enabled"
            refused = _raised(errors.BlockcacheError, partial(accelerate, port.policy, engine=engine))
            assert refused, f"{engine}: enabling twice was not refused"
            self._run(port, 2)
            fast.disable()
            assert _held(port) == held, f"{engine}: something of blockcache is left on the policy"
            assert _same(self._run(port, 2), before), f"{engine}: outputs differ after disable()"
            accelerate(port.policy, engine=engine).disable()

    def test_nothing_leaks_from_call_to_call(self) -> None:
        for engine in self.engines:
            port = self._port()
            with accelerate(port.policy, _random_schedule(port, 1), engine, threads=1):
                first = self._run(port, 1)
                self._run(port, 3, seed=9)
                with contextlib.suppress(Exception):  # whatever it raises: the next call must not feel it
                    getattr(port.policy, port.entry)(None)
                assert _same(self._run(port, 1), first), f"{engine}: a call depends on those before it"

    def test_the_denoiser_by_itself_runs_in_full(self) -> None:
        """Outside a generation, and in that of another policy with the same denoiser, nothing is skipped."""
        port = self._port()
        other = port.with_sampler(_halved(port)) if port.sampler is not None else None
        alone = None if other is None else self._run(other, 1)
        with accelerate(port.policy, _random_schedule(port, 1), "patched"):
            if other is not None and alone is not None:
                assert _same(self._run(other, 1), alone), "another policy feels the acceleration"

    def test_threads_do_not_disturb_each_other(self) -> None:
        for engine in self.engines:
            port = self._port()
            draws_from_it = takes_generator(getattr(port.policy, port.entry))
            with accelerate(port.policy, _random_schedule(port, 1), engine, threads=1):
                expected = [self._run(port, 1, seed) for seed in range(4)]
                if draws_from_it:  # torch's global generator is shared, so nothing can be said of who draws from it
                    with ThreadPoolExecutor(4) as pool:
                        found = list(pool.map(partial(self._run, port, 1), range(4)))
                    assert all(map(_same, found, expected)), f"{engine}: threads disturb each other"

    def test_changed_weights_are_noticed(self) -> None:
        for engine in self._whole_loops():  # patched runs the policy's own weights, whatever they are
            port = self._port()
            with accelerate(port.policy, engine=engine, threads=1):
                with torch.no_grad():
                    next(port.adapter.denoiser.parameters()).add_(1.0)
                refused = _raised(errors.StaleWeightsError, partial(self._run, port, 1))
            assert refused, f"{engine}: answers with weights that the policy no longer has"

    def test_an_unchanged_policy_is_verified(self) -> None:
        for engine in self.engines:
            port = self._port()
            with accelerate(port.policy, engine=engine, threads=1) as fast:
                before = self._run(port, 1)
                fast.verify()
                assert _same(self._run(port, 1), before), f"{engine}: verify() changes what comes after it"

    def test_what_is_not_finite_is_refused(self) -> None:
        """In the observation, also where it is merely too large to compute with, and on the way to the action."""
        for engine in self.engines:
            port = self._port()
            with accelerate(port.policy, engine=engine, threads=1):
                for value in (math.nan, math.inf, -1e25):
                    spoiled = _spoiled(self.observation(2), value)
                    refused = _raised(errors.ObservationError, partial(self._generate, port, spoiled, 0))
                    assert refused, f"{engine}: answers an observation that holds {value}"
            with torch.no_grad():
                for parameter in port.adapter.denoiser.parameters():
                    parameter.mul_(1e14)  # two of them in a row leave float32's range
            try:
                with accelerate(port.policy, engine=engine, threads=1):
                    found = self._run(port, 2)
            except (errors.NonFiniteError, errors.PolicyError):
                continue
            raise AssertionError(f"{engine}: makes {_tensors(found)[0].flatten()[0]:g} of numbers that left the range")

    def test_a_whole_loop_refuses_autocast(self) -> None:
        for engine in self._whole_loops():
            port = self._port()
            with accelerate(port.policy, engine=engine, threads=1), torch.autocast("cpu"):
                refused = _raised(errors.EngineError, partial(self._run, port, 1))
            assert refused, f"{engine}: answers otherwise than the policy, which obeys autocast"

    # -- calibration

    def test_calibration_leaves_the_policy_as_it_was(self) -> None:
        port = self._port()
        before, held = self._run(port, 1), _held(port)
        recording = calibrate(port.policy, [self.observation(1), self.observation(2)], progress=False)
        assert _same(self._run(port, 1), before), "outputs differ after a calibration"
        assert _held(port) == held, "something of blockcache is left on the policy"
        assert recording.fingerprint == port.fingerprint
        schedule = solve(recording, updates=min(2, recording.steps))
        for engine in self.engines:
            with accelerate(port.policy, schedule, engine) as fast:
                assert fast.stats().notes == ()

    def _port(self) -> Port:
        return port_of(self.policy())

    def _whole_loops(self) -> list[str]:
        return [engine for engine in self.engines if engine != "patched"]

    def _run(self, port: Port, batch: int, seed: int = 0) -> Any:
        return self._generate(port, self.observation(batch), seed)

    def _generate(self, port: Port, obs: Any, seed: int) -> Any:
        with torch.no_grad():
            return generate(getattr(port.policy, port.entry), obs, seed)


def _halved(port: Port) -> Any:
    """The policy's sampler with half of its steps."""
    assert port.sampler is not None
    settings = {name: value for name, value in port.sampler.to_dict().items() if name != "timesteps"}
    return type(port.sampler).from_dict({**settings, "num_inference_steps": max(1, len(port.timesteps) // 2)})


def _random_schedule(port: Port, seed: int) -> Schedule:
    rng, steps = random.Random(seed), len(port.timesteps)
    names = [block.name for block in port.adapter.blocks]
    return Schedule(steps, {name: [0, *(k for k in range(1, steps) if rng.random() < 0.4)] for name in names})


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        return [tensor for name in sorted(value) for tensor in _tensors(value[name])]
    return [value]


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True))


def _gap(found: Any, expected: Any) -> float:
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) for a, b in pairs)


def _held(port: Port) -> list[tuple[str, list[str]]]:
    """Names of everything in the instances that could be patched."""
    objects = [("policy", port.policy), *port.adapter.denoiser.named_modules()]
    return [(name, sorted(vars(item))) for name, item in objects]


def _state(policy: Any) -> dict[str, Any]:
    return copy.deepcopy(policy.state_dict()) if isinstance(policy, nn.Module) else {}


def _same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def _spoiled(obs: Any, value: float) -> Any:
    """The same with one such value in its first array."""
    if isinstance(obs, Mapping):
        first = next(iter(obs))
        return {**obs, first: _spoiled(obs[first], value)}
    spoiled = obs.clone() if obs.is_floating_point() else obs.float()  # a camera's bytes hold no such value
    spoiled.view(-1)[0] = value
    return spoiled


def _raised(kind: type[Exception], call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind:
        return True
    return False

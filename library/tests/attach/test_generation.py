"""The generation scope: nothing leaks between calls, errors, threads, batches or policies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.attach.generation import _current
from blockcache.errors import ObservationError, PolicyError, StepError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DPMSolver


@pytest.fixture
def updates(policy, random_updates):
    return random_updates([block.name for block in port_of(policy).adapter.blocks], 6, seed=2)


def accelerate(policy, updates=None):
    schedule = None if updates is None else bc.Schedule(policy.num_inference_steps, updates)
    return bc.accelerate(policy, schedule, engine="patched")


@pytest.fixture
def expected(policy, updates, observe, run):
    """The accelerated action for one observation, from a fresh acceleration."""
    with accelerate(policy, updates):
        return run(policy, observe())


class Fault:
    """Makes a module raise in its n-th call from now on, once."""

    def __init__(self, module, call, error):
        self.left, self.error = call, error
        self.hook = module.register_forward_hook(self)

    def __call__(self, module, args, out):
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("the GPU fell off"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 4, 6])
def test_after_an_exception_the_next_generation_is_right(policy, updates, observe, run, expected, call, error):
    with accelerate(policy, updates) as fast:
        fault = Fault(policy.model.head, call, error)
        with pytest.raises(type(error)):
            run(policy, observe(seed=9))
        assert _current.get() is None
        assert torch.equal(run(policy, observe()), expected)
        fault.hook.remove()
        assert fast.stats().generations == 1


def test_an_exception_inside_a_block(policy, updates, observe, run, expected):
    with accelerate(policy, updates):
        Fault(policy.model.decoder.layers[1].linear1, 2, RuntimeError("mine"))
        with pytest.raises(RuntimeError, match="mine"):
            run(policy, observe(seed=9))
        assert _current.get() is None
        assert torch.equal(run(policy, observe()), expected)


def test_a_denoiser_called_outside_a_generation_runs_in_full(policy, updates, observe, run, expected):
    sample, cond = torch.randn(2, 6, 3), torch.randn(2, 2, 5)
    plain = {t: policy.model(sample, t, cond) for t in (0, 80, 16, 3)}  # in no sampler's order, 3 in no table
    with accelerate(policy, updates) as fast:
        for t, out in plain.items():
            assert torch.equal(policy.model(sample, t, cond), out)
        assert torch.equal(run(policy, observe()), expected)
        for t, out in plain.items():
            assert torch.equal(policy.model(sample, t, cond), out)
        assert fast.stats().generations == 1


def test_batch_sizes_may_change(policy, updates, observe, run):
    sizes = (1, 7, 2, 7, 1)
    alone = []
    for size in sizes:
        with accelerate(policy, updates):
            alone.append(run(policy, observe(size)))
    with accelerate(policy, updates):
        for size, expected in zip(sizes, alone, strict=True):
            assert torch.equal(run(policy, observe(size)), expected)


def in_threads(calls):
    """Run all at once; results in order."""
    start = threading.Barrier(len(calls), timeout=30)

    def work(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(work, calls))


def test_threads_generating_at_once(policy, updates, observe, run):
    """Different observations, seeds and batch sizes, interleaved at every step."""
    cases = [(observe(1 + index % 3, seed=index), index) for index in range(6)]
    with accelerate(policy, updates) as fast:
        expected = [run(policy, *case) for case in cases]
        results = in_threads([lambda case=case: [run(policy, *case) for _ in range(5)] for case in cases])
        for repeated, right in zip(results, expected, strict=True):
            assert all(torch.equal(result, right) for result in repeated)
        assert fast.stats().generations == 36


def test_two_generations_in_lock_step(policy, updates, observe, run):
    """As tightly interleaved as can be: each step of one waits for the same step of the other."""
    cases = [(observe(1), 0), (observe(4, seed=1), 1)]
    with accelerate(policy, updates):
        expected = [run(policy, *case) for case in cases]
        meet = threading.Barrier(2, timeout=30)
        for layer in policy.model.decoder.layers:
            layer.register_forward_pre_hook(lambda *args: [meet.wait(), None][1])
        results = in_threads([lambda case=case: run(policy, *case) for case in cases])
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)


def test_policies_sharing_a_denoiser(policy, updates, observe, run, expected):
    """A accelerated leaves B bit-identical, whether B is another sampler or another policy object."""
    other_sampler = policy.with_sampler(DDIM(num_inference_steps=4))
    twin = DiffusionTransformerPolicy(policy.config).eval()
    twin.model, twin.normalizer = policy.model, policy.normalizer
    plain = [run(other, observe(3)) for other in (other_sampler, twin)]
    with accelerate(policy, updates):
        for other, right in zip((other_sampler, twin), plain, strict=True):
            assert torch.equal(run(other, observe(3)), right)
            assert torch.equal(run(policy, observe()), expected)
            with pytest.raises(PolicyError, match=r"layers\.0\.forward is already patched"):
                accelerate(other)
            assert torch.equal(run(other, observe(3)), right)
    with accelerate(other_sampler) as fast:
        assert torch.equal(run(fast, observe(3)), plain[0])


def test_sharing_a_denoiser_between_threads(policy, updates, observe, run, expected):
    other = policy.with_sampler(DDIM(num_inference_steps=4))
    plain = run(other, observe(3))
    with accelerate(policy, updates):
        calls = [lambda: run(policy, observe()), lambda: run(other, observe(3))] * 3
        for index, result in enumerate(in_threads(calls)):
            assert torch.equal(result, plain if index % 2 else expected)


def test_a_generation_of_another_policy_inside(policy, make_policy, updates, observe, run, expected):
    """Such as a policy that asks another one for advice in the middle of its own generation."""
    inner = make_policy(seed=4)
    with accelerate(inner, updates):
        inner_expected = run(inner, observe(2))
    advice = []
    with accelerate(policy, updates), accelerate(inner, updates):
        policy.model.ln_f.register_forward_hook(lambda *args: advice.append(run(inner, observe(2))))
        assert torch.equal(run(policy, observe()), expected)
    assert len(advice) == 6
    assert all(torch.equal(given, inner_expected) for given in advice)


def test_a_denoiser_called_in_the_generation_of_another_policy(policy, make_policy, updates, observe, run):
    """No generation of its own is running, so it runs in full, and the other generation takes no notice."""
    other, sample, cond = make_policy(seed=4), torch.randn(2, 6, 3), torch.randn(2, 2, 5)
    full = policy.model(sample, 3, cond)
    with accelerate(policy, updates), accelerate(other, updates):
        right, seen = run(other, observe()), []
        other.model.ln_f.register_forward_hook(lambda *args: seen.append(policy.model(sample, 3, cond)))
        assert torch.equal(run(other, observe()), right)
    assert len(seen) == 6
    assert all(torch.equal(out, full) for out in seen)


def test_a_generation_inside_its_own(policy, updates, observe, run, expected):
    inside = []

    def once(*args):
        if not inside:
            inside.append(None)
            inside[0] = run(policy, observe(3, seed=5))

    with accelerate(policy, updates):
        right = run(policy, observe(3, seed=5))
        policy.model.ln_f.register_forward_hook(once)
        assert torch.equal(run(policy, observe()), expected)
        assert torch.equal(inside[0], right)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("steps", [3, 5, 12])
def test_another_number_of_steps_after_enabling(policy, updates, observe, run, expected, steps):
    config = policy.config
    with accelerate(policy, updates):
        policy.config = replace(config, sampler=replace(config.sampler, num_inference_steps=steps))
        with pytest.raises(StepError, match="after enabling"):
            run(policy, observe())
        policy.config = config
        assert torch.equal(run(policy, observe()), expected)


def test_fewer_steps_with_the_same_start(policy, updates, observe, run):
    """DPM-Solver++ starts at the last timestep whatever the number of steps; only the second step tells."""
    first = DPMSolver(num_inference_steps=6)
    policy.config = replace(policy.config, sampler=first)
    with accelerate(policy, updates):
        policy.config = replace(policy.config, sampler=replace(first, num_inference_steps=1))
        with pytest.raises(StepError, match="took 1 denoising steps, the schedule counts 6"):
            run(policy, observe())


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: {"obs": o}, lambda o: o.numpy(), lambda o: {"obs": o.numpy()}])
def test_a_nan_observation_is_refused(policy, updates, observe, wrap, wrong):
    obs = observe(2)
    obs[1, 0, 2] = wrong
    with accelerate(policy, updates), pytest.raises(ObservationError, match="NaN or infinity; check the sensor"):
        policy.predict_action(wrap(obs))


def test_train_mode_is_refused(make_policy, updates, observe, run, expected):
    policy = make_policy(p_drop_attn=0.1)
    policy.train()
    with pytest.raises(PolicyError, match=r"in train mode, as model.*\..* \(\w+\) shows; call policy\.eval\(\) first"):
        accelerate(policy, updates)
    policy.eval()
    policy.model.decoder.layers[1].dropout2.train()  # one dropout is enough
    with pytest.raises(PolicyError, match=r"train mode, as model\.decoder\.layers\.1\.dropout2 \(Dropout\) shows"):
        accelerate(policy, updates)
    policy.eval()
    with accelerate(policy, updates):
        policy.train()
        with pytest.raises(PolicyError, match="train mode"):
            run(policy, observe())
        policy.eval()
        assert torch.equal(run(policy, observe()), expected)

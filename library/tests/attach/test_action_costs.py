"""Action costs: against finite differences and against what reuse really does; and what cannot be differentiated."""

import itertools
import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import PNDMScheduler
from torch import nn

import blockcache as bc
import foreign_policy
import stranger_policy
import toy_family
from blockcache.attach import action_costs
from blockcache.attach.generation import Generation, attach
from blockcache.errors import PolicyError, RecordingError
from blockcache.models.registry import port_of
from blockcache.models.sampling import generate
from blockcache.samplers import DDIM, DDPM, table
from blockcache.samplers.fitted import Fitted

SEED = 1_000_003  # of the first sample of the first batch, with seed 0


def calibrate(policy, batches):
    return bc.calibrate(policy, batches, action_costs=True, progress=False)


@pytest.fixture
def walked(monkeypatch):
    """What was walked back: the generations, and d(v . action)/d residual by step and block."""
    found = []

    def watched(port, attached, run):
        found.append((run, {}))
        for step, gradients in walk_back(port, attached, run):
            found[-1][1][step] = gradients
            yield step, gradients

    walk_back = action_costs.walk_back
    monkeypatch.setattr(action_costs, "walk_back", watched)
    return found


def act(port, obs):
    """The executed action in normalised units, with the noise of a calibration's first batch."""
    predict, size = getattr(port.policy, port.entry), len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
    if port.takes_noise:
        noise = [port.draw_noise(1, torch.Generator().manual_seed(SEED + sample)) for sample in range(size)]
        returned = predict(obs, noise=torch.cat(noise, dim=1))
    else:
        returned = generate(predict, obs, SEED)
    return port.action_of(returned).double().numpy() * port.action_scale + port.action_offset


class Nudged(Generation):
    """Adds something to one block's residual at one step."""

    def __init__(self, step, block, change):
        self.step, self.block, self.change = step, block, change

    def layer(self, call):
        def route(name, compute):
            residual = compute()
            return residual + self.change if (call.step, name) == (self.step, self.block) else residual

        return call.routed(route)


def finite_difference(port, obs, step, block, direction, size=1e-5):
    found = []
    for sign in (1, -1):
        with attach(port, lambda sign=sign: Nudged(step, block, sign * size * direction)):
            found.append(act(port, obs))
    return (found[0] - found[1]) / (2 * size)


def check_derivatives(port, obs, walked):
    calibrate(port, [obs])
    ((run, gradients),) = walked
    (batch,) = {len(call.out) for call in run.calls}
    assert sorted(gradients) == list(range(len(port.timesteps)))
    generator, compared = torch.Generator().manual_seed(1), 0
    for step, (index, block) in itertools.product((0, len(gradients) - 2), enumerate(port.adapter.blocks)):
        gradient = gradients[step][index].double()  # (V, B, F)
        flat = torch.randn(batch, gradient.shape[2], generator=generator).double()
        direction = flat.unflatten(1, (-1, port.adapter.widths["width"])).to(run.calls[0].out)
        moved = finite_difference(port, obs, step, block.name, direction)
        expected = (run.vectors.double().numpy() * moved).sum(axis=(2, 3))  # (V, B)
        product = (gradient * flat).sum(dim=2).numpy()
        np.testing.assert_allclose(product, expected, rtol=2e-4, atol=1e-6)
        compared += bool(np.abs(expected).min() > 1e-5)
    assert compared >= len(port.adapter.blocks)  # not all of it nothing


NAMES = ("ddpm", "ddim-eta", "dpmsolver++", "sde-dpmsolver++", "fitted")


def fitted():
    """Weights as a fit may leave them: the x0 before counts, and noise comes with any sign."""
    start = Fitted.of(DDPM(timesteps=[80, 60, 40, 20, 8, 2]))
    return replace(start, c=(0.0, *(0.1,) * 5), s=tuple(-value for value in start.s))


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_those_of_the_whole_generation(make_policy, observe, samplers, walked, name):
    sampler = fitted() if name == "fitted" else samplers[name]
    if "dpmsolver" in name:  # diffusers' own goes through single precision; on explicit timesteps ours runs
        sampler = replace(sampler, timesteps=table(sampler).timesteps)
    policy = make_policy(sampler=sampler).double()
    check_derivatives(port_of(policy), observe(1).double(), walked)


@pytest.mark.parametrize("name", ["transformer-condition", "encoder-only"])
def test_derivatives_of_the_other_forms(make_policy, observe, walked, name):
    """The encoder-only form in-paints its observations: what is written over carries no derivative."""
    forms = {
        "transformer-condition": {"n_cond_layers": 2},
        "encoder-only": {"time_as_cond": False, "obs_as_cond": False},
    }
    check_derivatives(port_of(make_policy(**forms[name]).double()), observe(1).double(), walked)


def flow_observation(batch=1):
    sizes = {"state": toy_family.STATE, "words": toy_family.WORDS, "pictures": toy_family.PICTURES}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(batch, *size, generator=generator) for name, size in sizes.items()}


@pytest.fixture
def double_by_default():
    """For policies that draw noise as torch does by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_derivatives_of_another_family_with_gates_and_flow(walked):
    check_derivatives(toy_family.claim(toy_family.FlowPolicy().double()), flow_observation(), walked)


def foreign_observation(batch=1, seed=0):
    shape = batch, foreign_policy.SEEN, foreign_policy.OBS
    return {"obs": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.usefixtures("double_by_default")
def test_derivatives_of_a_foreign_policy(walked):
    check_derivatives(port_of(foreign_policy.Policy().double()), foreign_observation(), walked)


def test_a_foreign_policy_in_inference_mode_that_hands_over_everything_by_name():
    class ByName(foreign_policy.Policy):
        def predict_action(self, obs_dict):
            model = self.model
            with torch.inference_mode(), replaced(self, lambda x, t, c: model(sample=x, timestep=t, cond=c)):
                return super().predict_action(obs_dict)

    by_name, plain = (calibrate(kind(), [foreign_observation()]) for kind in (ByName, foreign_policy.Policy))
    np.testing.assert_allclose(by_name.action_costs, plain.action_costs, rtol=1e-4)


@contextmanager
def replaced(policy, model):
    """Something between a foreign policy and its denoiser."""
    modules = vars(policy)["_modules"]
    own, modules["model"] = modules["model"], model
    try:
        yield
    finally:
        modules["model"] = own


def every_direction(action, seeds):
    """Not random vectors but all there are, so that the expected error is exact."""
    count = math.prod(action.shape[1:])
    basis = torch.eye(count).reshape(count, 1, *action.shape[1:])
    return basis.expand(-1, len(action), -1, -1)


def test_a_cost_is_the_squared_error_of_reusing_one_block_in_one_segment(make_policy, observe, monkeypatch):
    """Weak blocks, so that first order is nearly all; one sample, so that the robust mean is the sample."""
    policy = make_policy(sampler=DDPM(num_inference_steps=12))
    with torch.no_grad():
        for layer in policy.model.decoder.layers:
            for module in (layer.self_attn.out_proj, layer.multihead_attn.out_proj, layer.linear2):
                module.weight *= 0.02
    monkeypatch.setattr(action_costs, "_vectors", every_direction)
    monkeypatch.setattr(action_costs, "VECTORS", 12)
    port, obs = port_of(policy.double()), observe(1).double()
    recording, plain = calibrate(port, [obs]), act(port, obs)
    costs = recording.action_costs  # of 4 x 3 executed numbers; the mean over the basis is that over them
    names, compared = [block.name for block in recording.blocks], 0
    for (index, name), (start, end) in itertools.product(enumerate(names), ((0, 1), (3, 5), (4, 9), (9, 11))):
        updates = {other: range(12) for other in names}
        updates[name] = [step for step in range(12) if not start < step <= end]
        with bc.accelerate(policy, bc.Schedule(12, updates), engine="patched"):
            error = np.square(act(port, obs) - plain).mean()
        assert costs[index, start, end] == pytest.approx(error, rel=0.15, abs=1e-14)
        compared += error > 1e-12
    assert compared > 20
    assert not np.tril(costs).any()


def test_the_recording_is_otherwise_the_same(policy, observe):
    batches = [observe(3), observe(1, seed=1)]
    plain, with_costs = bc.calibrate(policy, batches, progress=False), calibrate(policy, batches)
    for metric, matrix in plain.matrices.items():
        np.testing.assert_array_equal(matrix, with_costs.matrices[metric])
    assert plain.action_costs is None
    assert with_costs.every_step == plain.every_step == port_of(policy).adapter.every_step
    assert with_costs.action_costs.shape == (6, 6, 6)
    assert (with_costs.action_costs[np.triu(np.ones((6, 6, 6), bool), 1)] > 0).all()


@pytest.mark.parametrize("held", [1, 120_000])
def test_parts_of_any_size_give_the_same_costs(policy, observe, monkeypatch, walked, held):
    batches = [observe(2), observe(3, seed=1), *observe(4, seed=2).split(1)]
    expected = calibrate(policy, batches).action_costs
    assert [run.size for run, _ in walked] == [9]  # all of them as one batch
    walked.clear()
    monkeypatch.setattr(action_costs, "PART_BYTES", held)
    np.testing.assert_allclose(calibrate(policy, batches).action_costs, expected, rtol=1e-3, atol=1e-9)
    assert sum(run.size for run, _ in walked) == 9
    assert len(walked) > 1


def test_generations_that_differ_in_more_than_their_samples_are_walked_back_apart(walked):
    class Guided(foreign_policy.Denoiser):
        def forward(self, sample, timestep, cond=None, strength=1.0, **kwargs):
            return strength * super().forward(sample, timestep, cond)

    class Policy(foreign_policy.Policy):
        def predict_action(self, obs_dict):
            model, strength = self.model, float(obs_dict["obs"].mean())
            with replaced(self, lambda x, t, cond: model(x, t, cond, strength=strength)):
                return super().predict_action(obs_dict)

    policy = Policy(denoiser=Guided())
    together = calibrate(policy, [foreign_observation(1, seed) for seed in range(2)])
    assert [run.size for run, _ in walked] == [1, 1]
    assert together.samples == 2


def test_they_depend_on_the_seed_alone_and_leave_torch_alone(policy, observe, run):
    before, plain = torch.get_rng_state(), run(policy, observe())
    first, again = (calibrate(policy, [observe(2)]).action_costs for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(policy, observe()), plain)
    assert all(parameter.grad is None for parameter in policy.parameters())
    with torch.no_grad():
        np.testing.assert_array_equal(calibrate(policy, [observe(2)]).action_costs, first)
    with torch.inference_mode():
        np.testing.assert_array_equal(calibrate(policy, [observe(2)]).action_costs, first)


def test_one_step_has_nothing_to_reuse(make_policy, observe):
    recording = calibrate(make_policy(sampler=DDIM(num_inference_steps=1)), [observe(2)])
    assert not recording.action_costs.any()
    assert bc.solve(recording, method="action", budget=1.0).computed == 6


def test_the_whole_way_on_the_command_line(policy_directory, blockcache, refused, in_an_empty_directory):
    blockcache("calibrate", policy_directory, "--generations", 2, "-o", "plain.safetensors")
    assert "'blockcache calibrate POLICY --action-costs'" in refused("solve", "plain.safetensors", "--method", "action")
    blockcache("calibrate", policy_directory, "--generations", 2, "--action-costs")
    assert "from 0." in refused("solve", "recording.safetensors", "--method", "action", "--budget", "0.001")
    assert "of 120 block computations" in blockcache(
        "solve", "recording.safetensors", "--method", "action", "--budget", "0.4"
    )
    schedule = bc.Schedule.load("schedule.json")
    assert 0.35 < schedule.origin["share"] <= 0.4
    assert schedule.origin["method"] == "action"
    blockcache("solve", "recording.safetensors", "--method", "action", "-S", 5)
    assert bc.Schedule.load("schedule.json").computed <= 5 * 6
    assert "go with method 'action'" in refused("solve", "recording.safetensors", "--budget", "0.4")


# -- what must be refused


class WithoutGradient(foreign_policy.Denoiser):
    @torch.no_grad()
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise NotImplementedError("this kernel has no backward")


class ByKernel(foreign_policy.Denoiser):
    def forward(self, *args, **kwargs):
        return OneWay.apply(super().forward(*args, **kwargs))


class Restless(foreign_policy.Denoiser):
    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs) * (1 + 0.1 * self.calls)


class Pair(foreign_policy.Denoiser):
    def forward(self, *args, **kwargs):
        return (super().forward(*args, **kwargs),)


@pytest.mark.parametrize(
    ("denoiser", "sentence"),
    [
        (WithoutGradient, r"WithoutGradient cannot be differentiated \(its output has no gradient at step 4\)"),
        (ByKernel, r"ByKernel cannot be differentiated \(NotImplementedError: this kernel has no backward\)"),
        (Restless, "gave another output at step 4 when it was given the same input again"),
        (Pair, "a denoiser that returns a tensor, got tuple"),
    ],
)
def test_a_denoiser_that_cannot_be_differentiated(denoiser, sentence):
    policy = foreign_policy.Policy(denoiser=denoiser())
    with pytest.raises(RecordingError, match=sentence) as caught:
        calibrate(policy, [foreign_observation()])
    assert "\n" not in str(caught.value)
    assert "predict_action" not in vars(policy)
    assert "forward" not in vars(policy.model)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach()).detach()


def test_a_block_without_a_gradient_is_named(policy, observe):
    policy.model.decoder.layers[1].linear2.__class__ = Detached
    with pytest.raises(RecordingError, match=r"\(layers\.1\.FFN has no gradient at step 5\)"):
        calibrate(policy, [observe()])


class Rooted(nn.Linear):
    """What it adds is nothing, and the derivative of nothing is not a number here."""

    def forward(self, x):
        return super().forward(x) + (0 * x.sum()).sqrt()


def test_gradients_that_are_nan_are_named_by_block_and_step(policy, observe):
    """The FFN's own derivative is NaN, and with it whatever lies before it."""
    policy.model.decoder.layers[1].linear2.__class__ = Rooted
    with pytest.raises(
        RecordingError, match=r"by layers\.1\.CA at step 5 is NaN or infinite; check the policy's weights"
    ):
        calibrate(policy, [observe()])


def test_what_lies_before_the_blocks_may_be_what_is_nan(policy, observe):
    policy.model.input_emb.__class__ = Rooted
    with pytest.raises(RecordingError, match=r"by the sample before layers\.0\.SA at step 5 is NaN"):
        calibrate(policy, [observe()])


class Hurried(foreign_policy.Policy):
    """Goes a little further in each step than its scheduler says."""

    def predict_action(self, obs_dict):
        step = self.noise_scheduler.step

        def further(output, t, x, **kwargs):
            found = step(output, t, x, **kwargs)
            found.prev_sample = found.prev_sample + self.further(found.prev_sample, t)
            return found

        self.noise_scheduler.step = further
        try:
            return super().predict_action(obs_dict)
        finally:
            del self.noise_scheduler.step


class Doubled(Hurried):
    def further(self, x, t):
        return torch.zeros_like(x) if t == 0 else 3 * torch.randn_like(x)


class LastMoved(Hurried):
    def further(self, x, t):
        return torch.full_like(x, 0.01 * (t == 0))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Doubled, "does not sample as its sampler's table says .ddpm: what is added to the steps is .* of the noise"),
        (LastMoved, "does not sample as .* the executed action is not what step 4 gives"),
    ],
)
def test_a_policy_that_samples_otherwise_than_it_says(kind, sentence):
    with pytest.raises(RecordingError, match=sentence):
        calibrate(kind(), [foreign_observation(4)])


def test_a_deterministic_policy_that_samples_otherwise(make_policy, observe, monkeypatch):
    """Here every step is known, so the first wrong one is named."""
    policy = make_policy(sampler=DDIM(num_inference_steps=6))
    port, other = port_of(policy), DDIM(num_inference_steps=6, clip_sample_range=0.3)
    monkeypatch.setattr(type(port), "sampler", property(lambda self: other))
    with pytest.raises(RecordingError, match="ddim: the next sample is not what step 0 gives"):
        calibrate(port, [observe()])


def test_a_sampler_without_a_table():
    policy = foreign_policy.Policy(PNDMScheduler(20, skip_prk_steps=True))
    with pytest.raises(RecordingError, match=r"a sampler whose table is known, and .*PNDM"):
        calibrate(policy, [foreign_observation()])
    assert "predict_action" not in vars(policy)


def test_a_policy_that_does_not_say_what_is_executed():
    with pytest.raises(PolicyError, match="does not say its n_"):
        calibrate(stranger_policy.Policy(), [stranger_policy.observe()])


def test_sizes_that_would_not_fit_are_refused_before_the_work(policy, observe, monkeypatch):
    monkeypatch.setattr(action_costs, "COST_BYTES", 4 * 6**3 * 3)
    calls = []
    policy.model.register_forward_pre_hook(lambda *given: calls.append(given))
    with pytest.raises(RecordingError, match=r"6 blocks, 6 steps and 4 observations would take .*fewer observations"):
        calibrate(policy, list(observe(4).split(1)))
    assert not calls
    with pytest.raises(RecordingError, match="6 steps and 4 observations"):
        calibrate(policy, iter(observe(4).split(1)))  # nobody knew beforehand

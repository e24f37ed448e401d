"""Whole trajectories, by a scheduler of diffusers and by our table, on a made-up denoiser."""

import math

import numpy as np
import pytest
import torch

from blockcache.samplers import DDIM, DPMSolver, SDEDPMSolver, step, table
from blockcache.samplers.diffusers import to_diffusers

SHAPE = (2, 5, 3)  # batch, horizon, action
SEED = 7

# DDPM and DDIM run in float64 in diffusers, with float32 coefficients that the table has to the last bit
# (seen: 2e-13 after 1000 steps). That needs correctly rounded square roots on both sides, see `exact_power`.
EXACT = 1e-11
# diffusers takes this standard deviation through a float32 logarithm and back, the table does not.
THROUGH_LOG = 2e-6
# DPM-Solver++ in diffusers rounds x to float32 at every step and takes float32 logarithms, the table neither.
SINGLE = 2e-6
# The stochastic one also takes a square root of 1 - exp(-2h) in float32, where h itself is a difference of logarithms.
STOCHASTIC = 5e-6


class NumpyArithmetic:
    """The arithmetic of a step in float64."""

    def mix(self, *terms):
        return sum(coefficient * value for value, coefficient in terms)

    def clip(self, value, limit):
        return np.clip(value, -limit, limit)

    def mul(self, a, b):
        return a * b


def tolerance_of(config):
    if isinstance(config, SDEDPMSolver):
        return STOCHASTIC
    return SINGLE if isinstance(config, DPMSolver) else EXACT


def denoiser():
    """A made-up network: nonlinear in x, different at every timestep, large enough to make x0 clip."""
    weight = np.random.default_rng(SEED).normal(size=(SHAPE[-1], SHAPE[-1]))

    def call(x, t):
        return 1.3 * np.tanh(x @ weight + math.sin(t)) + 0.1 * x

    return call


def initial_noise():
    return np.random.default_rng(SEED + 1).normal(size=SHAPE)


def exact_power(tensor, exponent, original=torch.Tensor.__pow__):
    """torch's float32 square root (MKL) may be an ulp off, depending on the machine; this one never is."""
    if exponent == 0.5 and tensor.dtype == torch.float32:
        return original(tensor.double(), 0.5).float()
    return original(tensor, exponent)


def run_diffusers(config, timesteps=None):
    """Timesteps, every x', every x0, and the generator's state after the last step."""
    scheduler, model, generator = to_diffusers(config), denoiser(), torch.Generator().manual_seed(SEED)
    if timesteps is None:
        scheduler.set_timesteps(config.num_inference_steps)
    else:
        scheduler.set_timesteps(timesteps=timesteps)
    x, samples, cleans = torch.from_numpy(initial_noise()), [], []
    for t in scheduler.timesteps:
        out = torch.from_numpy(model(x.numpy(), int(t)))
        more = {"eta": config.eta} if isinstance(config, DDIM) else {}
        result = scheduler.step(out, t, x, generator=generator, **more)
        solver = isinstance(config, DPMSolver)
        cleans.append((scheduler.model_outputs[-1] if solver else result.pred_original_sample).numpy())
        x = result.prev_sample
        assert x.dtype == torch.float64
        samples.append(x.numpy())
    return scheduler.timesteps.numpy(), samples, cleans, generator.get_state()


def run_table(config, model=None):
    coefficients, model, generator = table(config), model or denoiser(), torch.Generator().manual_seed(SEED)
    single = isinstance(config, SDEDPMSolver)  # what diffusers draws there
    x, x0, samples, cleans = initial_noise(), None, [], []
    for k in range(coefficients.steps):
        out = model(x, coefficients.timesteps[k])
        noise = None
        if coefficients.draws[k]:
            dtype = torch.float32 if single else torch.float64
            noise = torch.randn(SHAPE, generator=generator, dtype=dtype).double().numpy()
        x, x0 = step(NumpyArithmetic(), coefficients.at(k), x, out, x0, noise)
        samples.append(x)
        cleans.append(x0)
    return coefficients.timesteps, samples, cleans, generator.get_state()


def assert_same_trajectory(config, tolerance=None, power=exact_power, placed=None):
    """`placed` is the same sampler with explicit timesteps, which diffusers is then given as well."""
    tolerance = tolerance or tolerance_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__pow__", power)
        theirs = run_diffusers(config, None if placed is None else list(placed.timesteps))
    ours = run_table(placed or config)
    assert ours[0].tolist() == theirs[0].tolist()
    for their, our in zip(theirs[1] + theirs[2], ours[1] + ours[2], strict=True):
        assert np.all(np.isfinite(their))
        np.testing.assert_allclose(our, their, rtol=0, atol=tolerance * max(1.0, np.abs(their).max()))
    # Equal states mean as many draws of the same shape; equal samples, the same order.
    assert torch.equal(ours[3], theirs[3])

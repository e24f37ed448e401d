"""Samplers as schedulers: to and from diffusers, and a scheduler of our own where diffusers has none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler

from blockcache.errors import SamplerError
from blockcache.models.sampling import TableScheduler, denoise, draw_all, make_scheduler
from blockcache.samplers import DDIM, DDPM, DPMSolver, Euler, SDEDPMSolver, table
from blockcache.samplers.diffusers import from_diffusers, to_diffusers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CHUNK = (2, 5, 3)
LINEAR = {"num_train_timesteps": 50, "beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.03}
IN_DIFFUSERS = [
    DDPM(num_inference_steps=6),
    DDPM(num_inference_steps=6, variance_type="fixed_large", clip_sample_range=2.0, **LINEAR),
    DDPM(num_inference_steps=6, clip_sample=False, prediction_type="sample", timestep_spacing="trailing"),
    DDIM(num_inference_steps=6, eta=0.7, set_alpha_to_one=False, steps_offset=1),
    DPMSolver(num_inference_steps=6, solver_order=1, final_sigmas_type="sigma_min"),
    DPMSolver(num_inference_steps=6, lower_order_final=False, **LINEAR),
    SDEDPMSolver(num_inference_steps=6, **LINEAR),
    SDEDPMSolver(num_inference_steps=6, solver_order=1, prediction_type="v_prediction"),
]
PLACED = {"timesteps": [45, 30.5, 12, 3]}
OURS = [
    DDPM(**PLACED),
    DDPM(timesteps=[45, 30, 12, 0]),
    DDIM(eta=0.5, **PLACED),
    DPMSolver(num_inference_steps=6, clip_sample=True),
    SDEDPMSolver(clip_sample=True, **PLACED),
    Euler(num_inference_steps=6),
    Euler(timesteps=[0, 0.1, 0.6]),
]


def predict(x, t):
    return torch.tanh(x.roll(1, dims=-1) + torch.sin(t.to(x))) + 0.1 * x


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("config", IN_DIFFUSERS, ids=repr)
def test_there_and_back(config):
    arguments = {"eta": config.eta} if isinstance(config, DDIM) else {}
    assert from_diffusers(to_diffusers(config), config.num_inference_steps, arguments) == (config, "")


@pytest.mark.parametrize("config", OURS, ids=repr)
def test_what_diffusers_cannot_do_is_done_by_the_table(config):
    assert to_diffusers(config) is None
    assert isinstance(make_scheduler(config), TableScheduler)


def test_settings_that_a_scheduler_lists_but_does_not_follow():
    """Made from another one's config, a scheduler keeps the settings that it does not know."""
    scheduler = DPMSolverMultistepScheduler.from_config(DDPMScheduler(50, clip_sample=True).config)
    assert scheduler.config.clip_sample is True
    config, why = from_diffusers(scheduler, 6, {})
    assert (config.type, config.clip_sample, why) == ("dpmsolver++", False, "")


@pytest.mark.parametrize("config", IN_DIFFUSERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_as_a_scheduler_does_as_diffusers_does(config, dtype, monkeypatch):
    like = torch.zeros(1, dtype=dtype)
    expected = denoise(config, predict, CHUNK, like, generator=generator())
    monkeypatch.setattr("blockcache.models.sampling.make_scheduler", TableScheduler)
    found = denoise(config, predict, CHUNK, like, generator=generator())
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("config", IN_DIFFUSERS + OURS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_handed_over_is_noise_drawn(config, dtype):
    like, drawing = torch.zeros(1, dtype=dtype), generator()
    noise = draw_all(table(config), CHUNK, like, drawing)
    assert len(noise) == 1 + table(config).draw_count
    own = generator()
    drawn = denoise(config, predict, CHUNK, like, generator=own)
    assert torch.equal(drawn, denoise(config, predict, CHUNK, like, noise=noise))
    assert torch.equal(own.get_state(), drawing.get_state())


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (DDPM(timesteps=[45, 30]), [45, 30]),
        (DDPM(timesteps=[45, 30.5]), [45.0, 30.5]),
        (Euler(num_inference_steps=4), [0.0, 0.25, 0.5, 0.75]),
        (Euler(num_inference_steps=1), [0.0]),
    ],
)
def test_the_denoiser_is_given_the_listed_timesteps(config, given):
    seen = []
    denoise(config, lambda x, t: seen.append(t) or x, CHUNK, torch.zeros(1), generator=generator())
    assert [t.item() for t in seen] == given
    assert {type(t.item()) for t in seen} == {type(given[0])}


def test_a_table_is_stepped_through_in_order():
    scheduler, x = TableScheduler(Euler(num_inference_steps=4)), torch.zeros(CHUNK)
    scheduler.step(x, 0.0, x)
    with pytest.raises(SamplerError, match=r"step 1: expected timestep 0.25; got 0.5; begin with set_timesteps"):
        scheduler.step(x, 0.5, x)
    for t in (0.25, 0.5, 0.75):
        scheduler.step(x, t, x)
    with pytest.raises(SamplerError, match=r"step 4: expected timestep None; got 0.75"):
        scheduler.step(x, 0.75, x)
    scheduler.set_timesteps(4)
    scheduler.step(x, 0.0, x)
    with pytest.raises(SamplerError, match="this sampler has 4 steps, got 5"):
        scheduler.set_timesteps(5)


def test_placed_steps_nearly_on_the_grid_act_nearly_as_the_grid():
    own = DDPM(num_inference_steps=4)
    near = replace(own, timesteps=own.times() + np.array([0.001, 0.001, 0.001, 0]))
    like = torch.zeros(1, dtype=torch.float64)
    expected = denoise(own, predict, CHUNK, like, generator=generator())
    found = denoise(near, predict, CHUNK, like, generator=generator())
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)

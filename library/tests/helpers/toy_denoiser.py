"""A policy whose answer is known: actions around a mean that the observation gives, normally distributed, and the very
denoiser that belongs to that. In it every sampler is a linear map of its noise."""

import numpy as np
import torch
from torch import nn

from blockcache.models.adapter import Adapter
from blockcache.models.port import Port
from blockcache.models.sampling import Sampling, denoise
from blockcache.observations.tensors import as_tensor
from blockcache.samplers import DDPM

TOKENS, ACTION, SPREAD = 3, 2, 0.3


class Gaussian(nn.Module):
    """The noise that one expects in a sample of N(mean, SPREAD^2) at a timestep: linear in the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def power(self, t):
        return torch.cos((t / 100 + 0.008) / 1.008 * torch.pi / 2) ** 2

    def forward(self, sample, timestep, mean):
        power = self.power(torch.as_tensor(timestep).to(sample.dtype))
        gain = (1 - power).sqrt() / (power * SPREAD**2 + 1 - power)
        return gain * (sample - power.sqrt() * mean)


class WholeTimes(Gaussian):
    """Looks its noise levels up, as an embedding would."""

    def forward(self, sample, timestep, mean):
        if timestep.is_floating_point():
            raise TypeError("no whole timestep")
        return super().forward(sample, timestep, mean)


class NoGradient(Gaussian):
    @torch.no_grad()
    def forward(self, sample, timestep, mean):
        return super().forward(sample, timestep, mean)


class LinearPolicy(nn.Module):
    """`predict_action(obs)`: obs (B, 1, TOKENS * ACTION) is the mean of the chunk."""

    def __init__(self, net=Gaussian, sampler=None) -> None:
        super().__init__()
        self.net, self.sampler = net(), sampler or DDPM(clip_sample=False)

    @torch.no_grad()
    def predict_action(self, obs, generator=None, noise=None):
        mean = as_tensor(obs)[:, 0].unflatten(-1, (TOKENS, ACTION))
        chunk = tuple(mean.shape)
        made = denoise(self.sampler, lambda x, t: self.net(x, t, mean), chunk, mean, generator=generator, noise=noise)
        return {"action": 2 * made[:, 1:] + 1, "action_pred": 2 * made + 1}


class LinearPort(Port):
    takes_noise = True
    n_obs_steps, n_action_steps, horizon = 1, TOKENS - 1, TOKENS
    executed = (1, TOKENS)
    inputs = {"obs": (1, TOKENS * ACTION)}  # noqa: RUF012
    action_scale, action_offset = np.full(ACTION, 0.5), np.full(ACTION, -0.5)

    def __init__(self, policy) -> None:
        super().__init__(policy, Adapter("linear", policy.net, (), (), {}, 0, lambda sample, timestep, mean: timestep))

    @property
    def sampling(self):
        return Sampling.of(self.policy.sampler)

    def with_sampler(self, sampler):
        other = LinearPolicy(sampler=sampler)
        other.net = self.policy.net
        return LinearPort(other)

    def copy(self):
        return LinearPort(self.policy)

    def prepare_observation(self, obs):
        return as_tensor(obs)

    def read_observation(self, obs, like):
        return {"obs": as_tensor(obs)}


def means(count, dtype=torch.float64):
    return torch.randn(count, 1, TOKENS * ACTION, generator=torch.Generator().manual_seed(5), dtype=dtype)


def own_cloud(observations, samples):
    """What the policy's own sampler would draw, were it exact."""
    executed = observations[:, :, ACTION:]
    generator = torch.Generator().manual_seed(6)
    return executed + SPREAD * torch.randn(len(executed), samples, executed.shape[-1], generator=generator).double()

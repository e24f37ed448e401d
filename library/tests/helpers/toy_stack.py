"""A policy whose blocks' outputs are known: one adds the observation, one a multiple of ones that its step decides, and one
half of the stream. The sample never changes, so each step stands for itself."""

import numpy as np
import torch
from torch import nn

from blockcache.block import Block
from blockcache.models.adapter import Adapter, Layer
from blockcache.models.port import Port
from blockcache.models.sampling import Sampling
from blockcache.observations.tensors import as_tensor

WIDTH, TOKENS, STEPS = 4, 3, 6
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""What layers.0.FFN adds to every number at each step."""
BLOCKS = tuple(
    Block(name, kind, order, 1)
    for order, (name, kind) in enumerate((("layers.0.SA", "SA"), ("layers.0.FFN", "FFN"), ("layers.1.FFN", "FFN")))
)


class First(nn.Module):
    def forward(self, stream, seen, step):
        return self.routed(lambda name, compute: compute(), stream, seen, step)

    def routed(self, route, stream, seen, step):
        stream = stream + route("layers.0.SA", lambda: seen.expand_as(stream))
        return stream + route("layers.0.FFN", lambda: torch.full_like(stream, SIZES[int(step)]))


class Second(nn.Module):
    def forward(self, stream):
        return self.routed(lambda name, compute: compute(), stream)

    def routed(self, route, stream):
        return stream + route("layers.1.FFN", lambda: 0.5 * stream)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = First(), Second()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, sample, step, seen):
        stream = torch.zeros(len(sample), TOKENS, WIDTH)
        return self.second(self.first(stream, seen, step)).mean(dim=-1, keepdim=True)


class StackPolicy(nn.Module):
    """`predict_action(obs)`: obs (B, 1, WIDTH) is what layers.0.SA adds; the action is the sum of what the stack gives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.eval()

    @torch.no_grad()
    def predict_action(self, obs, generator=None):
        sample = torch.randn(len(obs), TOKENS, 1, generator=generator)
        total = torch.zeros_like(sample)
        for step in range(STEPS):
            total = total + self.net(sample, torch.tensor(step), obs)
        return {"action": sample + total}


class StackPort(Port):
    n_obs_steps, n_action_steps, horizon = 1, TOKENS, TOKENS
    inputs = {"obs": (1, WIDTH)}  # noqa: RUF012
    sampling = Sampling(tuple(map(float, range(STEPS))), {"type": "sum"}, unknown="a sum over the steps")
    action_scale = np.ones(1)

    def __init__(self, policy) -> None:
        layers = (
            Layer(policy.net.first, ("layers.0.SA", "layers.0.FFN"), policy.net.first.routed, lambda x: x, "stream"),
            Layer(policy.net.second, ("layers.1.FFN",), policy.net.second.routed, lambda x: x, "stream"),
        )
        super().__init__(
            policy,
            Adapter("toy-stack", policy.net, BLOCKS, layers, {"width": WIDTH}, 0, lambda sample, step, seen: step),
        )

    def with_sampler(self, sampler):
        raise NotImplementedError

    def copy(self):
        return StackPort(self.policy)

    def prepare_observation(self, obs):
        return as_tensor(obs)

    def read_observation(self, obs, like):
        return {"obs": as_tensor(obs)}


def stack():
    return StackPort(StackPolicy())


def nothing_seen(batch=1):
    """Observations with which layers.0.SA adds nothing."""
    return np.zeros((batch, 1, WIDTH), dtype=np.float32)

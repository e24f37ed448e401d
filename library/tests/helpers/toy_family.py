"""A family that is as unlike DP-T as the port allows, and comes in through the entry point as another package would.

A flow-matching transformer with adaLN: every block's input is modulated and every block's output gated, by the time and a
state; even layers attend to words, odd ones to pictures. Euler steps over float times, an entry and names of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from blockcache.block import Block
from blockcache.errors import ObservationError
from blockcache.models.adapter import Adapter, Layer
from blockcache.models.flops import attention, feed_forward, linear
from blockcache.models.port import Port
from blockcache.models.program import Program, StepTable
from blockcache.models.sampling import Sampling
from blockcache.observations.tensors import as_tensor, check_finite
from blockcache.samplers import Euler

WIDTH, HEADS, LAYERS, TOKENS, ACTION, EXECUTED, STEPS = 12, 3, 2, 5, 2, (1, 4), 6
STATE, WORDS, PICTURES = (1, 4), (3, 6), (2, 7)  # shapes of the inputs: steps or tokens, then numbers
KINDS = ("SA", "CA", "FFN")


class Stage(nn.Module):
    """One layer: three gated residual branches."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(2 * WIDTH, 9 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.memory, self.back = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(source, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, context, memory):
        return self.routed(lambda name, compute: compute(), x, context, memory)

    def routed(self, route, x, context, memory):
        shifts, scales, gates = self.modulation(F.silu(context)).view(-1, 3, 3, 1, WIDTH).unbind(1)
        branches = (self.attend, lambda h: self.cross(h, memory), lambda h: self.down(F.silu(self.up(h))))
        for place, (kind, branch) in enumerate(zip(KINDS, branches, strict=True)):
            h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scales[:, place]) + shifts[:, place]
            x = x + gates[:, place] * route(kind, lambda h=h, branch=branch: branch(h))
        return x

    def attend(self, h):
        return self.out(_attention(*self.qkv(h).chunk(3, dim=-1)))

    def cross(self, h, memory):
        return self.back(_attention(self.query(h), *self.memory(memory).chunk(2, dim=-1)))


def _attention(q, k, v):
    q, k, v = (item.unflatten(-1, (HEADS, -1)).transpose(1, 2) for item in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(ACTION, WIDTH), nn.Linear(WIDTH, ACTION)
        self.places = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.clock, self.sense = nn.Linear(2, WIDTH), nn.Linear(STATE[1], WIDTH)
        self.stages = nn.ModuleList(Stage((WORDS, PICTURES)[index % 2][1]) for index in range(LAYERS))

    def time(self, t):
        return self.clock(torch.stack([torch.sin(3 * t), torch.cos(3 * t)], dim=-1))

    def forward(self, x, t, state, words, pictures):
        context = torch.cat([self.time(t.expand(len(x))), self.sense(state[:, 0])], dim=-1)
        x = self.enter(x) + self.places
        for index, stage in enumerate(self.stages):
            x = stage(x, context, (words, pictures)[index % 2])
        return self.leave(x)


class FlowPolicy(nn.Module):
    """`chunk(obs)`: a mapping of three inputs in, actions out; noise from torch's global generator."""

    def __init__(self, steps=STEPS) -> None:
        super().__init__()
        self.net, self.steps = Net(), steps
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
        self.eval()

    @torch.no_grad()
    def chunk(self, obs, generator=None):
        state, words, pictures = (obs[name] for name in ("state", "words", "pictures"))
        x = torch.randn(len(state), TOKENS, ACTION, generator=generator)
        for step in range(self.steps):
            x = x + self.net(x, torch.tensor(step / self.steps), state, words, pictures) / self.steps
        return {"action": x[:, slice(*EXECUTED)], "action_pred": x}


class FlowPort(Port):
    entry = "chunk"

    @property
    def sampling(self):
        return Sampling.of(Euler(num_inference_steps=self.policy.steps))

    def with_sampler(self, sampler):
        other = FlowPolicy(sampler.num_inference_steps)
        other.net = self.policy.net
        return self._sharing_weights(other)

    n_obs_steps, n_action_steps, horizon = 1, EXECUTED[1] - EXECUTED[0], TOKENS
    executed = EXECUTED
    action_scale = np.ones(ACTION)
    inputs = {"state": STATE, "words": WORDS, "pictures": PICTURES}  # noqa: RUF012

    def prepare_observation(self, obs):
        return {name: as_tensor(value) for name, value in obs.items()}

    def read_observation(self, obs, like):
        found = {name: as_tensor(obs[name]).to(like) for name in self.inputs}
        for name, shape in self.inputs.items():
            if tuple(found[name].shape[1:]) != shape:
                raise ObservationError(f"{name} has shape {tuple(found[name].shape)}, expected (batch, {shape})")
            check_finite(found[name])
        return found

    @property
    def trusted(self):
        return True

    def settings(self):
        return [self.policy.steps]


def claim(policy: Any) -> Port | str:
    if not isinstance(getattr(policy, "net", None), Net):
        return "it has no net of stages"
    blocks = _blocks()
    layers = tuple(_layer(index, stage) for index, stage in enumerate(policy.net.stages))
    widths = {"width": WIDTH, "heads": HEADS}
    return FlowPort(
        policy, Adapter("toy-flow", policy.net, blocks, layers, widths, _every_step(), lambda x, t, *rest: t, _fold)
    )


def _blocks():
    costs = {"SA": attention(TOKENS, TOKENS, WIDTH), "FFN": feed_forward(TOKENS, WIDTH, 2 * WIDTH)}
    names = [(index, kind) for index in range(LAYERS) for kind in KINDS]
    cross = [attention(TOKENS, (WORDS, PICTURES)[index % 2][0], WIDTH) for index in range(LAYERS)]
    return tuple(
        Block(f"layers.{index}.{kind}", kind, order, costs.get(kind, cross[index]))
        for order, (index, kind) in enumerate(names)
    )


def _every_step():
    return 2 * linear(TOKENS, ACTION, WIDTH) + LAYERS * linear(1, 2 * WIDTH, 9 * WIDTH)


def _layer(index, stage):
    def forward(route, x, context, memory):
        return stage.routed(lambda kind, compute: route(f"layers.{index}.{kind}", compute), x, context, memory)

    names = tuple(f"layers.{index}.{kind}" for kind in KINDS)
    return Layer(stage, names, forward, lambda x: F.layer_norm(x, (WIDTH,), eps=1e-6), "x")


@dataclass(frozen=True)
class Conditions:
    start: Any
    modulation: list  # by layer: the state's share, (B, 9, d)
    memory: list  # by layer: keys and values, (B, S, 2d)
    now: tuple = ()  # this step's shifts, scales and gates by layer


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowProgram(Program):
    def conditions(self, ops, obs):
        sensed = ops.linear(ops.reshape(obs["state"], (-1, STATE[1])), ops.weight("sense_w"), ops.weight("sense_b"))
        sensed = ops.activation(sensed, "silu")
        modulation, memory = [], []
        for index in range(LAYERS):
            name, (_, size) = (("words", WORDS), ("pictures", PICTURES))[index % 2]
            share = ops.linear(sensed, ops.weight(f"state_w{index}"), ops.weight(f"state_b{index}"))
            modulation.append(ops.reshape(share, (-1, 9, WIDTH)))
            pairs = ops.linear(
                ops.reshape(obs[name], (-1, size)), ops.weight(f"memory_w{index}"), ops.weight(f"memory_b{index}")
            )
            memory.append(ops.reshape(pairs, (-1, (WORDS, PICTURES)[index % 2][0], 2 * WIDTH)))
        return Conditions(ops.per_sample(ops.weight("places")), modulation, memory)

    def begin(self, ops, conditions, step):
        now = [
            ops.split(ops.add([conditions.modulation[index], ops.row("time", step, index)]), 9, 1)
            for index in range(LAYERS)
        ]
        return replace(conditions, now=now)

    def enter(self, ops, x, start, conditions, step):
        return ops.linear(x, ops.weight("enter_w"), start)

    def residual(self, ops, block, stream, conditions, step):
        index, place = divmod(block, 3)
        shift, scale = conditions.now[index][place], conditions.now[index][3 + place]
        h = ops.reshape(ops.layer_norm(stream, WIDTH, 1e-6), (-1, TOKENS, WIDTH))
        h = ops.add([h, ops.mul(h, scale), shift])
        flat = ops.reshape(h, (-1, WIDTH))
        if place == 0:
            qkv = ops.reshape(self._linear(ops, "qkv", index, flat), (-1, TOKENS, 3 * WIDTH))
            attended = ops.attention(*ops.split(qkv, 3, -1), HEADS)
            return self._linear(ops, "out", index, ops.reshape(attended, (-1, WIDTH)))
        if place == 1:
            query = ops.reshape(self._linear(ops, "query", index, flat), (-1, TOKENS, WIDTH))
            attended = ops.attention(query, *ops.split(conditions.memory[index], 2, -1), HEADS)
            return self._linear(ops, "back", index, ops.reshape(attended, (-1, WIDTH)))
        return self._linear(ops, "down", index, ops.activation(self._linear(ops, "up", index, flat), "silu"))

    def gate(self, ops, block, conditions, step):
        index, place = divmod(block, 3)
        return ops.reshape(ops.mul(conditions.now[index][6 + place], ops.weight("every_token")), (-1, WIDTH))

    def leave(self, ops, stream, conditions, step):
        return ops.linear(stream, ops.weight("leave_w"), ops.weight("leave_b"))

    def finish(self, ops, sample):
        return ops.reshape(sample, (-1, TOKENS, ACTION))

    def _linear(self, ops, name, index, x):
        return ops.linear(x, ops.weight(f"{name}_w{index}"), ops.weight(f"{name}_b{index}"))


def _fold(port):
    net = port.policy.net
    weights = {"every_token": torch.ones(1, TOKENS, 1), "places": (net.places + net.enter.bias).detach()}
    weights |= {"enter_w": net.enter.weight.T, "leave_w": net.leave.weight.T, "leave_b": net.leave.bias}
    weights |= {"sense_w": net.sense.weight.T, "sense_b": net.sense.bias}
    times = F.silu(net.time(torch.tensor(port.timesteps)))  # (K, d)
    rows = []
    for index, stage in enumerate(net.stages):
        w, b = stage.modulation.weight.T, stage.modulation.bias
        rows.append((times @ w[:WIDTH]).view(-1, 9, WIDTH))
        weights |= {f"state_w{index}": w[WIDTH:], f"state_b{index}": b}
        for name in ("qkv", "out", "query", "memory", "back", "up", "down"):
            module = getattr(stage, name)
            scale = torch.ones(len(module.bias))
            if name in ("qkv", "query"):
                scale[:WIDTH] /= (WIDTH // HEADS) ** 0.5
            weights |= {f"{name}_w{index}": module.weight.T * scale, f"{name}_b{index}": module.bias * scale}
    return FlowProgram(
        inputs=port.inputs,
        chunk=(TOKENS, ACTION),
        tokens=TOKENS,
        executed=EXECUTED,
        action_dim=ACTION,
        blocks=_blocks(),
        once=0,
        every_step=_every_step(),
        weights={name: tensor.detach().contiguous() for name, tensor in weights.items()},
        tables={"time": StepTable(torch.stack(rows, dim=1).detach(), (1, 9, WIDTH))},
        gated=True,
    )

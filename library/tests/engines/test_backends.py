"""Each operation of a program on both backends: torch executes what ONNX writes, also what no family of ours uses."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from blockcache.block import Block
from blockcache.engines.loop import Loop
from blockcache.engines.onnx_graph import build_graph
from blockcache.models.program import Program
from blockcache.samplers import Euler, table
from blockcache.schedule import Schedule, compile_plan
from blockcache_runtime.graph import check_model

TOKENS, WIDTH = 3, 4


def weights():
    normal = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(diagonal=1)
    return {
        "positions": normal(TOKENS, WIDTH),
        "square": normal(WIDTH, WIDTH),
        "bias": normal(WIDTH),
        "groups": normal(TOKENS, WIDTH, WIDTH),
        "causal": torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -math.inf),
        "other": torch.zeros(TOKENS, TOKENS).masked_fill(hidden.T, -math.inf),
        "row": normal(1, 1, WIDTH),
        "column": normal(1, TOKENS, 1),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class OneOperation(Program):
    """One step whose output is what an operation makes of the observation (B, T, d)."""

    operation: Any

    def conditions(self, ops, obs):
        found = ops.reshape(self.operation(ops, obs["obs"]), (-1, WIDTH))
        return SimpleNamespace(start=ops.per_sample(ops.weight("positions")), found=found)

    def enter(self, ops, x, start, conditions, step):
        return start

    def residual(self, ops, block, stream, conditions, step):
        return stream

    def leave(self, ops, stream, conditions, step):
        return conditions.found

    def finish(self, ops, sample):
        return ops.reshape(sample, (-1, TOKENS, WIDTH))


def flat(ops, x):
    return ops.reshape(x, (-1, WIDTH))


def padded(axis):
    def operation(ops, x):
        five = ops.reshape(x, (-1, TOKENS, 1, 2, 2))
        longer = ops.pad(five, axis=axis, before=1)
        size = {1: 1 + TOKENS, 2: 2, 3: 3, 4: 3}[axis]
        return ops.slice(longer, axis, size - (TOKENS, 1, 2, 2)[axis - 1], size)

    return operation


def first_is_zero(ops, x):
    """Padding is zeros, and in front."""
    return ops.slice(ops.pad(ops.reshape(x, (-1, TOKENS, WIDTH, 1, 1)), axis=1, before=1), 1, 0, TOKENS)


SQUARE = weights()["square"]
OPERATIONS = {
    **{
        f"activation {kind}": (lambda ops, x, kind=kind: ops.activation(x, kind), own)
        for kind, own in {
            "cos": torch.cos,
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "mish": F.mish,
            "silu": F.silu,
            "sin": torch.sin,
        }.items()
    },
    "softmax": (lambda ops, x: ops.softmax(x), lambda x: x.softmax(-1)),
    "layer_norm": (lambda ops, x: ops.layer_norm(x, WIDTH, 0.1), lambda x: F.layer_norm(x, (WIDTH,), eps=0.1)),
    "scale_norm": (
        lambda ops, x: ops.scale_norm(x, WIDTH, 0.1, False),
        lambda x: x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
    ),
    "scale_norm, centred": (
        lambda ops, x: ops.scale_norm(x, WIDTH, 0.1, True),
        lambda x: x / (x.var(-1, keepdim=True) + 0.1).sqrt(),
    ),
    "linear": (
        lambda ops, x: ops.linear(flat(ops, x), ops.weight("square"), ops.weight("bias")),
        lambda x: x @ SQUARE + weights()["bias"],
    ),
    "linear, a bias by row": (
        lambda ops, x: ops.linear(flat(ops, x), ops.weight("square"), ops.per_sample(ops.weight("positions"))),
        lambda x: x @ SQUARE + weights()["positions"],
    ),
    "matmul": (lambda ops, x: ops.matmul(x, ops.weight("square")), lambda x: x @ SQUARE),
    "matmul of batches": (
        lambda ops, x: ops.matmul(ops.matmul(x, ops.transpose(x, (0, 2, 1))), x),
        lambda x: x @ x.transpose(1, 2) @ x,
    ),
    "grouped": (
        lambda ops, x: ops.grouped(x, ops.weight("groups")),
        lambda x: torch.einsum("bti,tio->bto", x, weights()["groups"]),
    ),
    "add": (lambda ops, x: ops.add([x]), lambda x: x),
    "add, two": (lambda ops, x: ops.add([x, x]), lambda x: 2 * x),
    "add, five": (lambda ops, x: ops.add([x] * 5), lambda x: 5 * x),
    "add, four of several shapes": (
        lambda ops, x: ops.add([x, ops.weight("row"), ops.weight("column"), x]),
        lambda x: 2 * x + weights()["row"] + weights()["column"],
    ),
    "mul": (lambda ops, x: ops.mul(x, ops.weight("column")), lambda x: x * weights()["column"]),
    "split": (lambda ops, x: ops.add([*ops.split(x, 3, 1), x]), lambda x: x.sum(1, keepdim=True) + x),
    "split, the last axis": (
        lambda ops, x: ops.mul(x, ops.split(x, 4, -1)[2]),
        lambda x: x * x[..., 2:3],
    ),
    "slice": (lambda ops, x: ops.add([x, ops.slice(x, 1, 1, 2)]), lambda x: x + x[:, 1:2]),
    **{f"pad, axis {axis}": (padded(axis), lambda x: x) for axis in (1, 2, 3, 4)},
    "pad, the first": (first_is_zero, lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)),
    "attention": (
        lambda ops, x: ops.attention(x, x, x, 2),
        lambda x: attend(x, torch.zeros(TOKENS, TOKENS)),
    ),
    "attention, causal": (
        lambda ops, x: ops.attention(x, x, x, 2, "causal", True),
        lambda x: attend(x, weights()["causal"]),
    ),
    "attend": (lambda ops, x: by_head(ops, x), lambda x: attend(x, torch.zeros(TOKENS))),
    "attend, hidden": (
        lambda ops, x: by_head(ops, x, ops.reshape(ops.slice(x, 2, 0, 1), (-1, 1, 1, TOKENS))),
        lambda x: attend(x, x[:, None, None, :, 0]),
    ),
    "attention, masked": (
        lambda ops, x: ops.attention(x, x, x, 2, "other"),
        lambda x: attend(x, weights()["other"]),
    ),
}


def by_head(ops, x, hidden=None):
    q = ops.transpose(ops.reshape(x, (-1, TOKENS, 2, WIDTH // 2)), (0, 2, 1, 3))
    return ops.transpose(ops.attend(q, ops.transpose(q, (0, 1, 3, 2)), q, hidden), (0, 2, 1, 3))


def attend(x, mask):
    """Two heads; the scale is in the query already."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return ((q @ q.transpose(-1, -2) + mask).softmax(-1) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_both_backends_do_what_the_operation_says(name):
    operation, expected = OPERATIONS[name]
    program = OneOperation(
        inputs={"obs": (TOKENS, WIDTH)},
        chunk=(TOKENS, WIDTH),
        tokens=TOKENS,
        executed=(0, TOKENS),
        action_dim=WIDTH,
        blocks=(Block("layers.0.FFN", "FFN", 0, 0),),
        once=0,
        every_step=0,
        weights=weights(),
        tables={},
        operation=operation,
    )
    sampler, plan = table(Euler(num_inference_steps=1)), compile_plan(Schedule(1, {"layers.0.FFN": [0]}))
    loop = Loop(program, plan, sampler)
    for unrolled in (False, True):
        model = build_graph(program, plan, sampler, unrolled)
        check_model(model.SerializeToString())  # an export of it can be opened
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for batch in (1, 2):
            obs = torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(batch))
            noise = torch.zeros(1, batch, TOKENS, WIDTH)
            right = expected(obs)
            executed = loop({"obs": obs}, noise)["action"]
            (written,) = session.run(["action"], {"obs": obs.numpy(), "noise": noise.numpy()})
            np.testing.assert_allclose(executed, right, atol=1e-5)
            np.testing.assert_allclose(written, right, atol=1e-5)

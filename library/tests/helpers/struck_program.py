"""A toy program of which one step is struck, and what its graph gives back."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from blockcache.block import Block
from blockcache.engines.build import Build
from blockcache.models.program import Program, StepTable
from blockcache.samplers import DDPM, table
from blockcache.schedule import Schedule

TOKENS, WIDTH, STEPS = 2, 3, 30


@dataclass(frozen=True, eq=False, kw_only=True)
class Struck(Program):
    """A stream of ones; `place` says whether the table strikes the stream, or the output behind it."""

    place: str

    def conditions(self, ops, obs):
        return SimpleNamespace(start=ops.per_sample(ops.weight("ones")))

    def enter(self, ops, x, start, conditions, step):
        return ops.linear(x, ops.weight("nothing"), start)

    def residual(self, ops, block, stream, conditions, step):
        return ops.mul(stream, ops.row("blow", step)) if self.place == "stream" else stream

    def leave(self, ops, stream, conditions, step):
        normed = ops.layer_norm(stream, WIDTH, 1e-5)
        return ops.add([normed, ops.row("blow", step)]) if self.place == "output" else normed

    def finish(self, ops, sample):
        return ops.reshape(sample, (-1, TOKENS, WIDTH))


def struck(place, step, value):
    blow = torch.zeros(STEPS, 1, WIDTH)
    blow[step] = value
    program = Struck(
        inputs={"obs": (1, 1)},
        chunk=(TOKENS, WIDTH),
        tokens=TOKENS,
        executed=(0, 1),
        action_dim=WIDTH,
        blocks=(Block("layers.0.FFN", "FFN", 0, 0),),
        once=0,
        every_step=0,
        weights={"ones": torch.ones(TOKENS, WIDTH), "nothing": torch.zeros(WIDTH, WIDTH)},
        tables={"blow": StepTable(blow, (1, WIDTH))},
        place=place,
    )
    schedule = Schedule.every_step(STEPS, ["layers.0.FFN"])
    return Build(program, schedule, table(DDPM(num_inference_steps=STEPS)))


def plainly(opened, feed):
    """All that the graph gives back, unchecked."""
    return dict(zip(opened._outputs, opened._loaded.session.run([*opened._outputs], feed), strict=True))

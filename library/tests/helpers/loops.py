"""Tiny policies of several forms, the loops that are made of them, and what these compute."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from blockcache.engines.build import build
from blockcache.engines.loop import Loop
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM, DPMSolver
from blockcache.schedule import Schedule, generation_flops

STEPS = 6
SHAPES = {
    "tiny": {},
    "one layer": {"n_layer": 1},
    "three observations, long chunk": {"n_obs_steps": 3, "horizon": 12, "n_layer": 3},
    "four heads": {"n_head": 4, "obs_dim": 9},
}
"""Changes of the tiny policy's config by name, as `SAMPLERS`."""
SAMPLERS = {
    "ddpm": {"sampler": DDPM(num_inference_steps=STEPS)},
    "ddim with eta": {"sampler": DDIM(num_inference_steps=STEPS, eta=0.7)},
    "dpmsolver++": {"sampler": DPMSolver(num_inference_steps=STEPS, beta_schedule="linear")},
}


def policies(changes):
    """A fixture: the tiny policy with each of these changes of its config."""

    @pytest.fixture(params=changes.values(), ids=changes)
    def policy(request, make_policy):
        return make_policy(**request.param)

    return policy


def built(policy, updates=None):
    """What a loop is made from, every step an update or as `updates` says."""
    port = port_of(policy)
    names, steps = [block.name for block in port.adapter.blocks], len(port.timesteps)
    schedule = Schedule.every_step(steps, names) if updates is None else Schedule(steps, updates(names, steps))
    return build(port, schedule, "loop")


def loop_of(made):
    return Loop(made.program, made.plan, made.sampler)


def counted(call):
    """The FLOPs that torch counts."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def formula(made, schedule=None):
    """The FLOPs that the program says of itself."""
    program = made.program
    return program.once + generation_flops(program.blocks, program.every_step, STEPS, schedule)


def error(policy, found, expected):
    """The largest difference between actions, in the policy's own units."""
    return float(((found - expected) * policy.normalizer.action.scale).abs().max())

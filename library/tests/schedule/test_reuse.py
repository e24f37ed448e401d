"""One meaning of reuse: block by block, by a plan's operations, and through the walk, on integers that tell a skip from a
compute. The definition they are held against is written out here, in four lines."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given

from blockcache.engines.walk import denoiser_output
from blockcache.schedule import Reuse, Schedule
from blockcache.schedule.plan import Compute, compile_plan
from random_schedules import residual, schedules

START = 10**9


def present_gate(block, step):
    return 3 + block + 7 * step


def one(block, step):
    return 1


def meaning(schedule, gate):
    """What each step's stream ends as: a skipped block adds its last update again, times its present gate."""
    last, ends = {}, []
    for step in range(schedule.steps):
        stream = START + step
        for block, updates in enumerate(schedule.updates.values()):
            if step in updates:
                last[block] = residual(block, step, stream)
            stream += gate(block, step) * last[block]
        ends.append(stream)
    return ends


def block_by_block(schedule, gate):
    """As the patched engine goes: each block asks what it adds."""
    reuse, ends = Reuse(compile_plan(schedule)), []
    for step in range(schedule.steps):
        stream = START + step
        for block, name in enumerate(schedule.blocks):
            compute = lambda block=block, step=step, stream=stream: residual(block, step, stream)  # noqa: E731
            stream += gate(block, step) * reuse.block(step, name, compute)
        ends.append(stream)
    return ends


def by_operations(schedule, sums):
    """As a whole-loop engine goes, without a gate."""
    plan = compile_plan(schedule, sums=sums)
    reuse, ends = Reuse(plan, sum), []
    for step, operations in enumerate(plan.program):
        stream = step
        for place, operation in enumerate(operations):
            if isinstance(operation, Compute):
                stream += START if place == 0 else 0
                found = residual(operation.block, step, stream)
                reuse.computed(operation, found)
                stream += found
            else:
                stream += reuse.run_onto(operation, START) if place == 0 else reuse.run(operation)
        reuse.end_step(step)
        ends.append(stream)
    assert reuse._sums == {}, "every sum is given up in the end"
    return ends


class Integers:
    """The operations of a backend that the toy program below needs."""

    def __init__(self):
        self.added = 0

    def add(self, values):
        self.added += len(values) - 1
        return sum(values)

    def mul(self, a, b):
        return a * b

    def watch(self, stream, output):
        pass


@dataclass
class ToyProgram:
    """`computed` counts residuals, so that a skip cannot hide."""

    gated: bool
    computed: int = 0

    def begin(self, ops, conditions, step):
        return conditions

    def enter(self, ops, x, start, conditions, step):
        return x + start

    def residual(self, ops, block, stream, conditions, step):
        self.computed += 1
        return residual(block, step, stream)

    def gate(self, ops, block, conditions, step):
        return present_gate(block, step)

    def leave(self, ops, stream, conditions, step):
        return stream


def through_the_walk(schedule, gated):
    plan = compile_plan(schedule, sums=not gated)
    ops, program = Integers(), ToyProgram(gated)
    reuse, conditions, ends = Reuse(plan, ops.add), SimpleNamespace(start=START), []
    for step, operations in enumerate(plan.program):
        ends.append(denoiser_output(ops, program, operations, reuse, conditions, step, step))
        reuse.end_step(step)
    assert program.computed == schedule.computed
    assert reuse._sums == {}
    return ends, ops.added


@given(schedules())
def test_all_ways_mean_the_same(schedule):
    expected = meaning(schedule, one)
    assert block_by_block(schedule, one) == expected
    assert by_operations(schedule, sums=True) == expected
    assert by_operations(schedule, sums=False) == expected
    assert through_the_walk(schedule, gated=False)[0] == expected


@given(schedules())
def test_a_gate_is_the_present_one_whatever_is_reused(schedule):
    expected = meaning(schedule, present_gate)
    assert block_by_block(schedule, present_gate) == expected
    assert through_the_walk(schedule, gated=True)[0] == expected


def naive_additions(schedule):
    return schedule.steps * len(schedule.blocks)


@given(schedules())
def test_sums_never_cost_more_additions_than_block_by_block(schedule):
    """Each step adds every block to the stream once; what is summed beforehand is added once for many steps."""
    assert through_the_walk(schedule, gated=False)[1] <= naive_additions(schedule)


def test_a_run_at_the_start_is_added_to_it_once():
    """Two steps of four computed blocks, eight of which all are skipped: one sum of four, one with the start."""
    schedule = Schedule(10, {f"layers.{index}.FFN": [0, 5] for index in range(4)})
    assert through_the_walk(schedule, gated=False)[1] == 2 * 4 + 2 * (3 + 1)


def test_what_nobody_reads_again_is_gone():
    plan = compile_plan(Schedule(3, {"layers.0.SA": [0, 2], "layers.0.FFN": [0]}))
    reuse = Reuse(plan, sum)
    reuse.computed(plan.program[0][0], 5)
    reuse.computed(plan.program[0][1], 7)
    reuse.end_step(0)
    assert reuse.run(plan.program[1][0]) == 12
    reuse.end_step(1)
    reuse.computed(plan.program[2][0], 100)
    with pytest.raises(KeyError):
        reuse._at_hand((0, 0))
    with pytest.raises(KeyError):
        reuse._at_hand((0, 1))

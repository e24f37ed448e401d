"""The plan against the naive definition: replay both on integers and compare the stream at every step."""

from itertools import pairwise

from hypothesis import given

from blockcache.schedule import Schedule
from blockcache.schedule.plan import AddRun, Compute, compile_plan
from random_schedules import residual, schedules


def naive(schedule):
    cache, streams = {}, []
    for step in range(schedule.steps):
        stream = step
        for block, updates in enumerate(schedule.updates.values()):
            if step in updates:
                cache[block] = residual(block, step, stream)
            stream += cache[block]
        streams.append(stream)
    return streams


def replay(plan):
    """Execute a plan; reading what the plan says is gone is a KeyError."""
    cache, sums, streams = {}, {}, []

    def at_hand(run):
        return cache[run[0]] if run[0] == run[1] else sums[run]

    for step, operations in enumerate(plan.program):
        stream = step
        for operation in operations:
            if isinstance(operation, Compute):
                value = residual(operation.block, step, stream)
                cache.pop(operation.block, None)
                if operation.keep:
                    cache[operation.block] = value
            else:
                if operation.parts:
                    sums[operation.run] = sum(at_hand(run) for run in operation.parts)
                value = at_hand(operation.run)
            stream += value
        for run in plan.stale[step]:
            del sums[run]
        streams.append(stream)
    assert not sums  # every sum is given up in the end
    return streams


@given(schedules())
def test_replaying_a_plan_gives_what_the_schedule_means(schedule):
    assert replay(compile_plan(schedule)) == naive(schedule)


@given(schedules())
def test_computes_are_exactly_the_updates(schedule):
    plan = compile_plan(schedule)
    for step in range(schedule.steps):
        due = {schedule.blocks[place] for place in plan.due(step)}
        assert due == {name for name, updates in schedule.updates.items() if step in updates}


@given(schedules())
def test_neighbouring_cached_blocks_are_always_one_run(schedule):
    for operations in compile_plan(schedule).program:
        assert not any(isinstance(a, AddRun) and isinstance(b, AddRun) for a, b in pairwise(operations))


def test_a_sum_is_built_anew_exactly_when_a_member_changes():
    plan = compile_plan(Schedule(5, {"layers.0.SA": [0, 3], "layers.0.CA": [0], "layers.0.FFN": [0]}))
    both = (0, 2)
    assert plan.program[1] == (AddRun(both, parts=((0, 0), (1, 1), (2, 2))),)
    assert plan.program[2] == (AddRun(both, parts=()),)
    assert plan.program[3] == (Compute(0, keep=True), AddRun((1, 2), parts=((1, 1), (2, 2))))
    assert plan.program[4] == (AddRun(both, parts=((0, 0), (1, 2))),)  # out of the sum that step 3 left
    assert plan.stale == ((), (), (both,), (), (both, (1, 2)))


def test_a_residual_that_nobody_reuses_is_not_kept():
    plan = compile_plan(Schedule(3, {"layers.0.SA": [0, 1, 2]}))
    assert [operations[0].keep for operations in plan.program] == [False, False, False]


def test_description_names_blocks_and_runs():
    text = compile_plan(Schedule(4, {"layers.0.SA": [0, 3], "layers.0.FFN": [0]})).describe().splitlines()
    assert text[0] == "step   0: layers.0.SA layers.0.FFN"
    assert text[1] == "step   1: [layers.0.SA..layers.0.FFN]"
    assert text[2] == "step   2: [= layers.0.SA..layers.0.FFN]"
    assert text[3] == "step   3: layers.0.SA [layers.0.FFN]"

"""The plan against the naive definition: replay both on integers and compare the stream at every step."""

from hypothesis import given
from hypothesis import strategies as st

from blockcache.plan import AddRun, Compute, compile_plan
from blockcache.schedule import Schedule


@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 12))
    blocks = draw(st.integers(1, 7))
    rows = {
        f"layers.{index}.FFN": sorted({0, *draw(st.sets(st.integers(0, steps - 1)))}) for index in range(blocks)
    }
    return Schedule(steps, rows)


def residual(block, step, stream):
    """Differs with block, step and everything upstream, so that a stale or wrong value shows."""
    return (block + 2) * 1_000_003 + step * 101 + stream % 997


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
    cache, sums, streams = {}, {}, []
    for step, operations in enumerate(plan.program):
        stream = step
        for operation in operations:
            if isinstance(operation, Compute):
                value = residual(operation.block, step, stream)
                if operation.keep:
                    cache[operation.block] = value
                else:
                    cache.pop(operation.block, None)  # reading it later would be a KeyError
            else:
                run = (operation.first, operation.last)
                if operation.built == step:
                    sums[run] = sum(cache[block] for block in range(operation.first, operation.last + 1))
                value = sums[run]
                if operation.expires == step:
                    del sums[run]
            stream += value
        streams.append(stream)
    assert not sums  # every sum was given up at the step that the plan names
    return streams


@given(schedules())
def test_replaying_a_plan_gives_what_the_schedule_means(schedule):
    assert replay(compile_plan(schedule)) == naive(schedule)


@given(schedules())
def test_computes_are_exactly_the_updates(schedule):
    plan = compile_plan(schedule)
    for step in range(schedule.steps):
        assert plan.due(step) == {name for name, updates in schedule.updates.items() if step in updates}


@given(schedules())
def test_neighbouring_cached_blocks_are_always_one_run(schedule):
    for operations in compile_plan(schedule).program:
        assert not any(isinstance(a, AddRun) and isinstance(b, AddRun) for a, b in zip(operations, operations[1:]))


def test_a_sum_is_built_anew_exactly_when_a_member_changes():
    schedule = Schedule(5, {"layers.0.SA": [0, 3], "layers.0.FFN": [0]})
    plan = compile_plan(schedule)
    assert plan.program[1] == (AddRun(0, 1, built=1, expires=2),)
    assert plan.program[2] == (AddRun(0, 1, built=1, expires=2),)
    assert plan.program[3] == (Compute(0, keep=True), AddRun(1, 1, built=3, expires=3))
    assert plan.program[4] == (AddRun(0, 1, built=4, expires=4),)


def test_a_residual_that_nobody_reuses_is_not_kept():
    plan = compile_plan(Schedule(3, {"layers.0.SA": [0, 1, 2]}))
    assert [operations[0].keep for operations in plan.program] == [False, False, False]


def test_description_names_blocks_and_runs():
    text = compile_plan(Schedule(3, {"layers.0.SA": [0, 2], "layers.0.FFN": [0]})).describe().splitlines()
    assert text[0] == "step   0: layers.0.SA layers.0.FFN"
    assert text[1] == "step   1: [layers.0.SA..layers.0.FFN]"
    assert text[2] == "step   2: layers.0.SA [layers.0.FFN]"

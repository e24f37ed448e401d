"""Schedules of any kind, and residuals that are whole numbers, with which a plan is held against its definition."""

from hypothesis import strategies as st

from blockcache.schedule import Schedule


@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 12))
    blocks = draw(st.integers(1, 8))
    rows = {f"layers.{index}.FFN": sorted({0, *draw(st.sets(st.integers(0, steps - 1)))}) for index in range(blocks)}
    return Schedule(steps, rows)


def residual(block, step, stream):
    """Differs with block, step and everything upstream, so that a stale or wrong value shows."""
    return (block + 2) * 1_000_003 + step * 101 + stream % 997

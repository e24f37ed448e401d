"""What a camera's frames look like: channels first, bytes from 0 to 255 or fractions from 0 to 1. One sentence each for
those that do not. Knows nothing of numpy, torch, policies or engines: shapes and the range of the values come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockcache_runtime.errors import ObservationError
from blockcache_runtime.finite import check_input

BYTE = 255.0
SLACK = 0.1
"""How far a fraction may lie outside of 0 to 1: resizing with a cubic filter overshoots a little."""


def shown(shape: Sequence[object]) -> str:
    """A shape behind the batch, for a sentence."""
    return f"(batch, {', '.join(map(str, shape))})"


def check_frames(
    what: str,
    shape: tuple[int, ...],
    dtype: str,
    expected: tuple[int, ...],
    reach: Callable[[], tuple[float, float]],
) -> None:
    """Refuse what are no frames of the camera that is expected.

    what      the camera in a sentence, such as "the observation 'image'"
    shape     with the batch in front
    dtype     its name, such as "uint8" or "float32"
    expected  behind the batch: moments, channels, height, width
    reach     finds the smallest and the largest value; asked for fractions only
    """
    if len(shape) != 1 + len(expected) or shape[0] < 1 or tuple(shape[1:]) != expected:
        raise ObservationError(f"{what} has shape {tuple(shape)}, expected {shown(expected)}{_advice(shape, expected)}")
    if dtype == "uint8":
        return
    if "float" not in dtype:
        raise ObservationError(f"{what} holds {dtype}, expected uint8 from 0 to 255 or floats from 0 to 1")
    low, high = reach()
    check_input(max(abs(low), abs(high)) if low == low and high == high else float("nan"), what)
    if high > 1 + SLACK:
        raise ObservationError(
            f"{what} holds floats up to {high:g}, expected 0 to 1; divide by 255, or give the camera's own uint8"
        )
    if low < -SLACK:
        raise ObservationError(
            f"{what} holds floats down to {low:g}, expected 0 to 1; the policy normalises them by itself"
        )


def _advice(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    moments, channels, height, width = expected
    if tuple(shape[1:]) == (moments, height, width, channels):
        return ": channels come before height and width (numpy.moveaxis(frames, -1, -3))"
    if len(shape) == len(expected) and tuple(shape) == expected:
        return "; put the batch in front (frames[None])"
    if len(shape) == 1 + len(expected) and tuple(shape[1:3]) == (moments, channels):
        return f"; resize the frames to {height} x {width}"
    return ""

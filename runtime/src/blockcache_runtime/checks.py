"""Which observations, frames and noise a policy takes and which actions it may give: finite numbers within a limit.

One sentence for each that is refused. Looking at the action alone is not enough: a clip, a norm or a softmax turns infinity,
or a square that overflows, into a number that looks like an action. Knows nothing of torch, policies or engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockcache_runtime.errors import NonFiniteError, ObservationError

Array: TypeAlias = npt.NDArray[np.float32]

LIMIT = 1e18  # of observations, weights, actions, rows of the residual stream: beyond it a float32 square overflows
NOISE_LIMIT = 1e6  # it is standard normal: nothing that was drawn comes near
BYTE = 255.0
OVERSHOOT = 0.1  # how far a fraction may lie outside of 0 to 1: resizing with a cubic filter overshoots a little


def within(largest: float, limit: float = LIMIT) -> bool:
    """Whether numbers up to this magnitude are usable; NaN is not.

    Args:
        largest: The largest magnitude among the numbers, as `largest` finds it.
        limit: The largest magnitude that is accepted.
    """
    return largest <= limit


def beyond(largest: float, limit: float = LIMIT) -> str:
    """What is wrong with numbers that are not within the limit, as words of an error.

    Args:
        largest: The largest magnitude among the numbers; NaN if one of them is.
        limit: The magnitude that was exceeded.
    """
    return f"values beyond {limit:g}" if math.isfinite(largest) else "NaN or infinity"


def largest(array: npt.NDArray[Any]) -> float:
    """The largest magnitude; NaN if one of the values is.

    Args:
        array: Numbers of any shape; an empty array has 0.
    """
    return float(np.abs(array).max(initial=0.0))


def check_input(largest: float, what: str = "the observation") -> None:
    """Refuse an observation, or noise, that is not finite or absurdly large, and blame it alone.

    Args:
        largest: The largest magnitude among its numbers.
        what: What it is called in the error, such as "the observation 'state'"; "noise" has a limit of its own.
    """
    sensor = "check the sensor before asking for an action"
    limit, hint = (NOISE_LIMIT, "draw_noise makes it") if what == "noise" else (LIMIT, sensor)
    if not within(largest, limit):
        raise ObservationError(f"{what} holds {beyond(largest, limit)}; {hint}")


def check_generation(largest: float, observed: Callable[[], float]) -> None:
    """Refuse an action that came out of something that was not finite, or is itself no number.

    Args:
        largest: The largest magnitude of the action, and of everything on its way where an overflow shows.
        observed: Finds the observation's largest magnitude, so that a reader can tell what is to blame.
    """
    if not within(largest):
        raise NonFiniteError(
            f"no action is given, since the policy's numbers came to {beyond(largest)} on the way to it; the observation "
            f"reaches {observed():.3g}: check the sensor, or the policy's weights if that is as usual"
        )


def read_array(value: Any, what: str) -> Array:
    """Anything that numpy reads as numbers, as float32, contiguous; ObservationError for everything else.

    Args:
        value: An array, a list of numbers or a tensor on the CPU, of any shape.
        what: What it is called in an error; "noise" has a limit of its own.
    """
    array = _numbers(value, what)
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            array = np.asarray(array, dtype=np.float32, order="C")
    check_input(largest(array), what)
    return array


def read_generator(seed: int | None, generator: np.random.Generator | None) -> np.random.Generator:
    """Where noise is drawn from: numpy's generator, or a new one with that seed.

    Args:
        seed: Of a new generator; None for one that differs each time.
        generator: The generator to draw from, which then must be the only one of the two that is given.
    """
    if generator is None:
        try:
            return np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise ObservationError(f"a seed is a whole number, 0 or more, got {seed!r}") from error
    if seed is not None or not isinstance(generator, np.random.Generator):
        got = type(generator).__name__ if seed is None else f"both, with seed {seed!r}"
        raise ObservationError(f"noise is drawn from a seed or from a generator of numpy (default_rng), got {got}")
    return generator


def read_frames(value: Any, what: str, expected: tuple[int, ...]) -> Array:
    """A camera's frames, (batch, *expected), as float32 from 0 to 1: bytes of the camera, or that already.

    Args:
        value: The frames, uint8 from 0 to 255 or floats from 0 to 1.
        what: What they are called in an error.
        expected: The shape without the batch: moments, channels, height, width.
    """
    array = _numbers(value, what)
    check_frames(what, array.shape, str(array.dtype), expected, lambda: (float(array.min()), float(array.max())))
    frames = np.asarray(array, dtype=np.float32, order="C")
    return frames / np.float32(BYTE) if array.dtype == np.uint8 else frames


def read_observation(
    obs: Any, inputs: Mapping[str, tuple[int, ...]], cameras: Collection[str], outside: Mapping[str, str]
) -> dict[str, Array]:
    """A batch of observations by name, or a sentence saying what is wrong with it.

    Args:
        obs: Arrays by name, or the only one.
        inputs: What a policy takes: shapes by name, without the batch.
        cameras: Which of them are frames.
        outside: By name, how to come by inputs that are made outside of the policy.
    """
    given, observed = _by_name(obs, inputs, outside), {}
    for name, inner in inputs.items():
        what = _called(name, inputs)
        if name in cameras:
            observed[name] = read_frames(given[name], what, inner)
            continue
        observed[name] = array = read_array(given[name], what)
        if array.ndim < 1 or len(array) < 1 or array.shape[1:] != inner:
            raise ObservationError(f"{what} has shape {array.shape}, expected {shape_text(inner)}")
    found = {name: len(array) for name, array in observed.items()}
    if len({*found.values()}) > 1:
        raise ObservationError(f"the observation needs one batch size for all its keys, got {found}")
    return observed


def check_moment(
    obs: Any, inputs: Mapping[str, tuple[int, ...]], timeless: Collection[str], outside: Mapping[str, str]
) -> None:
    """Refuse one moment that does not have the names and shapes of a policy's inputs.

    Args:
        obs: Arrays by name, or the only one.
        inputs: See `read_observation`; the first size counts moments.
        timeless: Which of them have no moments.
        outside: See `read_observation`.
    """
    given = _by_name(obs, inputs, outside)
    for name, shape in inputs.items():
        what, expected = _called(name, inputs), shape if name in timeless else shape[1:]
        if (got := _numbers(given[name], what).shape) != expected:
            raise ObservationError(f"{what} has shape {got}, expected {expected} for one moment")


def _called(name: str, inputs: Collection[str]) -> str:
    return "the observation" if len(inputs) == 1 else f"the observation {name!r}"


def _by_name(obs: Any, inputs: Collection[str], outside: Mapping[str, str]) -> Mapping[str, Any]:
    if not isinstance(obs, Mapping):
        if len(inputs) != 1:
            names, got = ", ".join(inputs), type(obs).__name__
            raise ObservationError(f"the observation must be a mapping with the keys {names}, got {got}")
        return dict.fromkeys(inputs, obs)
    for name in inputs:
        if name not in obs:
            hint = f" ({outside[name]})" if name in outside else ""
            raise ObservationError(f"the observation has no key {name!r}{hint}, got {sorted(map(str, obs))}")
    return obs


def _numbers(value: Any, what: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)  # a torch tensor answers this too
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ObservationError(f"{what} is not an array of numbers: {reason}") from error
    if array.dtype.kind not in "fiub":
        raise ObservationError(f"{what} is not an array of numbers: its type is {array.dtype}")
    return array


def shape_text(shape: Sequence[object]) -> str:
    """A shape as errors show it, with the batch in front: (batch, 2, 7).

    Args:
        shape: The sizes without the batch.
    """
    return f"(batch, {', '.join(map(str, shape))})"


def check_frames(
    what: str,
    shape: tuple[int, ...],
    dtype: str,
    expected: tuple[int, ...],
    extremes: Callable[[], tuple[float, float]],
) -> None:
    """Refuse what are no frames of the camera that is expected: channels first, bytes, or fractions from 0 to 1.

    Args:
        what: The camera in a sentence, such as "the observation 'image'".
        shape: With the batch in front.
        dtype: Its name, such as "uint8" or "float32".
        expected: The shape behind the batch: moments, channels, height, width.
        extremes: Finds the smallest and the largest value; asked for fractions only.
    """
    if len(shape) != 1 + len(expected) or shape[0] < 1 or tuple(shape[1:]) != expected:
        advice = _shape_advice(tuple(shape), expected)
        raise ObservationError(f"{what} has shape {tuple(shape)}, expected {shape_text(expected)}{advice}")
    if dtype == "uint8":
        return
    if "float" not in dtype:
        raise ObservationError(f"{what} holds {dtype}, expected uint8 from 0 to 255 or floats from 0 to 1")
    low, high = extremes()
    check_input(max(abs(low), abs(high)) if low == low and high == high else math.nan, what)
    if high > 1 + OVERSHOOT:
        hint = "divide by 255, or give the camera's own uint8"
        raise ObservationError(f"{what} holds floats up to {high:g}, expected 0 to 1; {hint}")
    if low < -OVERSHOOT:
        hint = "the policy normalises them by itself"
        raise ObservationError(f"{what} holds floats down to {low:g}, expected 0 to 1; {hint}")


def _shape_advice(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    moments, channels, height, width = expected
    if shape[1:] == (moments, height, width, channels):
        return ": channels come before height and width (numpy.moveaxis(frames, -1, -3))"
    if shape == expected:
        return "; put the batch in front (frames[None])"
    if len(shape) == 1 + len(expected) and shape[1:3] == (moments, channels):
        return f"; resize the frames to {height} x {width}"
    return ""

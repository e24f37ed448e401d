"""An exported policy: observations in, actions out. Knows nothing of how ONNX Runtime is set up.

Its noise is one array (1 + draws, B, horizon, D): the start of the chunk first, then one for each step that draws, in the
order of execution. That is the order in which every blockcache policy draws, whatever library draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from blockcache_runtime.atomic import PathLike
from blockcache_runtime.checks import Array, check_generation, largest, read_array, read_frames, shape_text
from blockcache_runtime.chunks import PREVIOUS_CHUNK, TOLD, Previous
from blockcache_runtime.errors import ObservationError
from blockcache_runtime.session import EARLIER_FEATURES, RATE_HZ, Encoder, load_export, load_output, run_session


def open_export(path: PathLike, threads: int | None = None, rate_hz: float = RATE_HZ) -> ExportedPolicy:
    """Open a file that `blockcache export` wrote.

    Args:
        path: The file.
        threads: How many cores one generation may use; without it one and all of them are tried for up to two seconds, and
            the faster is taken.
        rate_hz: How many generations a second will be asked for: so often are they called when they are tried.
    """
    return ExportedPolicy(path, threads, rate_hz=rate_hz)


class ExportedPolicy:
    """A policy that needs numpy and onnxruntime only. Several threads may call it at once."""

    def __init__(
        self,
        path: PathLike,
        threads: int | None = None,
        data: bytes | None = None,
        remember: bool = True,
        rate_hz: float = RATE_HZ,
    ) -> None:
        """Open an export.

        Args:
            path: The file.
            threads: See `open_export`.
            data: The file's content, if that is at hand and need not be read.
            remember: Whether the features of frames are kept for the next call.
            rate_hz: See `open_export`.
        """
        self.path = Path(path)
        self._loaded = loaded = load_export(self.path, threads, data, rate_hz)
        self.threads = loaded.threads
        self.header: Mapping[str, Any] = loaded.header
        """What the file says of itself: schedule, origin, output, executed, fingerprint, what made it."""
        self.fingerprint = loaded.fingerprint
        start, stop = loaded.header["executed"]
        self.executed = start, stop
        """Of a whole chunk, the actions from the first to before the second are in `action`."""
        self._encoder = loaded.encoder
        self.cameras = () if loaded.encoder is None else loaded.encoder.cameras  # inputs that are frames
        self.sizes: dict[str, list[Any]] = _sizes(loaded.session.get_inputs(), loaded.encoder)
        """The shape of each input; the batch is the word "batch"."""
        self._previous, *_ = [self.sizes.pop(name, None) for name in TOLD]  # (batch, actions, A), or None
        self._outputs = {item.name: item.shape for item in loaded.session.get_outputs()}
        self._observed = [name for name in self.sizes if name != "noise"]
        self.n_obs_steps: int = self.sizes[self._observed[0]][1]  # observations that it looks at; see `History`
        _, self.n_action_steps, self.action_dim = self._outputs["action"]
        """How many actions are to be executed before the next chunk is asked for, and how many numbers each of them has."""
        self.horizon: int = self.sizes["noise"][2]  # the length of a whole chunk
        self._memory = _FeatureMemory(loaded.encoder.features) if loaded.encoder is not None and remember else None

    def predict_action(
        self,
        obs: Any,
        *,
        seed: int | None = None,
        generator: np.random.Generator | None = None,
        noise: Any = None,
        previous: Previous | None = None,
    ) -> dict[str, Array]:
        """One generation: action (B, n_action_steps, A) and, from an export of whole chunks, action_pred (B, horizon, A).

        Frames that were part of the last call are not encoded again.

        Args:
            obs: (B, n_obs_steps, ...) in robot units, bare or by the input's name; several inputs need the names.
            seed: Noise is drawn from a new generator: always the same with a seed, another one each time without.
            generator: Noise is drawn from this one, which goes on from call to call.
            noise: The noise itself, as `draw_noise` gives it.
            previous: The chunk before, for the new one to go on from it, if the file was exported with `--rtc`.
        """
        observed = self.check_observation(obs)
        if noise is None:
            noise = self.draw_noise(_batch(observed), _generator(seed, generator))
        return self.run(observed, noise, previous)

    def encode_frames(self, obs: Any) -> None:
        """Encode an observation's frames now, while the robot executes its actions: the next `predict_action` need not.

        Args:
            obs: As `predict_action` takes it, such as a `History` gives it; without cameras nothing is done.
        """
        observed = self.check_observation(obs)
        if self._memory is not None:
            frames = self._by_moment(observed)
            if len(earlier := self._memory.recall(frames)) < self.n_obs_steps:
                self._memory.store(frames, self.features(observed, earlier))

    def features(self, observed: Mapping[str, Array], earlier: Array | None = None) -> Array:
        """What the encoder makes of all moments, (n_obs_steps, B, features), and nothing else is computed.

        Args:
            observed: What `check_observation` returned.
            earlier: Features of the first moments, which are not encoded again.
        """
        feed = self._frames_to_encode(self._by_moment(observed), earlier)
        (features,) = run_session(self._encoder_session, ["features"], feed)
        check_generation(largest(features), lambda: max(map(largest, observed.values())))
        return features  # type: ignore[no-any-return]

    @cached_property
    def _encoder_session(self) -> Any:
        """The encoder alone; made of the file when it is first needed."""
        return load_output(self.path, self._loaded, "features")

    def draw_noise(self, batch: int, generator: np.random.Generator | None = None) -> Array:
        """The noise of one generation, (1 + draws, B, horizon, D); from a new generator if none is given."""
        return _generator(None, generator).standard_normal(self._noise_shape(batch), dtype=np.float32)

    def check_observation(self, obs: Any) -> dict[str, Array]:
        """The observation as `run` takes it, or a sentence saying what is wrong with it."""
        alone = len(self._observed) == 1
        if not isinstance(obs, Mapping):
            if not alone:
                names, got = ", ".join(self._observed), type(obs).__name__
                raise ObservationError(f"the observation must be a mapping with the keys {names}, got {got}")
            obs = {self._observed[0]: obs}
        observed = {}
        for name in self._observed:
            if name not in obs:
                what = self.header.get("outside", {}).get(name, "")
                hint = f" ({what})" if what else ""
                raise ObservationError(f"the observation has no key {name!r}{hint}, got {sorted(map(str, obs))}")
            what = "the observation" if alone else f"the observation {name!r}"
            inner = tuple(self.sizes[name][1:])
            if name in self.cameras:
                observed[name] = read_frames(obs[name], what, inner)
                continue
            observed[name] = array = read_array(obs[name], what)
            if array.ndim < 1 or len(array) < 1 or array.shape[1:] != inner:
                raise ObservationError(f"{what} has shape {array.shape}, expected {shape_text(inner)}")
        found = {name: len(array) for name, array in observed.items()}
        if len({*found.values()}) > 1:
            raise ObservationError(f"the observation needs one batch size for all its keys, got {found}")
        return observed

    def run(self, observed: Mapping[str, Array], noise: Any, previous: Previous | None = None) -> dict[str, Array]:
        """One generation of what `check_observation` returned, with noise (1 + draws, B, horizon, D)."""
        drawn = read_array(noise, "noise")
        expected = self._noise_shape(_batch(observed))
        if drawn.shape != expected:
            raise ObservationError(f"noise has shape {drawn.shape}, expected {expected}; draw_noise makes it")
        return self.run_checked({**observed, **self._told(previous, expected[1])}, drawn)

    def due_actions(self, found: Mapping[str, Array]) -> Array:
        """Of what `predict_action` returned, the actions from the first that is due on, (B, n, A): those that are to be
        executed, and where the export gives whole chunks, what comes behind them."""
        whole = found.get("action_pred")
        return found["action"] if whole is None else whole[:, self.executed[0] :]

    def run_checked(self, observed: Mapping[str, Array], noise: Array) -> dict[str, Array]:
        """The same for noise that was checked too."""
        if self.takes_previous and PREVIOUS_CHUNK not in observed:
            observed = {**observed, **self._told(None, noise.shape[1])}
        frames = self._by_moment(observed)
        earlier = None if self._memory is None else self._memory.recall(frames)
        feed = {**observed, **self._frames_to_encode(frames, earlier), "noise": noise}
        outputs = [*self._outputs]
        found = dict(zip(outputs, run_session(self._loaded.session, outputs, feed), strict=True))
        # of the actions, and of rows on their way: no clip hides an overflow
        reached, features = float(found.pop("norms")[0]), found.pop("features", None)
        if features is not None:
            reached = float(np.maximum(reached, largest(features)))
        check_generation(reached, lambda: max(map(largest, observed.values())))
        if self._memory is not None and features is not None:
            self._memory.store(frames, features)
        return found

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """What it observes: shapes by name, without the batch."""
        return {name: tuple(self.sizes[name][1:]) for name in self._observed}

    @property
    def takes_previous(self) -> bool:
        """Whether it can be told of the chunk before (real-time chunking)."""
        return self._previous is not None

    def _told(self, previous: Previous | None, batch: int) -> dict[str, Array]:
        if self._previous is not None:
            _, actions, size = self._previous
            return (previous or Previous(np.zeros((1, size)), 0)).inputs(batch, actions, size)
        if previous is not None:
            raise ObservationError(f"{self.path} takes no previous chunk; export it with --rtc")
        return {}

    def _by_moment(self, observed: Mapping[str, Array]) -> dict[str, Array]:
        """By camera, the moments before the batch."""
        return {name: np.ascontiguousarray(observed[name].swapaxes(0, 1)) for name in self.cameras}

    def _frames_to_encode(self, frames: Mapping[str, Array], earlier: Array | None) -> dict[str, Array]:
        """As the graph takes them: features of the first moments, where these are known, and frames of the others."""
        if self._encoder is None:
            return {}
        if earlier is None:
            earlier = np.zeros((0, _batch(frames, 1), self._encoder.features), dtype=np.float32)
        return {**{name: array[len(earlier) :] for name, array in frames.items()}, EARLIER_FEATURES: earlier}

    def _noise_shape(self, batch: int) -> tuple[int, ...]:
        return tuple(batch if size == "batch" else size for size in self.sizes["noise"])


class _FeatureMemory:
    """Features of the frames of the last call, so that no frame is encoded twice.

    Features of a moment depend on its frames alone, and frames are recognised by their every number; so the action is the
    same to the last bit as if all had been encoded anew. Several threads may ask at once; each call's are stored as a whole.
    """

    def __init__(self, features: int) -> None:
        self._size = features
        self._moments: tuple[tuple[dict[str, Array], Array], ...] = ()  # frames of one moment, and their features

    def recall(self, frames: Mapping[str, Array]) -> Array:
        """Features (recalled, batch, features) of the first moments, as many in a row as were in the last call.

        Args:
            frames: By camera, (moments, batch, channels, height, width).
        """
        first, moments = next(iter(frames.values())), self._moments
        found: list[Array] = []
        for moment in range(len(first)):
            for stored, features in moments:
                if all(np.array_equal(stored[name], array[moment]) for name, array in frames.items()):
                    found.append(features)
                    break
            else:
                break
        return np.stack(found) if found else np.zeros((0, first.shape[1], self._size), dtype=np.float32)

    def store(self, frames: Mapping[str, Array], features: Array) -> None:
        """Remember a call: its frames, which are copied, and the features of all of its moments."""
        self._moments = tuple(
            ({name: array[moment].copy() for name, array in frames.items()}, one) for moment, one in enumerate(features)
        )


def _sizes(inputs: Any, encoder: Encoder | None) -> dict[str, list[Any]]:
    """What `predict_action` takes: of frames all moments, behind the batch, and no features."""
    sizes = {item.name: item.shape for item in inputs}
    if encoder is not None:
        del sizes[EARLIER_FEATURES]
        sizes |= {name: ["batch", encoder.n_obs_steps, *sizes[name][2:]] for name in encoder.cameras}
    return sizes


def _batch(observed: Mapping[str, Array], axis: int = 0) -> int:
    return int(next(iter(observed.values())).shape[axis])


def _generator(seed: int | None, generator: np.random.Generator | None) -> np.random.Generator:
    if generator is None:
        try:
            return np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise ObservationError(f"a seed is a whole number, 0 or more, got {seed!r}") from error
    if seed is not None or not isinstance(generator, np.random.Generator):
        got = type(generator).__name__ if seed is None else f"both, with seed {seed!r}"
        raise ObservationError(f"noise is drawn from a seed or from a generator of numpy (default_rng), got {got}")
    return generator

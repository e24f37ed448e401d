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

from blockcache_runtime.arrays import Array, largest, read_array, read_frames
from blockcache_runtime.errors import ObservationError
from blockcache_runtime.files import PathLike
from blockcache_runtime.finite import check_generation
from blockcache_runtime.session import KEPT, Encoder, open_file, open_part, run_session
from blockcache_runtime.sight import Sight


def open_export(path: PathLike, threads: int | None = None) -> ExportedPolicy:
    """Open a file that `blockcache export` wrote.

    `threads`: how many cores one generation may use; without it one and all of them are tried, and the faster is taken.
    """
    return ExportedPolicy(path, threads)


class ExportedPolicy:
    """A policy that needs numpy and onnxruntime only. Several threads may call it at once."""

    def __init__(
        self, path: PathLike, threads: int | None = None, data: bytes | None = None, remember: bool = True
    ) -> None:
        """The arguments of `open_export`; `data`, the file's content, if that is at hand and need not be read; and whether
        to `remember` what frames showed."""
        self.path = Path(path)
        self._opened = opened = open_file(self.path, threads, data)
        self._session = opened.session
        self.threads = opened.threads
        self.header: Mapping[str, Any] = opened.header
        """What the file says of itself: schedule, origin, output, executed, fingerprint, what made it."""
        self.fingerprint = opened.fingerprint
        self.executed = opened.executed
        """Of a whole chunk, the actions from the first number to before the second are those in `action`."""
        self._encoder = opened.encoder
        self.cameras: tuple[str, ...] = () if opened.encoder is None else opened.encoder.cameras
        """Which of the inputs are frames: uint8, or floats from 0 to 1."""
        self.sizes: dict[str, list[Any]] = _sizes(self._session.get_inputs(), opened.encoder)
        """The shape of each input; the batch is the word "batch"."""
        self._outputs = {item.name: item.shape for item in self._session.get_outputs()}
        self._observed = [name for name in self.sizes if name != "noise"]
        self._sight = Sight(opened.encoder.features) if opened.encoder is not None and remember else None

    @property
    def n_obs_steps(self) -> int:
        """How many observations it looks at; see `History`."""
        return int(self.sizes[self._observed[0]][1])

    @property
    def n_action_steps(self) -> int:
        """How many actions of a chunk are to be executed before the next one is asked for."""
        return int(self._outputs["action"][1])

    @property
    def action_dim(self) -> int:
        return int(self._outputs["action"][2])

    @property
    def horizon(self) -> int:
        """The length of a whole chunk."""
        return int(self.sizes["noise"][2])

    def predict_action(
        self,
        obs: Any,
        *,
        seed: int | None = None,
        generator: np.random.Generator | None = None,
        noise: Any = None,
    ) -> dict[str, Array]:
        """One generation: action (B, n_action_steps, A) and, from an export of whole chunks, action_pred (B, horizon, A).

        `obs`: (B, n_obs_steps, ...) in robot units, bare or by the input's name; a policy with several inputs needs the
        names. Frames that were part of the last call are not encoded again. Noise is `noise` if given, else it is drawn
        from `generator`, else from a new one: always the same with `seed`, another one each time without.
        """
        observed = self.check_observation(obs)
        if noise is None:
            noise = self.draw_noise(_batch(observed), _generator(seed, generator))
        return self.run(observed, noise)

    def look(self, obs: Any) -> None:
        """Encode an observation's frames now, while the robot executes its actions: the next `predict_action` that is given
        them need not. `obs` is as `predict_action` takes it, such as a `History` gives it; without cameras nothing is done.
        """
        observed = self.check_observation(obs)
        if self._sight is not None:
            frames = self._by_moment(observed)
            if len(known := self._sight.known(frames)) < self.n_obs_steps:
                self._sight.keep(frames, self.features(observed, known))

    def features(self, observed: Mapping[str, Array], known: Array | None = None) -> Array:
        """What all moments of what `check_observation` returned show, (n_obs_steps, B, features), and nothing else is
        computed. `known` are those of the first moments, which are not looked at again."""
        feed = self._unseen(self._by_moment(observed), known)
        (features,) = run_session(self._encoding, ["features"], feed)
        check_generation(largest(features), lambda: max(map(largest, observed.values())))
        return features  # type: ignore[no-any-return]

    @cached_property
    def _encoding(self) -> Any:
        """The encoder alone; made of the file when it is first needed."""
        return open_part(self.path, self._opened, "features")

    def draw_noise(self, batch: int, generator: np.random.Generator | None = None) -> Array:
        """The noise of one generation, (1 + draws, B, horizon, D); from a new generator if none is given."""
        return _generator(None, generator).standard_normal(self._noise_shape(batch), dtype=np.float32)

    def check_observation(self, obs: Any) -> dict[str, Array]:
        """The observation as `run` takes it, or a sentence saying what is wrong with it."""
        alone = len(self._observed) == 1
        if not isinstance(obs, Mapping):
            if not alone:
                raise ObservationError(
                    f"the observation must be a mapping with the keys {', '.join(self._observed)}, "
                    f"got {type(obs).__name__}"
                )
            obs = {self._observed[0]: obs}
        observed = {}
        for name in self._observed:
            if name not in obs:
                raise ObservationError(f"the observation has no key {name!r}, got {sorted(map(str, obs))}")
            what = "the observation" if alone else f"the observation {name!r}"
            inner = self.sizes[name][1:]
            if name in self.cameras:
                observed[name] = read_frames(obs[name], what, tuple(inner))
                continue
            array = read_array(obs[name], what)
            if array.ndim < 1 or len(array) < 1 or list(array.shape[1:]) != inner:
                raise ObservationError(
                    f"{what} has shape {array.shape}, expected ({', '.join(map(str, ['batch', *inner]))})"
                )
            observed[name] = array
        if len({len(array) for array in observed.values()}) > 1:
            found = {name: len(array) for name, array in observed.items()}
            raise ObservationError(f"the observation needs one batch size for all its keys, got {found}")
        return observed

    def run(self, observed: Mapping[str, Array], noise: Any) -> dict[str, Array]:
        """One generation of what `check_observation` returned, with noise (1 + draws, B, horizon, D)."""
        drawn = read_array(noise, "noise")
        expected = self._noise_shape(_batch(observed))
        if drawn.shape != expected:
            raise ObservationError(f"noise has shape {drawn.shape}, expected {expected}; draw_noise makes it")
        return self.run_checked(observed, drawn)

    def run_checked(self, observed: Mapping[str, Array], noise: Array) -> dict[str, Array]:
        """The same for noise that was checked too."""
        frames = self._by_moment(observed)
        known = None if self._sight is None else self._sight.known(frames)
        feed = {**observed, **self._unseen(frames, known), "noise": noise}
        found = dict(zip(self._outputs, run_session(self._session, [*self._outputs], feed), strict=True))
        # of the actions, and of rows on their way: no clip hides an overflow from us
        reached, features = float(found.pop("norms")[0]), found.pop("features", None)
        if features is not None:
            reached = float(np.maximum(reached, largest(features)))
        check_generation(reached, lambda: max(map(largest, observed.values())))
        if self._sight is not None and features is not None:
            self._sight.keep(frames, features)
        return found

    def _by_moment(self, observed: Mapping[str, Array]) -> dict[str, Array]:
        """By camera, the moments before the batch."""
        return {name: np.ascontiguousarray(observed[name].swapaxes(0, 1)) for name in self.cameras}

    def _unseen(self, frames: Mapping[str, Array], known: Array | None) -> dict[str, Array]:
        """Frames by moment as the graph takes them: features of the first moments, where these are known, and the others."""
        if self._encoder is None:
            return {}
        if known is None:
            known = np.zeros((0, _batch(frames, 1), self._encoder.features), dtype=np.float32)
        return {**{name: array[len(known) :] for name, array in frames.items()}, KEPT: known}

    def _noise_shape(self, batch: int) -> tuple[int, ...]:
        return tuple(batch if size == "batch" else size for size in self.sizes["noise"])


def _sizes(inputs: Any, encoder: Encoder | None) -> dict[str, list[Any]]:
    """What `predict_action` takes: of frames all moments, behind the batch, and no features."""
    sizes = {item.name: item.shape for item in inputs}
    if encoder is None:
        return sizes
    del sizes[KEPT]
    return {
        name: ["batch", encoder.n_obs_steps, *shape[2:]] if name in encoder.cameras else shape
        for name, shape in sizes.items()
    }


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

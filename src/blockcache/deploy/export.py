"""An exported policy: observations in, actions out. Knows nothing of how ONNX Runtime is set up.

Its noise is one array (1 + draws, B, horizon, D): the start of the chunk first, then one for each step that draws, in the
order of execution. That is the order in which every blockcache policy draws, whatever library draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blockcache.deploy.arrays import Array, largest, read_array
from blockcache.deploy.session import open_file, run_session
from blockcache.errors import ObservationError
from blockcache.files import PathLike
from blockcache.finite import check_generation


def open_export(path: PathLike, threads: int | None = None) -> ExportedPolicy:
    """Open a file that `blockcache export` wrote.

    `threads`: how many cores one generation may use; without it one and all of them are tried, and the faster is taken.
    """
    return ExportedPolicy(path, threads)


class ExportedPolicy:
    """A policy that needs numpy and onnxruntime only. Several threads may call it at once."""

    def __init__(self, path: PathLike, threads: int | None = None, data: bytes | None = None) -> None:
        """The arguments of `open_export`; and `data`, the file's content, if that is at hand and need not be read."""
        self.path = Path(path)
        opened = open_file(self.path, threads, data)
        self._session = opened.session
        self.threads = opened.threads
        self.header: Mapping[str, Any] = opened.header
        """What the file says of itself: schedule, origin, output, executed, fingerprint, what made it."""
        self.fingerprint = opened.fingerprint
        self.executed = opened.executed
        """Of a whole chunk, the actions from the first number to before the second are those in `action`."""
        self.sizes: dict[str, list[Any]] = {item.name: item.shape for item in self._session.get_inputs()}
        """The shape of each input; the batch is the word "batch"."""
        self._outputs = {item.name: item.shape for item in self._session.get_outputs()}
        self._observed = [name for name in self.sizes if name != "noise"]

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
        names. Noise is `noise` if given, else it is drawn from `generator`, else from a new one: always the same with
        `seed`, another one each time without.
        """
        observed = self.check_observation(obs)
        if noise is None:
            noise = self.draw_noise(_batch(observed), _generator(seed, generator))
        return self.run(observed, noise)

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
            array, inner = read_array(obs[name], what), self.sizes[name][1:]
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
        arrays = run_session(self._session, [*self._outputs], {**observed, "noise": noise})
        found = dict(zip(self._outputs, arrays, strict=True))
        # of the actions, and of rows on their way: no clip hides an overflow from us
        check_generation(float(found.pop("norms")[0]), lambda: max(map(largest, observed.values())))
        return found

    def _noise_shape(self, batch: int) -> tuple[int, ...]:
        return tuple(batch if size == "batch" else size for size in self.sizes["noise"])


def _batch(observed: Mapping[str, Array]) -> int:
    return len(next(iter(observed.values())))


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

"""What a server serves, and what one client has shown it. Knows nothing of protocols and sockets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from blockcache_runtime.checks import Array, check_frames, read_array
from blockcache_runtime.errors import ObservationError, shortened
from blockcache_runtime.export import ExportedPolicy
from blockcache_runtime.guard import Judgement
from blockcache_runtime.history import History, timeless_inputs

Moment = Mapping[str, npt.NDArray[Any]]


class ServedPolicy(Protocol):
    """A policy as the server calls it, from one thread."""

    name: str
    n_obs_steps: int
    n_action_steps: int
    action_dim: int
    batches: bool
    """Whether several observations may be answered at once."""
    outside: Mapping[str, str]
    """By name, inputs that are made outside of the policy, and how to come by them."""

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name, without the batch; where the first size is `n_obs_steps`, it counts moments."""

    @property
    def cameras(self) -> Collection[str]:
        """Which of them are frames."""

    def predict(self, observations: Sequence[Moment], generators: Sequence[np.random.Generator]) -> list[Array]:
        """One chunk (at least n_action_steps, action_dim) for each batch of one; noise from the generator beside it."""


class ServedExport:
    """An exported policy for a server."""

    batches = True

    def __init__(self, policy: ExportedPolicy) -> None:
        """Serve it.

        Args:
            policy: What `open_export` gave.
        """
        self._policy = policy
        self.name, self.cameras = policy.path.name, frozenset(policy.cameras)
        self.inputs, self.outside = policy.inputs, policy.outside
        self.n_obs_steps, self.action_dim = policy.n_obs_steps, policy.action_dim
        self.n_action_steps = policy.n_action_steps
        policy.warm_up(encoder=False)  # no frame is encoded ahead

    def predict(
        self,
        observations: Sequence[Moment],
        generators: Sequence[np.random.Generator],
        judged: Judgement | None = None,
    ) -> list[Array]:
        """See `ServedPolicy`. Of a whole chunk, what is behind the executed actions is sent too."""
        policy, observed = self._policy, self._batch(observations)
        noise = np.concatenate([policy.draw_noise(1, generator) for generator in generators], axis=1)
        if judged is None:
            return [*policy.due_actions(policy.run(observed, noise))]
        return [*policy.due_actions(policy.answer(observed, noise, generators, judged))]

    def judge(self, observations: Sequence[Moment], recent: Sequence[dict[bytes, None]]) -> Judgement | None:
        """What the export's guard finds, if it has one; `recent` is what each client showed before."""
        return None if self._policy.watch is None else self._policy.watch.judge(self._batch(observations), recent)

    def _batch(self, observations: Sequence[Moment]) -> dict[str, Array]:
        return self._policy.check_observation(
            {name: np.concatenate([one[name] for one in observations]) for name in self.inputs}
        )


class ClientState:
    """One client's history and noise. An observation that is refused leaves both as they were."""

    def __init__(self, policy: ServedPolicy, renamed: Mapping[str, str]) -> None:
        """Begin with nothing.

        Args:
            policy: Says what an observation looks like.
            renamed: Names of the policy's inputs by the names that the client has for them.
        """
        self._policy, self._renamed = policy, renamed
        self._timeless = timeless_inputs(policy.inputs, policy.n_obs_steps, policy.outside)
        self._history = History(policy.n_obs_steps, self._timeless)
        self.generator = np.random.default_rng()
        self.episode = 0
        self.recent: dict[bytes, None] = {}  # what a guard remembers of this client

    def begun(self, seed: int | None = None) -> ClientState:
        """The same client at the start of another episode.

        Args:
            seed: Its noise is drawn from a generator with this seed, one chunk after the other.
        """
        state = ClientState(self._policy, self._renamed)
        state.generator, state.episode = np.random.default_rng(seed), self.episode + 1
        return state

    def observe(self, given: Mapping[str, Any]) -> Moment:
        """The last moments as a batch of one, with this one at the end.

        Args:
            given: By name, one moment of each input, or all `n_obs_steps` of them, which then replace what was seen
                before; names within maps are joined by "/".
        """
        named = self._named(given)
        steps, inputs, cameras = self._policy.n_obs_steps, self._policy.inputs, self._policy.cameras
        timeless = self._timeless
        now = {name: _fitted(named[name], name, inputs[name], name in cameras, name in timeless) for name in inputs}
        whole = [name for name in inputs if name not in timeless and now[name].ndim == len(inputs[name])]
        if whole and len(whole) + len(timeless) < len(inputs):
            raise ObservationError(f"the observation has all moments of {whole} and one of the others; send either")
        if whole:
            self._history.reset()
        for moment in range(steps if whole else 1):
            seen: Moment = self._history.push(
                {name: array[moment] if name in whole else array for name, array in now.items()}
            )
        return seen

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was sent, by the policy's names."""
        items = [(self._renamed.get(name, name), value) for name, value in _flat(given)]
        flat, inputs = dict(items), self._policy.inputs
        if len(flat) < len(items):
            raise ObservationError("the observation has two values under one name")
        if missing := [name for name in inputs if name not in flat]:
            got = shortened(", ".join(flat), 200) or "nothing"
            made = self._policy.outside.get(missing[0])
            hint = f" ({made}; or start the server with --fixed FILE.npz)" if made else ""
            raise ObservationError(
                f"the observation has no {missing[0]!r}{hint}, expected {', '.join(inputs)}, got {got}; send it under that "
                "name, or start the server with --rename THEIRS=OURS"
            )
        return flat


def _flat(given: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in given.items():
        inner = isinstance(value, Mapping) and before.count("/") < 4
        found += _flat(value, f"{before}{name}/") if inner else [(f"{before}{name}", value)]
    return found


def _fitted(value: Any, name: str, shape: tuple[int, ...], camera: bool, timeless: bool) -> npt.NDArray[Any]:
    """One moment, or all of them, as numbers of the shape that the policy takes."""
    what = f"the observation {name!r}"
    if isinstance(value, str | bytes | Mapping):
        raise ObservationError(f"{what} is a {type(value).__name__}, expected an array")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ObservationError(f"{what} is not an array of numbers: {error}") from error
    wanted = [shape] if timeless else [shape[1:], shape]
    if camera and array.shape not in wanted and array.ndim >= 3:
        array = np.moveaxis(array, -1, -3)  # height, width, channels, as most cameras have it
    if array.shape not in wanted:
        expected = " or ".join(str(size) for size in wanted)
        raise ObservationError(f"{what} has shape {np.shape(value)}, expected {expected}")
    if camera:
        batch = array.reshape(1, -1, *shape[1:])
        extremes = (float(array.min()), float(array.max())) if array.dtype.kind == "f" else (0.0, 0.0)
        check_frames(what, batch.shape, str(array.dtype), batch.shape[1:], lambda: extremes)
        return array
    return read_array(array, what)

"""An exported policy: observations in, actions out. Knows nothing of how ONNX Runtime is set up.

Its noise is one array (1 + draws, B, horizon, D): the start of the chunk first, then one for each step that draws, in the
order of execution. That is the order in which every blockcache policy draws, whatever library draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from blockcache_runtime.atomic import PathLike
from blockcache_runtime.checks import (
    Array,
    check_generation,
    check_moment,
    largest,
    read_array,
    read_generator,
    read_observation,
)
from blockcache_runtime.chunks import PREVIOUS_CHUNK, TOLD, Previous
from blockcache_runtime.errors import ObservationError
from blockcache_runtime.guard import GuardWatch, Judgement
from blockcache_runtime.history import FeatureMemory, timeless_inputs
from blockcache_runtime.parity import TOLERANCE, Parity, check_at_start
from blockcache_runtime.providers import Provider, run_session
from blockcache_runtime.session import EARLIER_FEATURES, FORMAT, IN_FULL, RATE_HZ, load_export, load_output


def open_export(
    path: PathLike,
    threads: int | None = None,
    rate_hz: float = RATE_HZ,
    providers: Sequence[Provider] = (),
    tolerance: float = TOLERANCE,
    fixed: Mapping[str, Any] | None = None,
) -> ExportedPolicy:
    """Open a file that `blockcache export` wrote.

    Args:
        path: The file.
        threads: How many cores one generation may use; without it one and all of them are tried for up to two seconds when
            a file is first opened on a machine, and what was faster is kept in the user's cache directory.
        rate_hz: How many generations a second will be asked for: so often are they called when they are tried.
        providers: Execution providers of ONNX Runtime, in order of preference; none for the CPU. With them the export's
            actions are compared at once with recorded ones (a reference beside the file) or with the CPU's, and refused if
            they differ; `policy.parity` keeps the figures, `policy.nodes` which provider runs how many nodes.
        tolerance: The largest difference that is accepted then, where actions have the range -1 to 1.
        fixed: See `ExportedPolicy.fix`.
    """
    policy = ExportedPolicy(path, threads, rate_hz=rate_hz, providers=providers)
    if providers:
        policy.parity = check_at_start(policy, lambda: ExportedPolicy(path, 1), tolerance)
    policy.fix(fixed or {})
    return policy


class ExportedPolicy:
    """A policy that needs numpy and onnxruntime only. Several threads may call it at once."""

    def __init__(
        self,
        path: PathLike,
        threads: int | None = None,
        data: bytes | None = None,
        remember: bool = True,
        rate_hz: float = RATE_HZ,
        providers: Sequence[Provider] = (),
    ) -> None:
        """Open an export.

        Args:
            path: The file.
            threads: See `open_export`.
            data: The file's content, if that is at hand and need not be read.
            remember: Whether the features of frames are kept for the next call.
            rate_hz: See `open_export`.
            providers: See `open_export`; nothing is compared here.
        """
        self.path = Path(path)
        self._loaded = loaded = load_export(self.path, threads, data, rate_hz, providers)
        self.threads, self.nodes = loaded.threads, loaded.nodes
        self.parity: Parity | None = None
        """What was compared when it was opened with providers."""
        self.header: Mapping[str, Any] = loaded.header
        """What the file says of itself: schedule, origin, output, executed, fingerprint, what made it."""
        self.fingerprint = loaded.fingerprint
        start, stop = loaded.header["executed"]
        self.executed = start, stop
        """Of a whole chunk, the actions from the first to before the second are in `action`."""
        self._encoder = loaded.encoder
        self.cameras = () if loaded.encoder is None else loaded.encoder.cameras  # inputs that are frames
        self.sizes: dict[str, list[Any]] = loaded.sizes
        """The shape of each input; the batch is the word "batch"."""
        self._previous, *_ = [self.sizes.pop(name, None) for name in TOLD]  # (batch, actions, A), or None
        self._outputs = {item.name: item.shape for item in loaded.session.get_outputs()}
        self._observed = [name for name in self.sizes if name != "noise"]
        self.n_obs_steps: int = self.sizes[self._observed[0]][1]  # observations that it looks at; see `History`
        self.outside: Mapping[str, str] = loaded.header.get("outside", {})
        """By name, inputs that a part of the policy makes which is not in the file, and how to come by them."""
        self.timeless = timeless_inputs(self.inputs, self.n_obs_steps, self.outside)
        """Inputs that have no moments: `History` takes these names."""
        self._fixed: dict[str, Array] = {}
        _, self.n_action_steps, self.action_dim = self._outputs["action"]
        """How many actions are to be executed before the next chunk is asked for, and how many numbers each of them has."""
        self.horizon: int = self.sizes["noise"][2]  # the length of a whole chunk
        self._memory = FeatureMemory(loaded.encoder.features) if loaded.encoder is not None and remember else None
        guard = loaded.header.get("guard")
        self.watch = None if guard is None else GuardWatch(guard)
        """Counts observations unlike those of the calibration, of an export with a guard; see `guard`."""
        if guard is not None:
            with FORMAT.reading(self.path):
                guard.check_inputs(self.inputs)

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

        Frames that were part of the last call are not encoded again. With a guard also guard_score and guard_repeated (B,);
        where it says "full", what is outside (a score above 1) is answered in full precision.

        Args:
            obs: (B, n_obs_steps, ...) in robot units, bare or by the input's name; several inputs need the names.
            seed: Noise is drawn from a new generator: always the same with a seed, another one each time without.
            generator: Noise is drawn from this one, which goes on from call to call.
            noise: The noise itself, as `draw_noise` gives it; what full precision needs beyond it is drawn.
            previous: The chunk before, for the new one to go on from it, if the file was exported with `--rtc`.
        """
        observed = self.check_observation(obs)
        batch, drawing = _batch(observed), read_generator(seed, generator)
        if noise is None:
            noise = self.draw_noise(batch, drawing)
        if self.watch is None:
            return self.run(observed, noise, previous)
        judged = self.watch.judge(observed)
        return {**self.answer(observed, noise, [drawing] * batch, judged, previous), **judged.arrays()}

    def answer(
        self,
        observed: Mapping[str, Array],
        noise: Any,
        generators: Sequence[np.random.Generator],
        judged: Judgement,
        previous: Previous | None = None,
    ) -> dict[str, Array]:
        """One generation of what the guard has judged: what is outside in full precision, if that is the guard's action.

        Args:
            observed: What `check_observation` returned.
            noise: As `draw_noise` gives it; full precision begins with the same.
            generators: One for each of the batch: what full precision draws beyond that noise is drawn from it.
            judged: What the guard found.
            previous: See `predict_action`.
        """
        places = np.flatnonzero(judged.outside).tolist() if self.falls_back else []
        found = self.run(observed, noise, previous) if len(places) < len(generators) else {}
        if not places:
            return found
        known = {**observed, **self._told(previous, len(generators))}
        given = self._check_noise(noise, len(generators))[:, places]
        count, _, *chunk = self._noise_shape(1, full=True)
        more = [generators[at].standard_normal((count, 1, *chunk), dtype=np.float32)[len(given) :] for at in places]
        drawn = np.concatenate([given[:count], np.concatenate(more, axis=1)])
        full = self.run_checked({name: array[places] for name, array in known.items()}, drawn, full=True)
        for name, rows in full.items() if found else ():
            found[name][places] = rows
        return found or full

    def warm_up(self, encoder: bool = True, full: bool = True) -> dict[str, Array]:
        """One generation of made-up numbers; its newest frames are others each time, so that they are encoded.

        Args:
            encoder: Also run the encoder alone, which `encode_frames` needs.
            full: Also run full precision, where it can fall back to that.
        """
        made_up = {name: np.zeros((1, *shape), dtype=np.float32) for name, shape in self.inputs.items()}
        for name in self.cameras:
            made_up[name][:, -1] = np.random.default_rng().random()
        observed = self.check_observation(made_up)  # which adds what was fixed
        if encoder and self._encoder is not None:
            self.features(observed)
        if full and self.falls_back:
            self.run(observed, self.draw_noise(1, full=True), full=True)
        return self.run(observed, self.draw_noise(1))

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
        return features

    @cached_property
    def _encoder_session(self) -> Any:
        """The encoder alone; made of the file when it is first needed."""
        return load_output(self.path, self._loaded, "features")

    def draw_noise(self, batch: int, generator: np.random.Generator | None = None, full: bool = False) -> Array:
        """The noise of one generation, (1 + draws, B, horizon, D); from a new generator if none is given."""
        return read_generator(None, generator).standard_normal(self._noise_shape(batch, full), dtype=np.float32)

    def check_observation(self, obs: Any) -> dict[str, Array]:
        """The observation as `run` takes it, or a sentence saying what is wrong with it."""
        observed = read_observation(obs, self.inputs, self.cameras, self.outside)
        batch = _batch(observed)
        return {**observed, **{name: np.repeat(value, batch, axis=0) for name, value in self._fixed.items()}}

    def check_moment(self, obs: Any) -> None:
        """Refuse one moment, as `History.push` takes it, that does not have the names and shapes of the inputs."""
        check_moment(obs, self.inputs, self.timeless, self.outside)

    def fix(self, inputs: Mapping[str, Any]) -> None:
        """Give inputs without moments to every generation from the next one on: observations need not bring them.

        Args:
            inputs: By name, (...) or (1, ...), such as the feature of the words of a task.
        """
        for name, value in inputs.items():
            if name not in self.timeless:
                known = ", ".join(sorted(self.timeless)) or "this export has none"
                raise ObservationError(f"{name!r} cannot be fixed, expected an input without moments: {known}")
            array, inner = read_array(value, f"the fixed {name!r}"), tuple(self.sizes[name][1:])
            if array.shape not in (inner, (1, *inner)):
                raise ObservationError(f"the fixed {name!r} has shape {array.shape}, expected {inner}")
            self._fixed[name] = array.reshape(1, *inner)
        self._observed = [name for name in self._observed if name not in self._fixed]

    def run(
        self, observed: Mapping[str, Array], noise: Any, previous: Previous | None = None, full: bool = False
    ) -> dict[str, Array]:
        """One generation of what `check_observation` returned, with noise (1 + draws, B, horizon, D); no guard judges it."""
        known = {**observed, **self._told(previous, _batch(observed))}
        return self.run_checked(known, self._check_noise(noise, _batch(observed), full), full=full)

    def _check_noise(self, noise: Any, batch: int, full: bool = False) -> Array:
        drawn, expected = read_array(noise, "noise"), self._noise_shape(batch, full)
        if drawn.shape != expected:
            raise ObservationError(f"noise has shape {drawn.shape}, expected {expected}; draw_noise makes it")
        return drawn

    def due_actions(self, found: Mapping[str, Array]) -> Array:
        """Of what `predict_action` returned, the actions from the first that is due on, (B, n, A): those that are to be
        executed, and where the export gives whole chunks, what comes behind them."""
        whole = found.get("action_pred")
        return found["action"] if whole is None else whole[:, self.executed[0] :]

    def run_checked(self, observed: Mapping[str, Array], noise: Array, full: bool = False) -> dict[str, Array]:
        """The same for noise that was checked too; `full`: in full precision, which takes noise of its own."""
        if self.takes_previous and PREVIOUS_CHUNK not in observed:
            observed = {**observed, **self._told(None, noise.shape[1])}
        frames = self._by_moment(observed)
        earlier = None if self._memory is None else self._memory.recall(frames)
        session, before = (self._loaded.full, IN_FULL) if full else (self._loaded.session, "")
        feed = {**observed, **self._frames_to_encode(frames, earlier), f"{before}noise": noise}
        answers = run_session(session, [f"{before}{name}" for name in self._outputs], feed)
        found = dict(zip(self._outputs, answers, strict=True))
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
        """What an observation brings: shapes by name, without the batch, and without what was fixed."""
        return {name: tuple(self.sizes[name][1:]) for name in self._observed}

    @property
    def takes_previous(self) -> bool:
        """Whether it can be told of the chunk before (real-time chunking)."""
        return self._previous is not None

    @property
    def falls_back(self) -> bool:
        """Whether it answers what its guard finds outside in full precision."""
        return self._loaded.full is not None

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

    def _noise_shape(self, batch: int, full: bool = False) -> tuple[int, ...]:
        sizes = self.header["inputs"][f"{IN_FULL}noise"] if full else self.sizes["noise"]
        return tuple(batch if size == "batch" else size for size in sizes)


def _batch(observed: Mapping[str, Array], axis: int = 0) -> int:
    return int(next(iter(observed.values())).shape[axis])

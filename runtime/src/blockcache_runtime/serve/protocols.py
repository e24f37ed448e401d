"""What is said on a connection, message by message, in each protocol. Knows nothing of sockets, threads and time.

A protocol takes a message and says what follows: an answer at once, a question for the policy, or nothing. What it refuses
raises a BlockcacheError with one sentence, and leaves what the client showed before as it was.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blockcache_runtime._version import __version__
from blockcache_runtime.checks import Array
from blockcache_runtime.errors import ContentError, EngineError, ObservationError, short
from blockcache_runtime.history import timeless_inputs
from blockcache_runtime.serve.policies import ClientState, Moment, ServedPolicy
from blockcache_runtime.serve.wire import pack, unpack

RESET, SEED, OBSERVE_ONLY = "reset", "seed", "observe_only"
"""Words beside an observation that are meant for the server."""


@dataclass(frozen=True, eq=False)
class Question:
    """What the policy is asked: the last moments of one client, as a batch of one, and where its noise comes from."""

    observation: Moment
    generator: np.random.Generator
    episode: int
    sequence: int = 0  # of the message that asked
    recent: dict[bytes, None] = field(default_factory=dict)  # what a guard remembers of the client


@dataclass(frozen=True)
class Served:
    """What a connection is told apart by: the policy, and what the server was started with."""

    policy: ServedPolicy
    renamed: Mapping[str, str]  # the policy's names by the clients'
    replan: int  # actions of a chunk that are handed out where the server does that

    def __post_init__(self) -> None:
        taken = {RESET, SEED, OBSERVE_ONLY} & {*self.policy.inputs}
        if taken:
            raise EngineError(
                f"the policy has an input {min(taken)!r}, a word that the server needs; rename that input"
            )
        if odd := set(self.renamed.values()) - {*self.policy.inputs}:
            known = ", ".join(self.policy.inputs)
            raise EngineError(f"--rename names {min(odd)!r}, expected one of the policy's inputs: {known}")
        if not 1 <= self.replan <= self.policy.n_action_steps:
            raise EngineError(f"replan is 1 to the policy's {self.policy.n_action_steps} actions, got {self.replan}")

    @property
    def numbers(self) -> int:
        """In one whole observation, all moments of it."""
        return sum(map(math.prod, self.policy.inputs.values()))

    @property
    def most_bytes(self) -> int:
        """Of a message: an observation in the widest type, twice, and a megabyte for what clients send besides."""
        return 2**20 + 16 * self.numbers

    def metadata(self) -> dict[str, Any]:
        """What a client should know."""
        policy, steps = self.policy, self.policy.n_obs_steps
        timeless = timeless_inputs(policy.inputs, steps, policy.outside)
        return {
            "server": f"blockcache {__version__}",
            "policy": policy.name,
            "inputs": {name: [*(shape if name in timeless else shape[1:])] for name, shape in policy.inputs.items()},
            "cameras": list(policy.cameras),
            "n_obs_steps": steps,
            "n_action_steps": policy.n_action_steps,
            "action_dim": policy.action_dim,
        }


class Protocol(ABC):
    """One connection."""

    def __init__(self, served: Served) -> None:
        """Begin.

        Args:
            served: The policy and the server's settings.
        """
        self.served, self.state = served, ClientState(served.policy, served.renamed)
        self.live = False
        """Whether the client does not wait for answers, so that only its newest observation needs one."""
        self.refused = 0  # messages in a row
        self._sequence = 0  # of the message that the next answer belongs to
        self.recorded_as = (-1, -1)  # the client's episode that was recorded last, and its number in the log

    def greeting(self) -> bytes | None:
        """What the server says first, if it does."""
        return None

    @abstractmethod
    def receive(self, data: bytes | str, newest: bool = True) -> bytes | Question | None:
        """What follows a message: an answer, a question for the policy, or nothing.

        Args:
            data: The message.
            newest: Whether no other message of this client is waiting.
        """

    def return_to(self, question: Question) -> bool:
        """What is said next is about this question, whatever was received since; returns whether its episode goes on."""
        self._sequence = question.sequence
        return question.episode == self.state.episode

    @abstractmethod
    def answer(self, chunk: Array, policy_ms: float) -> bytes:
        """The answer to the client whose question the policy answered with a chunk."""

    @abstractmethod
    def refusal(self, sentence: str) -> bytes | str:
        """A sentence for the client."""

    def finished(self, total_ms: float) -> None:
        """Told how long the last request took, until its answer was handed to the network."""
        return

    def _unpacked(self, data: bytes | str) -> dict[str, Any]:
        if isinstance(data, str):
            raise ContentError("a text message came, expected a binary one of msgpack")
        return unpack(data, self.served.most_bytes)

    def _question(self, observation: Moment) -> Question:
        state = self.state
        return Question(observation, state.generator, state.episode, self._sequence, state.recent)


class Openpi(Protocol):
    """The protocol of openpi-client: metadata first, then for each observation a whole chunk."""

    def __init__(self, served: Served) -> None:
        """See `Protocol`."""
        super().__init__(served)
        self._last_ms: float | None = None

    def greeting(self) -> bytes:
        """The metadata."""
        words = {
            "history": "kept by the server for each connection; the first observation is repeated",
            "reset_key": RESET,
            "seed_key": SEED,
            "observe_only_key": OBSERVE_ONLY,
        }
        return pack({**self.served.metadata(), **words}, bytes_keys=True)

    def receive(self, data: bytes | str, newest: bool = True) -> bytes | Question | None:
        """See `Protocol`."""
        given = self._unpacked(data)
        reset, only = (_switch(given.pop(name, False), name) for name in (RESET, OBSERVE_ONLY))
        seed = _seed(given.pop(SEED, None))
        if seed is not None and not reset:
            raise ObservationError("a seed is taken at the start of an episode; send reset with it")
        before = self.state
        if reset:  # on a state of its own, which counts once the observation is taken
            self.state = before.begun(seed)
        try:
            observation = self.state.observe(given)
        except BaseException:
            self.state = before
            raise
        return pack({"observed": True}, bytes_keys=True) if only else self._question(observation)

    def answer(self, chunk: Array, policy_ms: float) -> bytes:
        """See `Protocol`."""
        timing = {"infer_ms": policy_ms}
        before = {} if self._last_ms is None else {"prev_total_ms": self._last_ms}
        return pack({"actions": chunk, "server_timing": {**timing, **before}, "policy_timing": timing}, bytes_keys=True)

    def refusal(self, sentence: str) -> str:
        """A text: the client raises it as an error."""
        return sentence

    def finished(self, total_ms: float) -> None:
        """Kept for the next answer."""
        self._last_ms = total_ms


class VlaEval(Protocol):
    """The protocol of vla-eval: one observation a step, one action each; the server plays the chunk out."""

    def __init__(self, served: Served) -> None:
        """See `Protocol`."""
        super().__init__(served)
        self._chunk: list[Array] = []
        self._observed, self._late = -1, 0  # the last sequence; observations since the chunk was asked for

    def receive(self, data: bytes | str, newest: bool = True) -> bytes | Question | None:
        """See `Protocol`."""
        self._sequence = 0
        message = self._unpacked(data)
        kind, payload, sequence = (message.get(name) for name in ("type", "payload", "seq"))
        if not isinstance(sequence, int) or not isinstance(payload, dict) or not isinstance(kind, str):
            raise ContentError("the message needs a type, a payload that is a map, and a seq that is a whole number")
        if isinstance(sequence, bool) or not 0 <= sequence < 2**63:
            raise ContentError(f"the message has the seq {short(sequence)}, expected a whole number, 0 or more")
        self._sequence = sequence
        if kind == "hello":
            return self._hello(payload)
        if kind == "episode_start":
            task = payload.get("task")
            self.state = self.state.begun(_seed(task.get("seed") if isinstance(task, dict) else None))
            self._chunk, self.live = [], str(payload.get("mode")) == "live"
            return None
        if kind == "observation":
            return self._observation(payload, sequence, newest)
        if kind in ("episode_end", "error"):
            return None
        raise ContentError(
            f"the message has the type {short(kind)}, expected hello, observation, episode_start or _end"
        )

    def _hello(self, payload: Mapping[str, Any]) -> bytes:
        version = payload.get("protocol_version")
        if type(version) is not int or version != 1:
            raise ContentError(f"the client speaks version {short(version)} of the protocol, this server version 1")
        words = {
            "harness_version": f"blockcache {__version__}",
            "protocol_version": 1,
            "model_server": "blockcache",
            "capabilities": {},
        }
        return self._message("hello", {**words, **self.served.metadata(), "replan": self.served.replan})

    def _observation(self, payload: Mapping[str, Any], sequence: int, newest: bool) -> bytes | Question | None:
        if sequence <= self._observed:
            raise ObservationError(f"observation {sequence} came twice or behind {self._observed}; it is left out")
        observation = self.state.observe(payload)
        self._observed = sequence
        if self._chunk:  # what an observation is answered with belongs to its own step, however late it is
            action = self._chunk.pop(0)
            return None if self.live and not newest else self._action(action)
        if self.live and not newest:
            self._late += 1
            return None
        self._late = 0
        return self._question(observation)

    def answer(self, chunk: Array, policy_ms: float) -> bytes:
        """See `Protocol`."""
        first, *rest = chunk[: self.served.replan]
        self._chunk = rest[self._late :]
        return self._action(first)

    def _action(self, action: Array) -> bytes:
        return self._message("action", {"actions": np.ascontiguousarray(action)})

    def refusal(self, sentence: str) -> bytes:
        """An error message; the connection stays."""
        return self._message("error", {"error": sentence})

    def _message(self, kind: str, payload: Mapping[str, Any]) -> bytes:
        words = {"type": kind, "payload": payload, "seq": self._sequence, "timestamp": time.time()}
        return pack(words, bytes_keys=False)


PROTOCOLS: dict[str, type[Protocol]] = {"openpi": Openpi, "vla-eval": VlaEval}


def _plain(value: Any) -> Any:
    """A number that came as an array without axes, as Python has it."""
    return value.item() if isinstance(value, np.ndarray) and value.shape == () else value


def _switch(value: Any, name: str) -> bool:
    found = _plain(value)
    if not isinstance(found, bool):
        raise ObservationError(f"{name} is true or false, got {short(value)}")
    return found


def _seed(value: Any) -> int | None:
    value = _plain(value)
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise ObservationError(f"a seed is a whole number, 0 or more, got {short(value)}")
    return value

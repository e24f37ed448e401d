"""A denoiser as a program over 23 operations, written once by its family and run by two backends.

`Ops` is what a backend offers: torch executes it, ONNX writes nodes. `Program` is what a family folds its denoiser into:
exact algebra at build time, so that little is left to do in a generation. Neither knows schedules, samplers or engines.

Values are the backend's own (tensors, or names in a graph). Where nothing else is said they have two axes, `rows` = batch
x tokens in front, and a batch of any size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from blockcache.block import Block
from blockcache.errors import EngineError

Value: TypeAlias = Any
Activation: TypeAlias = Literal["cos", "gelu", "gelu_tanh", "mish", "relu", "silu", "sin"]


class UnsupportedError(EngineError):
    """What about a policy a program cannot express, as a phrase: "the encoder-only form"."""


class Ops(Protocol):
    """A backend."""

    def weight(self, name: str) -> Value:
        """One of the program's `weights`."""

    def row(self, table: str, step: Any, part: int = 0) -> Value:
        """This step's row of one of the program's `tables`, of one part (a layer, say)."""

    def per_sample(self, value: Value) -> Value:
        """One of the weights, (tokens, d) -> (rows, d): the same for every sample of the batch."""

    def linear(self, x: Value, w: Value, b: Value) -> Value:
        """x (rows, in) @ w (in, out) + b, which is (out,) or (rows, out)."""

    def grouped(self, x: Value, w: Value) -> Value:
        """A matrix for each group: (n, groups, in) and one of the weights, (groups, in, out) -> (n, groups, out)."""

    def matmul(self, a: Value, b: Value) -> Value: ...

    def add(self, values: Sequence[Value]) -> Value:
        """The sum of one or more values."""

    def mul(self, a: Value, b: Value) -> Value: ...

    def layer_norm(self, x: Value, width: int, eps: float) -> Value:
        """Over the last axis, of that width, without gain and bias: those belong in the matrix behind it."""

    def scale_norm(self, x: Value, width: int, eps: float, centred: bool) -> Value:
        """x over the root mean square of its last axis, of that width; `centred`: over the standard deviation around the
        mean (unbiased), which stays in x all the same."""

    def activation(self, x: Value, kind: Activation) -> Value: ...

    def softmax(self, x: Value) -> Value:
        """Over the last axis."""

    def attention(
        self, q: Value, k: Value, v: Value, heads: int, mask: str | None = None, causal: bool = False
    ) -> Value:
        """(B, T, d), (B, S, d) and (B, S, d) -> (B, T, d). The scale is in q already; `mask` names a weight (T, S) of 0
        and -inf, and `causal` says that it lets each token see itself and those before it, no more."""

    def attend(self, q: Value, k: Value, v: Value, hidden: Value | None = None) -> Value:
        """The same by head: (B, H, T, d / H), keys (B, H, d / H, S) and values (B, H, S, d / H) -> (B, H, T, d / H).
        `hidden` (B, 1, 1, S), computed, is added to the scores."""

    def reshape(self, x: Value, shape: Sequence[int]) -> Value: ...

    def transpose(self, x: Value, order: Sequence[int]) -> Value: ...

    def split(self, x: Value, parts: int, axis: int) -> list[Value]:
        """Equal parts along an axis."""

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value: ...

    def pad(self, x: Value, axis: int, before: int) -> Value:
        """Zeros in front, along one of five axes."""

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """One or more values, one behind the other along an axis."""

    def conv(self, x: Value, w: Value, stride: int, padding: int) -> Value:
        """Frames (n, channels, height, width) and one of the weights, (outputs, channels, k, k), without a bias."""

    def group_norm(self, x: Value, gain: str, bias: str, groups: int, eps: float, sides: tuple[int, int]) -> Value:
        """Over each group of channels and all places of a frame, `sides` of them; gain and bias name weights (channels,)."""

    def max_pool(self, x: Value, size: int, stride: int, padding: int) -> Value:
        """The largest in each square of places of a frame."""


@dataclass(frozen=True, eq=False)
class StepTable:
    """What depends on the step alone, by step: `values` (K, parts, ...).

    A row has `pads` zeros behind each of its axes and then takes `shape`, which begins with a 1 for the batch; so a table
    need not hold the zeros.
    """

    values: Tensor
    shape: tuple[int, ...]
    pads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        row = self.values.shape[2:]
        pads = self.pads or (0,) * len(row)
        size = math.prod(count + after for count, after in zip(row, pads, strict=True))
        if self.shape[:1] != (1,) or math.prod(self.shape) != size:
            raise ValueError(f"rows of {tuple(row)} and {pads} zeros cannot take the shape {self.shape}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Program(ABC):
    """A denoiser and what surrounds it, folded. A family subclasses this and fills in the methods.

    inputs      the observation: shapes by name, without the batch
    cameras     which of the inputs are frames, (moments, channels, height, width)
    features    numbers that all cameras together become in one moment
    chunk       tokens and numbers of each in the noise that comes in
    tokens      tokens that are computed: all of the chunk's, or fewer after `cut`
    executed    first and one behind the last token that the robot executes
    action_dim  numbers of an action
    blocks      in execution order, with the FLOPs of computing each once here, after all exact savings
    once, every_step  FLOPs of a generation outside the blocks, and of a step
    weights, tables   constants, in the policy's precision
    whole       whether the whole chunk is given back, or just what is executed
    causal      whether tokens depend on those before them only, so that `cut` is exact
    gated       whether `gate` gives something: then skipped blocks are not summed up beforehand
    signature   tells apart what no fingerprint does, such as tables that a policy makes in code
    outside     inputs that a part of the policy computes which the program does not hold, and how to come by each
    fixed       inputs of the policy that became constants, and what they were
    """

    inputs: Mapping[str, tuple[int, ...]]
    chunk: tuple[int, int]
    tokens: int
    executed: tuple[int, int]
    action_dim: int
    blocks: tuple[Block, ...]
    once: int
    every_step: int
    weights: Mapping[str, Tensor] = field(repr=False)
    tables: Mapping[str, StepTable] = field(repr=False)
    whole: bool = True
    causal: bool = False
    gated: bool = False
    signature: str = ""
    cameras: tuple[str, ...] = ()
    features: int = 0
    outside: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def like(self) -> Tensor:
        """A tensor with the program's precision and device."""
        return next(iter(self.weights.values()))

    def linear(self, ops: Ops, name: str, x: Value, index: int | str = "") -> Value:
        """x through one of the matrices and its bias, which are named as `folding.named` does."""
        return ops.linear(x, ops.weight(f"{name}_w{index}"), ops.weight(f"{name}_b{index}"))

    def see(self, ops: Ops, frames: Mapping[str, Value]) -> Value:
        """What frames show, (n, channels, height, width) for each camera -> (n, features); asked of programs with cameras.
        It depends on one moment alone, so that a moment need not be looked at twice."""
        raise NotImplementedError

    @abstractmethod
    def conditions(self, ops: Ops, obs: Mapping[str, Value]) -> Any:
        """Once per generation: keys and values, modulations; whatever no step changes. Cameras are replaced by "features",
        (B, moments, features). The family's own type, with at least `start`: the constant (rows, d) that the stream starts
        from, whatever sample and step."""

    def begin(self, ops: Ops, conditions: Any, step: Any) -> Any:
        """Once per step, whatever blocks it computes: the conditions as this step's methods get them."""
        return conditions

    @abstractmethod
    def enter(self, ops: Ops, x: Value, start: Value, conditions: Any, step: Any) -> Value:
        """The sample x (rows, D) becomes the stream, on top of `start`."""

    @abstractmethod
    def residual(self, ops: Ops, block: int, stream: Value, conditions: Any, step: Any) -> Value:
        """What a block adds, before its gate: what is cached."""

    def gate(self, ops: Ops, block: int, conditions: Any, step: Any) -> Value | None:
        """What multiplies a block's residual now, cached or not; asked for in `gated` programs only."""
        return None

    @abstractmethod
    def leave(self, ops: Ops, stream: Value, conditions: Any, step: Any) -> Value:
        """The stream becomes the denoiser's output (rows, D)."""

    @abstractmethod
    def finish(self, ops: Ops, sample: Value) -> Value:
        """The clean sample (rows, D) becomes actions in robot units, (B, tokens, A)."""

    def select(self, ops: Ops, actions: Value, conditions: Any) -> Value:
        """The actions (B, tokens, A) that `finish` gave, without what the observation rules out."""
        return actions

    def cut(self, tokens: int) -> Program:
        """The same for the first tokens of the chunk only; asked of `causal` programs."""
        raise NotImplementedError

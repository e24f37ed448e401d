"""One camera's network as operations: a crop, ResNet18's convolutions, a spatial softmax, a linear layer.

Constants are named in the program's weights. Knows nothing of backends, of modules and of other cameras.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blockcache.models.program import Ops, Value


@dataclass(frozen=True)
class Convolution:
    """With the group norm behind it. `name`_w, `name`_gain and `name`_bias are its weights; `sides` those of its output."""

    name: str
    inputs: int
    outputs: int
    size: int
    stride: int
    padding: int
    groups: int
    eps: float
    sides: tuple[int, int]

    def run(self, ops: Ops, x: Value) -> Value:
        found = ops.conv(x, ops.weight(f"{self.name}_w"), self.stride, self.padding)
        return ops.group_norm(found, f"{self.name}_gain", f"{self.name}_bias", self.groups, self.eps, self.sides)

    @property
    def flops(self) -> int:
        return 2 * self.inputs * self.outputs * self.size**2 * self.sides[0] * self.sides[1]


@dataclass(frozen=True)
class Residual:
    """Two convolutions beside a short cut, which may have one of its own."""

    first: Convolution
    second: Convolution
    shortcut: Convolution | None

    def run(self, ops: Ops, x: Value) -> Value:
        inner = self.second.run(ops, ops.activation(self.first.run(ops, x), "relu"))
        return ops.activation(ops.add([inner, x if self.shortcut is None else self.shortcut.run(ops, x)]), "relu")

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        return (self.first, self.second) + (() if self.shortcut is None else (self.shortcut,))


@dataclass(frozen=True)
class Pool:
    """The largest of each square of places."""

    size: int
    stride: int
    padding: int

    def side(self, before: int) -> int:
        return (before + 2 * self.padding - self.size) // self.stride + 1


@dataclass(frozen=True)
class CameraNetwork:
    """A camera and its network; several cameras may have the same `name`, which is that of the network's weights.

    corner     top and left of what is looked at
    sides      its height and width
    whole      height and width of a frame
    places     behind the last block: height times width
    """

    camera: str
    name: str
    corner: tuple[int, int]
    sides: tuple[int, int]
    whole: tuple[int, int]
    stem: Convolution
    pool: Pool
    blocks: tuple[Residual, ...]
    places: int
    keypoints: int
    features: int

    def see(self, ops: Ops, frames: Value) -> Value:
        """Frames from 0 to 1, (n, channels, height, width) -> (n, features)."""
        x = frames
        for axis, start, side, whole in zip((2, 3), self.corner, self.sides, self.whole, strict=True):
            x = x if side == whole else ops.slice(x, axis, start, start + side)
        # at the borders a convolution sees zeros, which are none of these numbers: so nothing is folded into it here
        x = ops.add([ops.mul(x, ops.weight(f"obs.{self.camera}_scale")), ops.weight(f"obs.{self.camera}_offset")])
        x = ops.activation(self.stem.run(ops, x), "relu")
        x = ops.max_pool(x, self.pool.size, self.pool.stride, self.pool.padding)
        for block in self.blocks:
            x = block.run(ops, x)
        maps = ops.conv(x, ops.weight(f"{self.name}_points_w"), 1, 0)
        shares = ops.softmax(ops.reshape(maps, (-1, self.places)))  # (n * keypoints, places)
        points = ops.reshape(ops.matmul(shares, ops.weight(f"{self.name}_places")), (-1, 2 * self.keypoints))
        found = ops.linear(points, ops.weight(f"{self.name}_features_w"), ops.weight(f"{self.name}_features_b"))
        return ops.activation(found, "relu")

    @property
    def flops(self) -> int:
        """Of one frame."""
        trunk = sum(convolution.flops for convolution in self._convolutions())
        points = 2 * self.blocks[-1].second.outputs * self.keypoints * self.places
        return trunk + points + 4 * self.keypoints * self.places + 4 * self.keypoints * self.features

    def _convolutions(self) -> Iterator[Convolution]:
        yield self.stem
        for block in self.blocks:
            yield from block.convolutions

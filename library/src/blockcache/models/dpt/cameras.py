"""The cameras of a hybrid image policy, this package's or the public code's: its encoder taken apart into constants and
operations (a crop, ResNet18's convolutions, a spatial softmax, a linear layer for each camera).

An encoder is found by the shape of its modules, never by importing the code they came from. Constants are named in the
program's weights. Knows nothing of backends and of denoisers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.models.dpt.encoder import Input, ObservationEncoder, corner
from blockcache.models.folding import double
from blockcache.models.program import Ops, UnsupportedError, Value


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
class CameraNetwork:
    """A camera and its network; several cameras may have the same `name`, which is that of the network's weights.

    corner     top and left of what is looked at
    sides      its height and width
    whole      height and width of a frame
    pool       size, stride and padding of the windows whose largest number is taken
    places     behind the last block: height times width
    """

    camera: str
    name: str
    corner: tuple[int, int]
    sides: tuple[int, int]
    whole: tuple[int, int]
    stem: Convolution
    pool: tuple[int, int, int]
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
        x = ops.max_pool(x, *self.pool)
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


@dataclass(frozen=True, eq=False)
class EncoderParts:
    """What an encoder is made of: its inputs in the order in which they are joined, and each camera's network and crop."""

    inputs: tuple[Input, ...]
    nets: Mapping[str, Any]
    crops: Mapping[str, tuple[int, int]]

    @property
    def cameras(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.is_camera)

    @property
    def scratch_attributes(self) -> list[tuple[nn.Module, str]]:
        """What the public code's networks write down while they run, and never read: the last keypoints."""
        return [(net.pool, "kps") for net in self.nets.values()]

    @property
    def flops(self) -> int:
        """Of looking at one moment."""
        return sum(network.flops for network in self.networks()[0])

    def networks(self) -> tuple[tuple[CameraNetwork, ...], dict[str, Tensor]]:
        """Each camera's operations, and their constants; a network that several cameras share is there once."""
        names: dict[int, str] = {}
        networks, weights = [], dict[str, Tensor]()
        for camera in self.cameras:
            net = self.nets[camera.name]
            name = names.setdefault(id(net), f"obs.{camera.name}")
            network, constants = _taken_apart(camera, name, net, self.crops[camera.name])
            networks.append(network)
            weights |= constants
        return tuple(networks), weights


def parts_of(encoder: Any) -> EncoderParts:
    """The parts of an encoder that we know; UnsupportedError says what is another one."""
    if isinstance(encoder, ObservationEncoder):
        config = encoder.config
        return EncoderParts(
            config.inputs, dict(encoder.obs_nets), {item.name: config.seen(item) for item in config.cameras}
        )
    inputs = inputs_of(encoder)
    nets, randomizers = (_by_name(encoder, name) for name in ("obs_nets", "obs_randomizers"))
    _need(inputs and nets, "obs_shapes and obs_nets")
    _need(type(getattr(encoder, "activation", None)) is nn.ReLU, "a ReLU as its activation")
    crops = {}
    for item in inputs:
        net, randomizer = nets.get(item.name), randomizers.get(item.name)
        _need(item.is_camera == (net is not None), f"a network for each camera and no other ({item.name})")
        if item.is_camera:
            crops[item.name] = _crop(item, randomizer)
        else:
            _need(randomizer is None, f"numbers as they are ({item.name})")
    return EncoderParts(inputs, {name: net for name, net in nets.items() if net is not None}, crops)


def inputs_of(encoder: Any) -> tuple[Input, ...]:
    """What an encoder says that it looks at, by name and without moments; nothing if it does not say so."""
    for name in ("obs_shapes", "key_shape_map"):
        shapes = getattr(encoder, name, None)
        if isinstance(shapes, Mapping):
            try:
                return tuple(Input(str(key), tuple(int(size) for size in shape)) for key, shape in shapes.items())
            except (PolicyError, TypeError, ValueError):
                return ()
    return ()


def _by_name(encoder: Any, name: str) -> dict[str, Any]:
    found = getattr(encoder, name, None)
    return dict(found.items()) if isinstance(found, Mapping | nn.ModuleDict) else {}


def _need(there: Any, what: str) -> None:
    if not there:
        raise UnsupportedError(f"an obs_encoder without {what}")


@torch.no_grad()
def _crop(camera: Input, randomizer: Any) -> tuple[int, int]:
    """What a randomizer leaves of a frame; one that does anything but crop in the middle is none that we know."""
    channels, height, width = camera.shape
    if randomizer is None:
        return height, width
    frame = torch.arange(channels * height * width, dtype=torch.float64).reshape(1, channels, height, width)
    try:
        crop = int(randomizer.crop_height), int(randomizer.crop_width)
        top, left = corner((height, width), crop)
        middle = frame[:, :, top : top + crop[0], left : left + crop[1]]
        with torch.random.fork_rng(devices=[]):
            seen, behind = randomizer.forward_in(frame), randomizer.forward_out(middle)
        fits = torch.equal(seen, middle) and torch.equal(behind, middle)
    except Exception:  # foreign code may raise anything
        fits = False
    _need(fits, f"a crop in the middle of its frames ({camera.name})")
    return crop


def _taken_apart(camera: Input, name: str, net: Any, seen: tuple[int, int]) -> tuple[CameraNetwork, dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    try:
        stages = list(net.nets)
        backbone, pool, flatten, linear = stages
        stem, norm, activation, largest, *blocks = list(backbone.nets)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"an obs_encoder whose networks have other parts ({camera.name})") from error
    _need(
        backbone is net.backbone and pool is net.pool and isinstance(flatten, nn.Flatten), "backbone, pool and flatten"
    )
    _need(type(activation) is nn.ReLU and type(largest) is nn.MaxPool2d, "ReLU and MaxPool2d behind its first norm")
    first = _convolution(f"{name}_stem", stem, norm, camera.shape[0], seen, weights)
    squares = _windows(largest)
    _need(_one(largest.dilation) == 1 and not largest.ceil_mode, "a plain MaxPool2d")
    sides = _sides_behind(first.sides, *squares)
    channels, found = first.outputs, list[Residual]()
    for block in (block for stage in blocks for block in stage):
        found.append(_residual(f"{name}_{len(found)}", block, channels, sides, weights))
        channels, sides = found[-1].second.outputs, found[-1].second.sides
    places = sides[0] * sides[1]
    points, keypoints = pool.nets, len(pool.nets.weight)
    _need(
        type(points) is nn.Conv2d and tuple(points.weight.shape) == (keypoints, channels, 1, 1),
        "1 x 1 maps to keypoints",
    )
    _need(pool.pos_x.numel() == pool.pos_y.numel() == places, "as many positions as places behind its networks")
    _need(not getattr(pool, "output_variance", False) and pool.temperature.numel() == 1, "plain keypoints")
    _need(type(linear) is nn.Linear and linear.in_features == 2 * keypoints, "a linear layer behind its keypoints")
    # a bias is the same at all places of a map, so that no softmax sees it
    weights[f"{name}_points_w"] = double(points.weight) / double(pool.temperature)
    weights[f"{name}_places"] = torch.stack([double(pool.pos_x).flatten(), double(pool.pos_y).flatten()], dim=1)
    weights[f"{name}_features_w"] = double(linear.weight).T
    bias = linear.bias if linear.bias is not None else torch.zeros(linear.out_features)
    weights[f"{name}_features_b"] = double(bias)
    whole = camera.shape[1], camera.shape[2]
    network = CameraNetwork(
        camera=camera.name,
        name=name,
        corner=corner(whole, seen),
        sides=seen,
        whole=whole,
        stem=first,
        pool=squares,
        blocks=tuple(found),
        places=places,
        keypoints=keypoints,
        features=linear.out_features,
    )
    return network, weights


def _residual(name: str, block: Any, inputs: int, sides: tuple[int, int], weights: dict[str, Tensor]) -> Residual:
    for part in ("conv1", "bn1", "conv2", "bn2", "relu"):
        _need(hasattr(block, part), f"residual blocks of two convolutions ({part})")
    _need(type(block.relu) is nn.ReLU, "ReLU in its blocks")
    first = _convolution(f"{name}_a", block.conv1, block.bn1, inputs, sides, weights)
    second = _convolution(f"{name}_b", block.conv2, block.bn2, first.outputs, first.sides, weights)
    shortcut = None
    if getattr(block, "downsample", None) is not None:
        _need(isinstance(block.downsample, nn.Sequential) and len(block.downsample) == 2, "plain short cuts")
        conv, norm = block.downsample
        shortcut = _convolution(f"{name}_c", conv, norm, inputs, sides, weights)
    else:
        _need((inputs, sides) == (second.outputs, second.sides), "short cuts of the right size")
    return Residual(first, second, shortcut)


def _convolution(
    name: str, conv: Any, norm: Any, inputs: int, before: tuple[int, int], weights: dict[str, Tensor]
) -> Convolution:
    plain = type(conv) is nn.Conv2d and conv.bias is None and conv.groups == 1 and conv.padding_mode == "zeros"
    _need(plain and _one(conv.dilation) == 1 and conv.in_channels == inputs, "plain convolutions")
    _need(type(norm) is nn.GroupNorm and norm.affine and norm.num_channels == conv.out_channels, "group norms")
    size, stride, padding = _windows(conv)
    weights[f"{name}_w"] = conv.weight.detach()
    weights[f"{name}_gain"], weights[f"{name}_bias"] = norm.weight.detach(), norm.bias.detach()
    sides = _sides_behind(before, size, stride, padding)
    return Convolution(name, inputs, conv.out_channels, size, stride, padding, norm.num_groups, float(norm.eps), sides)


def _windows(module: Any) -> tuple[int, int, int]:
    """Size, stride and padding of a convolution or a pooling."""
    return _one(module.kernel_size), _one(module.stride), _one(module.padding)


def _sides_behind(before: tuple[int, int], size: int, stride: int, padding: int) -> tuple[int, int]:
    height, width = ((side + 2 * padding - size) // stride + 1 for side in before)
    return height, width


def _one(size: Any) -> int:
    """A size that is the same both ways."""
    sizes = set(size) if isinstance(size, tuple) else {size}
    _need(len(sizes) == 1 and all(type(item) is int for item in sizes), "square windows")
    (one,) = sizes
    return int(one)

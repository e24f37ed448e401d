"""The cameras of a hybrid image policy, this package's or the public code's: its encoder taken apart into constants and
operations (a crop, ResNet18's convolutions, a spatial softmax, a linear layer for each camera).

A foreign encoder is known by its parts, which must be those that this package's own has under the same names; nothing of
the code they came from is imported. Constants are named in the program's weights. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError, in_one_line
from blockcache.models.dpt.encoder import EncoderConfig, Input, ObservationEncoder, corner, network_sizes
from blockcache.models.folding import double, linear, named
from blockcache.models.program import Ops, UnsupportedError, Value


@dataclass(frozen=True)
class Convolution:
    """With the group norm behind it. `name`_w, `name`_gain and `name`_bias are its weights; `sides` those of its output,
    `flops` what it takes for one frame."""

    name: str
    stride: int
    padding: int
    groups: int
    eps: float
    sides: tuple[int, int]
    flops: int

    def run(self, ops: Ops, x: Value) -> Value:
        found = ops.conv(x, ops.weight(f"{self.name}_w"), self.stride, self.padding)
        return ops.group_norm(found, f"{self.name}_gain", f"{self.name}_bias", self.groups, self.eps, self.sides)


@dataclass(frozen=True)
class Residual:
    """Two convolutions beside a short cut, which may have one of its own."""

    first: Convolution
    second: Convolution
    shortcut: Convolution | None

    def run(self, ops: Ops, x: Value) -> Value:
        inner = self.second.run(ops, ops.activation(self.first.run(ops, x), "relu"))
        return ops.activation(ops.add([inner, x if self.shortcut is None else self.shortcut.run(ops, x)]), "relu")


@dataclass(frozen=True)
class CameraNetwork:
    """A camera and its network; several cameras may have the same `name`, which is that of the network's weights.

    corner     top and left of what is looked at
    sides      its height and width
    whole      height and width of a frame
    pool       size, stride and padding of the windows whose largest number is taken
    places     behind the last block: height times width
    flops      of one frame
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
    flops: int

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


# -- of which encoders


def known_encoder(encoder: Any) -> ObservationEncoder:
    """An encoder of this package's class that has the tensors of a public one; UnsupportedError says what is another one.

    Its parts are compared one by one; how its own code runs them shows when the whole policy is compared with its program.
    """
    if isinstance(encoder, ObservationEncoder):
        return encoder
    inputs, nets, randomizers = inputs_of(encoder), _by_name(encoder, "obs_nets"), _by_name(encoder, "obs_randomizers")
    _need(inputs and nets, "obs_shapes and obs_nets")
    _need(type(getattr(encoder, "activation", None)) is nn.ReLU, "a ReLU as its activation")
    for item in inputs:
        has_net = nets.get(item.name) is not None
        _need(has_net == item.is_camera, f"a network for each camera and no other ({item.name})")
        _need(item.is_camera or randomizers.get(item.name) is None, f"numbers as they are ({item.name})")
    cameras = [item for item in inputs if item.is_camera]
    crops = {_crop(item, randomizers.get(item.name)) for item in cameras}
    _need(len(crops) == 1, "one crop for all of its cameras")
    held = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    shared = len(cameras) > 1 and len({id(nets[item.name]) for item in cameras}) == 1
    try:
        sizes = network_sizes(held, f"obs_nets.{cameras[0].name}")
        with torch.device("meta"):  # draws nothing from torch's generator
            own = ObservationEncoder(EncoderConfig(inputs, crops.pop(), shared, **sizes))
    except PolicyError as error:
        raise UnsupportedError(f"an obs_encoder that is another one ({error})") from error
    for item in cameras:
        _compare(nets[item.name], own.obs_nets[item.name], f"obs_nets.{item.name}")
        _need(not getattr(nets[item.name].pool, "output_variance", False), "plain keypoints")
    try:
        own.load_state_dict(encoder.state_dict(), assign=True)
    except RuntimeError as error:
        raise UnsupportedError(f"an obs_encoder with tensors of another shape ({in_one_line(error)})") from error
    return own.eval()


def _compare(found: nn.Module, expected: nn.Module, where: str) -> None:
    """Refuse a network that is made of other parts, or has them under other names."""
    there, expected_there = _leaves(found), _leaves(expected)
    for name in {**expected_there, **there}:
        if (is_there := there.get(name, "nothing")) != (wanted := expected_there.get(name, "nothing")):
            raise UnsupportedError(f"an obs_encoder that has {is_there} as {where}.{name}, where {wanted} is expected")


def _leaves(net: nn.Module) -> dict[str, str]:
    """What the parts are that have none of their own, by name; whether one writes into its input does not matter."""
    parts = {name: part for name, part in net.named_modules(remove_duplicate=False) if not [*part.children()]}
    own = {name: "" if type(part).__module__.startswith("torch.") else "another " for name, part in parts.items()}
    return {name: own[name] + repr(part).replace("inplace=True", "") for name, part in parts.items()}


def or_none(encoder: Any) -> ObservationEncoder | None:
    """The same; None for one that can be no part of a program."""
    try:
        return known_encoder(encoder)
    except UnsupportedError:
        return None


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
def _crop(camera: Input, randomizer: Any) -> tuple[int, int] | None:
    """What a randomizer leaves of a frame; one that does anything but crop in the middle is not known."""
    if randomizer is None:
        return None
    channels, height, width = camera.shape
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


# -- folding


def networks_of(encoder: ObservationEncoder) -> tuple[tuple[CameraNetwork, ...], dict[str, Tensor]]:
    """Each camera's operations, and their constants; a network that several cameras share is there once."""
    names: dict[int, str] = {}
    networks, weights = [], dict[str, Tensor]()
    for camera in encoder.config.cameras:
        net = encoder.obs_nets[camera.name]
        name = names.setdefault(id(net), f"obs.{camera.name}")
        networks.append(_network(camera, name, net, encoder.config.seen(camera), weights))
    return tuple(networks), weights


def _network(camera: Input, name: str, net: Any, seen: tuple[int, int], weights: dict[str, Tensor]) -> CameraNetwork:
    convolutions: list[Convolution] = []

    def convolution(part: str, conv: nn.Conv2d, norm: nn.GroupNorm, before: tuple[int, int]) -> Convolution:
        size, stride, padding = (int(item[0]) for item in (conv.kernel_size, conv.stride, conv.padding))
        tensors = {"w": conv.weight, "gain": norm.weight, "bias": norm.bias}
        weights.update({f"{name}_{part}_{what}": tensor.detach() for what, tensor in tensors.items()})
        sides = _sides_behind(before, size, stride, padding)
        flops = 2 * conv.weight.numel() * sides[0] * sides[1]
        made = Convolution(f"{name}_{part}", stride, padding, norm.num_groups, float(norm.eps), sides, flops)
        convolutions.append(made)
        return made

    stem, norm, _, pool, *stages = net.backbone.nets
    first = convolution("stem", stem, norm, seen)
    windows = pool.kernel_size, pool.stride, pool.padding
    sides, blocks = _sides_behind(first.sides, *windows), list[Residual]()
    for index, block in enumerate(block for stage in stages for block in stage):
        a = convolution(f"{index}_a", block.conv1, block.bn1, sides)
        b = convolution(f"{index}_b", block.conv2, block.bn2, a.sides)
        short = (
            None
            if block.downsample is None
            else convolution(f"{index}_c", block.downsample[0], block.downsample[1], sides)
        )
        blocks.append(Residual(a, b, short))
        sides = b.sides
    points, features = net.pool, net.nets[3]
    # a bias is the same at all places of a map, so that no softmax sees it
    weights[f"{name}_points_w"] = double(points.nets.weight) / double(points.temperature)
    weights[f"{name}_places"] = torch.stack([double(points.pos_x).flatten(), double(points.pos_y).flatten()], dim=1)
    weights |= named({f"{name}_features": linear(features)})
    whole, places, keypoints = (camera.shape[1], camera.shape[2]), sides[0] * sides[1], len(points.nets.weight)
    attended = 2 * points.nets.weight.numel() * places + 4 * keypoints * places + 4 * keypoints * features.out_features
    return CameraNetwork(
        camera=camera.name,
        name=name,
        corner=corner(whole, seen),
        sides=seen,
        whole=whole,
        stem=first,
        pool=windows,
        blocks=tuple(blocks),
        places=places,
        keypoints=keypoints,
        features=features.out_features,
        flops=sum(item.flops for item in convolutions) + attended,
    )


def _sides_behind(before: tuple[int, int], size: int, stride: int, padding: int) -> tuple[int, int]:
    height, width = ((side + 2 * padding - size) // stride + 1 for side in before)
    return height, width

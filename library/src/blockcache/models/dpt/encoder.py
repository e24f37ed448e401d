"""The encoder of a hybrid image policy: how an observation of cameras and numbers becomes one vector for each moment.

For each camera, or once for all of them: ResNet18's convolutions with group norms, a spatial softmax, a linear layer; tensor
names are the public checkpoints'. Frames come in normalised; in train mode each is cropped at random, else in the middle.
Knows nothing of denoisers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError, short
from blockcache.files import NEWER

GROUP = 16  # channels of one group of a norm
BLOCKS = (2, 2, 2, 2)  # of each stage
TAKEN = ("action", "action_pred", "features", "kept_features", "moments", "noise", "norms")
"""Names that files and exports use for something else."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_SIDE, _CHANNELS, _MOST = 4096, 64, 100_000
_OPTIONAL = {NEWER: True}  # a config file may leave it out


@dataclass(frozen=True)
class Input:
    """One part of an observation, as it is at one moment: a camera (channels, height, width), or numbers (count,)."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name in TAKEN:
            raise PolicyError(
                f"an input of the encoder needs a name of letters, digits and underscores, none of {', '.join(TAKEN)}; got "
                f"{short(self.name)}"
            )
        shape, most = self.shape, {1: (_MOST,), 3: (_CHANNELS, _SIDE, _SIDE)}
        fits = isinstance(shape, tuple) and all(type(size) is int for size in shape) and len(shape) in most
        if not fits or any(not 1 <= size <= limit for size, limit in zip(shape, most[len(shape)], strict=True)):
            raise PolicyError(
                f"the encoder's input {self.name!r} must be a camera [channels, height, width], up to {_CHANNELS} channels "
                f"of {_SIDE} x {_SIDE}, or numbers [count]; got {short(shape)}"
            )

    @property
    def is_camera(self) -> bool:
        return len(self.shape) == 3


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of the public hybrid image policies: for each camera a ResNet18 trunk with group norms, a spatial softmax
    and a linear layer; numbers are joined as they are.

    inputs: in the order in which they are joined.
    crop: height and width of what is looked at, in the middle of every frame; None is the whole frame.
    shared: whether all cameras have one network.
    width: channels of the trunk's first stage; the public ones have 64, and other stages a multiple of it.
    keypoints: of the spatial softmax.
    features: numbers that a camera becomes.
    """

    inputs: tuple[Input, ...]
    crop: tuple[int, int] | None = field(default=None, metadata=_OPTIONAL)
    shared: bool = field(default=False, metadata=_OPTIONAL)
    width: int = field(default=64, metadata=_OPTIONAL)
    keypoints: int = field(default=32, metadata=_OPTIONAL)
    features: int = field(default=64, metadata=_OPTIONAL)

    def __post_init__(self) -> None:
        names = [item.name for item in self.inputs]
        if not self.cameras or len(set(names)) < len(names):
            raise PolicyError(f"an encoder needs a camera among its inputs, and each name once; got {short(names)}")
        for name, most, step in (("width", 1024, GROUP), ("keypoints", 4096, 1), ("features", _MOST, 1)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most or value % step:
                multiple = f"a multiple of {step}" if step > 1 else "a positive whole number"
                raise PolicyError(f"the encoder's {name} must be {multiple}, {most:,} at most, got {short(value)}")
        if not isinstance(self.shared, bool):
            raise PolicyError(f"the encoder's shared must be true or false, got {short(self.shared)}")
        crop: Any = self.crop
        for camera in self.cameras if crop is not None else ():
            frame = camera.shape[1:]
            fits = isinstance(crop, tuple) and len(crop) == 2
            if not fits or any(type(a) is not int or not 1 <= a <= b for a, b in zip(crop, frame, strict=True)):
                raise PolicyError(
                    f"the encoder's crop must be [height, width] within the frames of {camera.name!r}, {frame[0]} x "
                    f"{frame[1]}, or null; got {short(crop)}"
                )
        if self.shared and len({(item.shape[0], self.seen(item)) for item in self.cameras}) > 1:
            raise PolicyError("cameras with a shared encoder need frames of one shape, or a crop to one")

    @property
    def cameras(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.is_camera)

    def seen(self, camera: Input) -> tuple[int, int]:
        """Height and width of what the trunk is given."""
        return self.crop or (camera.shape[1], camera.shape[2])

    @property
    def size(self) -> int:
        """Numbers of the vector that an observation becomes."""
        return sum(self.features if item.is_camera else item.shape[0] for item in self.inputs)

    @property
    def weights(self) -> int:
        """About how many numbers the networks hold, at least: four stages, the last of which has most of them."""
        nets = 1 if self.shared else len(self.cameras)
        return nets * (2700 * self.width**2 + 8 * self.width * self.keypoints + 2 * self.keypoints * self.features)


_TOLD = {"width": "backbone.nets.0.weight", "keypoints": "pool.nets.weight", "features": "nets.3.weight"}
"""Sizes of a camera's network, and the tensor of it that has so many rows."""


def network_sizes(shapes: Mapping[str, tuple[int, ...]], net: str) -> dict[str, Any]:
    """The sizes of the camera's network of that name, by the shapes of its tensors."""
    sizes = {}
    for size, tensor in _TOLD.items():
        if not (shape := shapes.get(f"{net}.{tensor}")):
            raise PolicyError(
                f"the weights lack {net}.{tensor}: expected a ResNet18 with a spatial softmax and a linear layer behind "
                "it for every camera"
            )
        sizes[size] = shape[0]
    return sizes


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP, channels)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a short cut. The norms are called `bn` as in the checkpoints."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = _norm(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = _norm(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + short)


class Trunk(nn.Module):
    """ResNet18 without its head: (N, channels, H, W) -> (N, 8 * width, about H / 32, about W / 32)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, width, 7, 2, padding=3, bias=False), _norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        stages, inputs = [], width
        for stage, count in enumerate(BLOCKS):
            outputs, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = [ResidualBlock(inputs, outputs, stride)]
            blocks += [ResidualBlock(outputs, outputs, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.nets = nn.Sequential(*stem, *stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.nets(x)


class SpatialSoftmax(nn.Module):
    """Where in the frame each of some maps is high: (N, C, H, W) -> (N, keypoints, 2), x and y from -1 to 1."""

    pos_x: Tensor
    pos_y: Tensor
    temperature: Tensor

    def __init__(self, channels: int, height: int, width: int, keypoints: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)
        self.register_buffer("temperature", torch.ones(1))
        y, x = torch.meshgrid(_places(height), _places(width), indexing="ij")
        self.register_buffer("pos_x", x.reshape(1, -1))
        self.register_buffer("pos_y", y.reshape(1, -1))

    def forward(self, x: Tensor) -> Tensor:
        shares = (self.nets(x).flatten(2) / self.temperature).softmax(dim=-1)  # (N, keypoints, H * W)
        return torch.stack([(shares * self.pos_x).sum(-1), (shares * self.pos_y).sum(-1)], dim=-1)


def _places(count: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64).float()


class CameraNet(nn.Module):
    """One camera's network. Its parts have two names each in the checkpoints, and so they have here."""

    def __init__(self, channels: int, seen: tuple[int, int], config: EncoderConfig) -> None:
        super().__init__()
        self.backbone = Trunk(channels, config.width)
        height, width = (-(-side // 32) for side in seen)  # behind five steps of stride two
        self.pool = SpatialSoftmax(8 * config.width, height, width, config.keypoints)
        linear = nn.Linear(2 * config.keypoints, config.features)
        self.nets = nn.Sequential(self.backbone, self.pool, nn.Flatten(1), linear)

    def forward(self, frames: Tensor) -> Tensor:
        return self.nets(frames)


class ObservationEncoder(nn.Module):
    """Everything of one moment, normalised, as one vector: arrays (N, ...) by name -> (N, size)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.obs_nets = nn.ModuleDict()
        self.activation = nn.ReLU()
        for camera in config.cameras:
            shares = config.shared and len(self.obs_nets)
            first = next(iter(self.obs_nets.values())) if shares else None
            self.obs_nets[camera.name] = first or CameraNet(camera.shape[0], config.seen(camera), config)

    def forward(self, observed: Mapping[str, Tensor]) -> Tensor:
        found = {item.name: observed[item.name] for item in self.config.inputs}
        for camera in self.config.cameras:
            found[camera.name] = self.activation(self.obs_nets[camera.name](self._cropped(camera, found[camera.name])))
        return torch.cat([*found.values()], dim=-1)

    def _cropped(self, camera: Input, frames: Tensor) -> Tensor:
        height, width = self.config.seen(camera)
        if not self.training:
            top, left = corner((camera.shape[1], camera.shape[2]), (height, width))
            return frames[:, :, top : top + height, left : left + width]
        tops = torch.randint(camera.shape[1] - height + 1, (len(frames),)).tolist()
        lefts = torch.randint(camera.shape[2] - width + 1, (len(frames),)).tolist()
        places = zip(frames, tops, lefts, strict=True)
        return torch.stack([frame[:, top : top + height, left : left + width] for frame, top, left in places])


def corner(frame: tuple[int, int], crop: tuple[int, int]) -> tuple[int, int]:
    """Top and left of a crop in the middle; a half is rounded to the even number, as in the public code."""
    top, left = (round((whole - part) / 2) for whole, part in zip(frame, crop, strict=True))
    return top, left

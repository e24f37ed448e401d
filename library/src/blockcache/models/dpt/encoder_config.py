"""How an observation of cameras and numbers becomes one vector for each moment: `encoder` in a policy's config.json.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from blockcache.errors import ContentError, PolicyError, short
from blockcache.files import Fields, read

GROUP = 16  # channels of one group of a norm
TAKEN = ("action", "action_pred", "features", "kept_features", "moments", "noise", "norms")
"""Names that files and exports use for something else."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_SIDE, _CHANNELS, _MOST = 4096, 64, 100_000


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
        shape, whole = self.shape, isinstance(self.shape, tuple) and all(type(size) is int for size in self.shape)
        if whole and len(shape) == 1 and 1 <= shape[0] <= _MOST:
            return
        if not (
            whole and len(shape) == 3 and 1 <= shape[0] <= _CHANNELS and all(1 <= side <= _SIDE for side in shape[1:])
        ):
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

    inputs     in the order in which they are joined
    crop       height and width of what is looked at, in the middle of every frame; None is the whole frame
    shared     whether all cameras have one network
    width      channels of the trunk's first stage; the public ones have 64, and other stages a multiple of it
    keypoints  of the spatial softmax
    features   numbers that a camera becomes
    """

    inputs: tuple[Input, ...]
    crop: tuple[int, int] | None = None
    shared: bool = False
    width: int = 64
    keypoints: int = 32
    features: int = 64

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
        for camera in self.cameras:
            self._check_crop(camera)
        if self.shared and len({(item.shape[0], self.seen(item)) for item in self.cameras}) > 1:
            raise PolicyError("cameras with a shared encoder need frames of one shape, or a crop to one")

    def _check_crop(self, camera: Input) -> None:
        if self.crop is None:
            return
        fits = isinstance(self.crop, tuple) and len(self.crop) == 2
        if not fits or any(
            type(side) is not int or not 1 <= side <= whole
            for side, whole in zip(self.crop, camera.shape[1:], strict=True)
        ):
            height, width = camera.shape[1:]
            raise PolicyError(
                f"the encoder's crop must be [height, width] within the frames of {camera.name!r}, {height} x {width}, or "
                f"null; got {short(self.crop)}"
            )

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

    @classmethod
    def from_dict(cls, value: Any) -> EncoderConfig:
        """From a config file; whatever is missing, unknown or of another type is refused."""
        try:
            return cls(**read(_FIELDS, value, "encoder"))
        except ContentError as error:
            raise PolicyError(f"the policy's config does not fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        inputs = [{"name": item.name, "shape": list(item.shape)} for item in self.inputs]
        crop = None if self.crop is None else list(self.crop)
        return {**asdict(self), "inputs": inputs, "crop": crop}


_FIELDS = Fields(
    {"inputs": tuple[Input, ...]},
    {"crop": tuple[int, int] | None, "shared": bool, "width": int, "keypoints": int, "features": int},
)

"""What the CLIP encoders of a DiT policy look like: their sizes, the cameras, and how frames are cut. Knows no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from blockcache.errors import PolicyError
from blockcache.files import Limit, Name

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
"""The words as token ids, and which of them are words: what LeRobot's tokenizing processor makes."""
CHANNELS = 3
Size: TypeAlias = Annotated[int, Limit(1, 100_000)]
Sides: TypeAlias = tuple[Size, Size]


@dataclass(frozen=True)
class Tower:
    """One of CLIP's two transformers. `hidden` is that of its MLPs, `places` its number of positions."""

    width: Size
    layers: Annotated[int, Limit(1, 1_000)]
    heads: Size
    hidden: Size
    places: Size

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise PolicyError(f"an encoder's width must be divisible by its heads, got {self.width} and {self.heads}")


@dataclass(frozen=True)
class ClipConfig:
    """CLIP's text encoder, which every policy has, and its vision encoder, for those with cameras.

    cameras   names of the cameras
    frame     height and width of their frames
    resize    what these are scaled to, and
    crop      what is then cut out of their middle; None leaves them
    shared    whether all cameras have one vision encoder
    patch     pixels of a patch's side
    vision    its transformer; None without cameras
    text      the text encoder's transformer
    words     how many kinds of tokens it knows
    tokens    how many of them an observation has
    """

    cameras: tuple[Name, ...]
    frame: Sides | None
    resize: Sides | None
    crop: Sides | None
    shared: bool
    patch: Size
    vision: Tower | None
    text: Tower
    words: Size
    tokens: Size

    def __post_init__(self) -> None:
        if self.tokens > self.text.places:
            raise PolicyError(f"the text encoder has {self.text.places} places, for {self.tokens} tokens")
        if bool(self.cameras) is (self.vision is None) or bool(self.cameras) is (self.frame is None):
            raise PolicyError("an encoder has cameras, their frames' sides and a vision encoder, or none of these")
        if self.vision is None or self.looked_at is None:
            return
        side = self.looked_at[0]
        if self.looked_at != (side, side) or side % self.patch or (side // self.patch) ** 2 + 1 != self.vision.places:
            raise PolicyError(
                f"the vision encoder's {self.vision.places} places are not those of {self.looked_at} pixels in patches of "
                f"{self.patch}; the policy's resize and crop must give CLIP the size that it was made for"
            )

    @property
    def looked_at(self) -> Sides | None:
        """Height and width of what CLIP is given."""
        return self.crop or self.resize or self.frame

    @property
    def features(self) -> int:
        """Numbers that all cameras become in one moment."""
        return 0 if self.vision is None else len(self.cameras) * self.vision.width

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.cameras, TOKENS, MASK)

    def shapes(self, moments: int) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its inputs, without the batch."""
        frames = dict.fromkeys(self.cameras, (moments, CHANNELS, *(self.frame or ())))
        return {**frames, TOKENS: (self.tokens,), MASK: (self.tokens,)}

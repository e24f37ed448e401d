"""CLIP's encoders for what cameras show and words say, built by `transformers` from sizes alone: nothing comes from a hub.

The weights are a checkpoint's own, under LeRobot's names. Tokenising is a processor's business: token ids come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.errors import ObservationError, PolicyError
from blockcache.extras import require
from blockcache.files import Name
from blockcache.models.own_policy import Depth, Size

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
"""The words as token ids, and which of them are words: what LeRobot's tokenizing processor makes."""
FEATURE = "observation.language.feature"
"""What the text encoder makes of the words: in their place an input of exports that serve several tasks."""
CHANNELS = 3
Sides: TypeAlias = tuple[Size, Size]


@dataclass(frozen=True)
class Tower:
    """One of CLIP's two transformers. `hidden` is that of its MLPs, `places` its number of positions."""

    width: Size
    layers: Depth
    heads: Size
    hidden: Size
    places: Size

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise PolicyError(f"an encoder's width must be divisible by its heads, got {self.width} and {self.heads}")


@dataclass(frozen=True)
class ClipConfig:
    """CLIP's text encoder, which every policy has, and its vision encoder, for those with cameras.

    cameras: names of the cameras.
    frame: height and width of their frames.
    resize: what these are scaled to, and `crop` what is then cut out of their middle; None leaves them.
    shared: whether all cameras have one vision encoder.
    patch: pixels of a patch's side.
    vision: its transformer; None without cameras.
    text: the text encoder's transformer.
    words: how many kinds of tokens it knows.
    tokens: how many of them an observation has.
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


_LARGEST = 2  # for CLIP's text encoder: the end of the words is the largest of the ids, as in OpenAI's own configs


class ClipEncoder(nn.Module):
    """What of an observation becomes numbers of every moment behind the state."""

    def __init__(self, config: ClipConfig, text_features: int) -> None:
        super().__init__()
        require("transformers", "lerobot", "a policy with CLIP encoders", error=PolicyError)
        self.config = config
        self.vision_encoder: nn.Module | None = None
        self.vision_encoders: nn.ModuleList | None = None
        if config.shared and config.cameras:
            self.vision_encoder = _Vision(config)
        elif config.cameras:
            self.vision_encoders = nn.ModuleList(_Vision(config) for _ in config.cameras)
        self.text_encoder = _Text(config, text_features)

    def forward(self, frames: Mapping[str, Tensor], observed: Mapping[str, Tensor], moments: int) -> list[Tensor]:
        """Normalised frames (B, moments, 3, h, w) by camera, and an observation with tokens and their mask (B, tokens) ->
        what cameras show (B, moments, features) and what words say (B, moments, text_features)."""
        shown = []
        for place, camera in enumerate(self.config.cameras):
            looked_at = cut(frames[camera].flatten(0, 1), self.config.resize, self.config.crop)
            shown.append(self.network(place)(looked_at).unflatten(0, (-1, moments)))
        said = self.say(observed[TOKENS], observed[MASK])
        return [*shown, said.unsqueeze(1).expand(-1, moments, -1)]

    def say(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """What words say, (B, text_features), by their token ids and which of these are words, (B, tokens) both."""
        ids = tokens.round().long()
        if bool((ids < 0).any()) or bool((ids >= self.config.words).any()):
            raise ObservationError(
                f"the observation {TOKENS!r} holds token ids outside 0 to {self.config.words - 1}, which the policy's text "
                "encoder does not know; tokenise with the policy's own tokenizer"
            )
        return self.text_encoder(ids, mask.round().long())

    def network(self, place: int) -> nn.Module:
        """CLIP's vision transformer for the camera at this place."""
        found = self.vision_encoder if self.vision_encoders is None else self.vision_encoders[place]
        assert found is not None
        return found


class _Vision(nn.Module):
    """A frame's class token, as CLIP's vision encoder has it before its last norm."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, CLIPVisionModel

        tower = config.vision
        assert tower is not None
        assert config.looked_at is not None
        model = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=tower.width,
                intermediate_size=tower.hidden,
                num_hidden_layers=tower.layers,
                num_attention_heads=tower.heads,
                num_channels=CHANNELS,
                image_size=config.looked_at[0],
                patch_size=config.patch,
                hidden_act="quick_gelu",
            )
        )
        self.model = _inner(model, "vision_model")

    def forward(self, frames: Tensor) -> Tensor:  # (n, 3, side, side) -> (n, width)
        return self.model(pixel_values=frames).last_hidden_state[:, 0]


class _Text(nn.Module):
    """What CLIP's text encoder makes of the words, projected."""

    def __init__(self, config: ClipConfig, features: int) -> None:
        super().__init__()
        from transformers import CLIPTextConfig, CLIPTextModel

        tower = config.text
        model = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=config.words,
                hidden_size=tower.width,
                intermediate_size=tower.hidden,
                num_hidden_layers=tower.layers,
                num_attention_heads=tower.heads,
                max_position_embeddings=tower.places,
                hidden_act="quick_gelu",
                bos_token_id=None,
                pad_token_id=None,
                eos_token_id=_LARGEST,
            )
        )
        self.text_encoder = _inner(model, "text_model")
        self.projection = nn.Linear(tower.width, features)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # (B, tokens) both -> (B, features)
        return self.projection(self.text_encoder(input_ids=tokens, attention_mask=mask).pooler_output)


def _inner(model: Any, name: str) -> nn.Module:
    """Before version 5 of transformers the network was one module further in; so names are the same with every version."""
    return getattr(model, name, model)


def cut(frames: Tensor, resize: Sides | None, crop: Sides | None) -> Tensor:
    """Frames (n, 3, h, w) scaled, then cut out of their middle."""
    if resize is not None and tuple(frames.shape[-2:]) != tuple(resize):
        frames = F.interpolate(frames, size=list(resize), mode="bilinear", antialias=True, align_corners=False)
    if crop is not None:
        top, left = (round((side - kept) / 2) for side, kept in zip(frames.shape[-2:], crop, strict=True))
        frames = frames[..., top : top + crop[0], left : left + crop[1]]
    return frames


def canonical(name: str) -> str | None:
    """A tensor's name in a checkpoint, whatever version of transformers wrote it, as it is here; None is left aside."""
    if name.endswith("embeddings.position_ids"):
        return None
    return name.replace(".text_encoder.text_model.", ".text_encoder.").replace(".model.vision_model.", ".model.")

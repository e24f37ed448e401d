"""How DP-T is trained: on noise, with normalised observations, or with frames and an encoder that learns too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockcache.models.dpt.denoiser import DiffusionTransformer
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import DDPM
from blockcache_lab.training.data import TrainingError
from blockcache_lab.training.recipes.base import Recipe

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig

_SPREAD = 0.7  # of a layer's weights, times the root of its width
_BRANCH, _HEAD = 0.3, 0.1  # of that at the ends of residual branches, and of the network
_OBSERVED = 4.0  # spread of the observations' first weights: a hundredth of their range is to make a difference


class DPTRecipe(Recipe):
    horizon = 10
    n_obs_steps = 2
    has_dropout = True
    starts = ("public", "scaled")

    def check_task(self, spec: TaskSpec) -> None:
        odd = [name for name, shape in spec.shapes.items() if len(shape) != (3 if name in spec.cameras else 1)]
        if odd or (spec.inputs is not None and not spec.cameras):
            shapes = ", ".join(f"{name} {shape}" for name, shape in spec.shapes.items())
            raise TrainingError(
                f"a dpt policy sees one row of numbers, or cameras and rows of numbers; task {spec.name!r} shows {shapes}"
            )

    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> DPTConfig:
        encoder = _encoder(settings)
        return DPTConfig(
            obs_dim=settings.spec.obs_dim if encoder is None else encoder.size,
            action_dim=settings.spec.action_dim,
            horizon=settings.horizon,
            n_obs_steps=settings.n_obs_steps,
            n_action_steps=settings.n_action_steps,
            n_layer=settings.layers,
            n_head=settings.heads,
            n_emb=settings.width,
            p_drop_attn=settings.dropout,
            sampler=DDPM(),
            encoder=encoder,
            task=settings.task,
            weights="ema",
            training=training,
        )

    def begin(self, config: DPTConfig, start: str = "public") -> DiffusionTransformerPolicy:
        policy = DiffusionTransformerPolicy(config)
        if start == "scaled":
            _scale(policy.model)
        return policy

    def denoiser(self, policy: DiffusionTransformerPolicy) -> nn.Module:
        return policy.model

    def learnt(self, policy: DiffusionTransformerPolicy, frozen: bool = False) -> dict[str, Tensor]:
        """The denoiser's by their own names, and the encoder's."""
        encoder = () if policy.obs_encoder is None or frozen else policy.obs_encoder.named_parameters()
        return super().learnt(policy) | {f"obs_encoder.{name}": weight for name, weight in encoder}


@torch.no_grad()
def _scale(model: DiffusionTransformer) -> None:
    """Draw the weights by the width of each layer. The public recipe's spread of 0.02 is right for a width of 768; through a
    narrow network hardly anything of an observation comes at first."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=_SPREAD * module.in_features**-0.5)
        elif isinstance(module, nn.MultiheadAttention):
            module.in_proj_weight.normal_(std=_SPREAD * module.embed_dim**-0.5)
    for module in model.modules():
        if isinstance(module, nn.TransformerDecoderLayer):
            for branch_end in (module.self_attn.out_proj, module.multihead_attn.out_proj, module.linear2):
                branch_end.weight.mul_(_BRANCH)
    model.head.weight.mul_(_HEAD)
    if model.cond_obs_emb is not None:
        model.cond_obs_emb.weight.normal_(std=_OBSERVED)
        model.cond_obs_emb.bias.uniform_(-_OBSERVED, _OBSERVED)


def _encoder(settings: TrainConfig) -> EncoderConfig | None:
    """Cropped as asked for, or as in the public recipe: four fifths of a side are left for crops at random to move in."""
    spec = settings.spec
    if spec.inputs is None:
        return None
    crop = settings.crop or 4 * min(side for name in spec.cameras for side in spec.inputs[name][1:]) // 5
    inputs = tuple(Input(name, tuple(shape)) for name, shape in spec.inputs.items())
    return EncoderConfig(inputs, (crop, crop), width=64 if settings.trunk is None else settings.trunk)

"""What the config of a Diffusion Policy run says of a camera policy (hybrid image policy), in our words.

The public code leaves the sizes of the cameras' networks to a library's defaults: those are told by the tensors. Knows
nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockcache.errors import PolicyError, short
from blockcache.foreign.configs import Config
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DPTConfig
from blockcache.models.dpt.public_settings import (
    NETWORK,
    branch_of,
    check_predicts_all,
    needed,
    network,
    origin,
    read_sampler,
    refuse_unknown,
)

_NETWORK = {
    **NETWORK,
    "n_layer": 8,
    "n_head": 4,
    "n_emb": 256,
    "causal_attn": True,
    "p_drop_emb": 0.0,
    "p_drop_attn": 0.3,
}
_POLICY = frozenset({
    "shape_meta", "horizon", "n_action_steps", "n_obs_steps", "num_inference_steps", "noise_scheduler", "crop_shape",
    "obs_encoder_group_norm", "eval_fixed_crop", "obs_as_cond", "pred_action_steps_only", *_NETWORK,
})  # fmt: skip
_TOLD = {"width": "backbone.nets.0.weight", "keypoints": "pool.nets.weight", "features": "nets.3.weight"}
"""Sizes of a camera's network, and the tensor of it that has so many rows."""


def camera_config(config: Config, record: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DPTConfig:
    """The config of a camera policy.

    config  of the run
    record  what shall be kept of where it came from
    shapes  of the tensors, by name
    """
    policy = branch_of(config, "policy")
    check_predicts_all(policy)
    if policy.get("obs_encoder_group_norm", False) is not True:
        raise PolicyError("policy.obs_encoder_group_norm is not true: camera policies are known with group norms only")
    if policy.get("obs_as_cond", True) is not True:
        raise PolicyError("policy.obs_as_cond is not true: what cameras see cannot be in-painted here")
    meta = needed(policy, "shape_meta")
    described = meta.get("obs") if isinstance(meta, dict) else None
    if not isinstance(described, dict):
        raise PolicyError(f"policy.shape_meta in the config must have obs and action, got {short(meta)}")
    encoder = _encoder(policy, tuple(_input(name, about) for name, about in described.items()), shapes)
    (action_dim,) = _shape("action", meta.get("action"), ("low_dim",))
    sizes = {name: needed(policy, name) for name in ("horizon", "n_obs_steps", "n_action_steps")}
    return DPTConfig(
        obs_dim=encoder.size,
        action_dim=action_dim,
        encoder=encoder,
        sampler=read_sampler(policy, _POLICY),
        **sizes,
        **network(policy, _NETWORK),
        **origin(config, record),
    )


def _input(name: str, about: Any) -> Input:
    """A camera or numbers; the public code joins them in the order of the config, as we do."""
    return Input(name, _shape(name, about, ("low_dim", "rgb")))


def _shape(name: str, about: Any, kinds: tuple[str, ...]) -> tuple[int, ...]:
    kind, shape = (about.get("type", "low_dim"), about.get("shape")) if isinstance(about, dict) else (None, None)
    if kind not in kinds or not isinstance(shape, list) or len(shape) != (3 if kind == "rgb" else 1):
        raise PolicyError(
            f"policy.shape_meta in the config has {short(name)} as {short(about)}; expected a camera (type rgb, shape "
            "[channels, height, width]) or numbers (type low_dim, shape [count])"
        )
    refuse_unknown(f"policy.shape_meta of {short(name)}", about, {"type", "shape"})
    return tuple(shape)


def _encoder(
    policy: Mapping[str, Any], inputs: tuple[Input, ...], shapes: Mapping[str, tuple[int, ...]]
) -> EncoderConfig:
    crop = policy.get("crop_shape", [76, 76])
    if crop is not None and policy.get("eval_fixed_crop", False) is not True:
        raise PolicyError("policy.eval_fixed_crop is not true: frames would be cropped at random where the policy runs")
    net = next((f"obs_encoder.obs_nets.{item.name}" for item in inputs if item.is_camera), None)
    sizes: dict[str, Any] = {}
    for size, tensor in _TOLD.items() if net is not None else ():  # without a camera, the encoder says so
        if not (shape := shapes.get(f"{net}.{tensor}")):
            raise PolicyError(
                f"the weights lack {net}.{tensor}: expected a ResNet18 with a spatial softmax and a linear layer behind "
                "it for every camera"
            )
        sizes[size] = shape[0]
    return EncoderConfig(inputs, tuple(crop) if isinstance(crop, list) else crop, **sizes)

"""What the config of a Diffusion Policy run says of its policy: sizes, heads, sampler, which weights.

Names and defaults are those of the public code, and what stands there that is not known is refused, since it could move
actions. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from blockcache.errors import PolicyError, short, shortened
from blockcache.foreign.configs import Config
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DPTConfig
from blockcache.samplers import SamplerConfig
from blockcache.samplers.diffusers import from_config, scheduler_names

LOW_DIM, HYBRID = "DiffusionTransformerLowdimPolicy", "DiffusionTransformerHybridImagePolicy"
DENOISER = "TransformerForDiffusion"
TASKS = {"pusht_lowdim": "pusht", "pusht_image": "pusht-image"}
"""The public code's names of tasks that we have too, with the same observation."""
_POLICY = frozenset({
    "horizon", "obs_dim", "action_dim", "n_action_steps", "n_obs_steps", "num_inference_steps", "obs_as_cond",
    "pred_action_steps_only", "model", "noise_scheduler",
})  # fmt: skip
_NETWORK: dict[str, Any] = {
    "n_layer": 12,
    "n_head": 12,
    "n_emb": 768,
    "p_drop_emb": 0.1,
    "p_drop_attn": 0.1,
    "causal_attn": False,
    "time_as_cond": True,
    "n_cond_layers": 0,
}
"""The settings of the transformer, with the public code's defaults."""
_MODEL_SIZES = frozenset({
    "input_dim", "output_dim", "horizon", "n_obs_steps", "cond_dim", "obs_as_cond",
})  # fmt: skip
_STEP_ARGUMENTS = frozenset({"eta"})
_CAMERA_NETWORK = {
    **_NETWORK,
    "n_layer": 8,
    "n_head": 4,
    "n_emb": 256,
    "causal_attn": True,
    "p_drop_emb": 0.0,
    "p_drop_attn": 0.3,
}
_CAMERA_POLICY = frozenset({
    "shape_meta", "horizon", "n_action_steps", "n_obs_steps", "num_inference_steps", "noise_scheduler", "crop_shape",
    "obs_encoder_group_norm", "eval_fixed_crop", "obs_as_cond", "pred_action_steps_only", *_CAMERA_NETWORK,
})  # fmt: skip
_TOLD = {"width": "backbone.nets.0.weight", "keypoints": "pool.nets.weight", "features": "nets.3.weight"}
"""Sizes of a camera's network, and the tensor of it that has so many rows."""


def architecture(config: Config) -> str:
    """LOW_DIM or HYBRID; any other policy is refused, with what was found and what is known."""
    targets = {place: config.get(f"{place}._target_", None) for place in ("policy", "policy.model")}
    names = {place: _class(target) for place, target in targets.items()}
    if any("unet" in name.lower() for name in names.values()):
        raise PolicyError(f"this is a U-Net ({_found(names)}); block-wise caching needs the transformer")
    known = names["policy"] in (LOW_DIM, HYBRID) and names["policy.model"] in ("", DENOISER)
    if not known or (names["policy"] == LOW_DIM and not names["policy.model"]):
        raise PolicyError(
            f"an architecture that we do not know ({_found(names)}); known are {LOW_DIM} with the model {DENOISER}, "
            f"and {HYBRID}"
        )
    return names["policy"]


def uses_ema(config: Config) -> bool:
    """Whether the averaged weights are the ones to use."""
    value = config.get("training.use_ema")
    if not isinstance(value, bool):
        raise PolicyError(f"training.use_ema in the config must be true or false, got {short(value)}")
    return value


def low_dim_config(config: Config, record: Mapping[str, Any]) -> DPTConfig:
    """The config of a low-dimensional policy; `record` is what shall be kept of where it came from."""
    policy, model = branch_of(config, "policy"), branch_of(config, "policy.model")
    refuse_unknown("policy.model", model, {*_NETWORK, *_MODEL_SIZES})
    obs_as_cond = policy.get("obs_as_cond", False)
    sizes = {
        name: needed(policy, name) for name in ("horizon", "obs_dim", "action_dim", "n_obs_steps", "n_action_steps")
    }
    obs, action = (value if type(value) is int else 0 for value in (sizes["obs_dim"], sizes["action_dim"]))
    expected = {
        "input_dim": action if obs_as_cond else action + obs,
        "output_dim": action if obs_as_cond else action + obs,
        "cond_dim": obs if obs_as_cond else 0,
        "horizon": sizes["horizon"],
        "n_obs_steps": sizes["n_obs_steps"],
    }
    for name, value in expected.items():
        given = model.get(name, 0 if name == "cond_dim" else None)
        if given != value and not (name == "n_obs_steps" and not obs_as_cond):
            raise PolicyError(f"policy.model.{name} is {short(given)}, the rest of the config needs {short(value)}")
    common = common_settings(config, record, policy, _POLICY, {**_NETWORK, **model})
    return DPTConfig(obs_as_cond=obs_as_cond, **sizes, **common)


def camera_config(config: Config, record: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DPTConfig:
    """The config of a camera policy.

    The public code leaves the sizes of the cameras' networks to a library's defaults: those are told by the tensors.

    Args:
        config: of the run.
        record: what shall be kept of where it came from.
        shapes: of the tensors, by name.
    """
    policy = branch_of(config, "policy")
    if policy.get("obs_encoder_group_norm", False) is not True:
        raise PolicyError("policy.obs_encoder_group_norm is not true: camera policies are known with group norms only")
    if policy.get("obs_as_cond", True) is not True:
        raise PolicyError("policy.obs_as_cond is not true: what cameras see cannot be in-painted here")
    meta = needed(policy, "shape_meta")
    described = meta.get("obs") if isinstance(meta, dict) else None
    if not isinstance(described, dict):
        raise PolicyError(f"policy.shape_meta in the config must have obs and action, got {short(meta)}")
    # the public code joins inputs in the order of the config, as is done here
    inputs = tuple(Input(name, _shape(name, about, ("low_dim", "rgb"))) for name, about in described.items())
    encoder = _encoder(policy, inputs, shapes)
    (action_dim,) = _shape("action", meta.get("action"), ("low_dim",))
    sizes = {name: needed(policy, name) for name in ("horizon", "n_obs_steps", "n_action_steps")}
    common = common_settings(config, record, policy, _CAMERA_POLICY, {**_CAMERA_NETWORK, **policy})
    return DPTConfig(obs_dim=encoder.size, action_dim=action_dim, encoder=encoder, **sizes, **common)


def common_settings(
    config: Config,
    record: Mapping[str, Any],
    policy: Mapping[str, Any],
    known: Collection[str],
    network: Mapping[str, Any],
) -> dict[str, Any]:
    """What both kinds of policy have in common: transformer, sampler, and what is kept of where a policy came from.

    Args:
        config: of the run.
        record: what shall be kept besides the task's name.
        policy: its branch of the policy.
        known: what may stand there; all else is handed to the scheduler's step.
        network: the settings of the transformer, among others.
    """
    if policy.get("pred_action_steps_only", False) is not False:
        raise PolicyError("pred_action_steps_only: a policy that predicts executed actions alone is not known here")
    found = {name: network[name] for name in _NETWORK}
    if found["time_as_cond"] is False:
        found["n_cond_layers"] = 0  # there is nothing that they would encode
    named = config.get("task.name", None)
    called = shortened(named, 200) if isinstance(named, str) else None
    return found | {
        "sampler": read_sampler(policy, known),
        "task": TASKS.get(str(called)),
        "weights": "ema" if uses_ema(config) else "model",
        "training": {**record, "task": called},
    }


def read_sampler(policy: Mapping[str, Any], known: Collection[str]) -> SamplerConfig:
    """The sampler of a policy's branch of the config. What the policy does not know it hands to the scheduler's step."""
    step_arguments = {name: value for name, value in policy.items() if name not in known and not name.startswith("_")}
    refuse_unknown("policy", step_arguments, _STEP_ARGUMENTS)
    scheduler = needed(policy, "noise_scheduler")
    if not isinstance(scheduler, dict):
        raise PolicyError(f"policy.noise_scheduler in the config must have names, got {short(scheduler)}")
    name = _class(scheduler.get("_target_"))
    settings = {key: value for key, value in scheduler.items() if not key.startswith("_")}
    steps = policy.get("num_inference_steps")
    sampler, missed = from_config(name, settings, steps, step_arguments)
    if sampler is None:
        raise PolicyError(f"its sampler cannot be followed: {missed}; known are {', '.join(scheduler_names())}")
    return sampler


def branch_of(config: Config, path: str) -> dict[str, Any]:
    """What the config says under several names."""
    found = config.get(path)
    if not isinstance(found, dict):
        raise PolicyError(f"{path} in the config must have names, got {short(found)}")
    return found


def needed(branch: Mapping[str, Any], name: str) -> Any:
    """A setting of the policy that has no default."""
    if name not in branch:
        raise PolicyError(f"the config lacks policy.{name}")
    return branch[name]


def refuse_unknown(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse names that are not known there: what they mean could move actions."""
    odd = sorted(name for name in given if name not in known and not name.startswith("_"))
    if odd:
        names = shortened(", ".join(odd), 200)
        raise PolicyError(
            f"{where} in the config has {names}, which the public code does not know or we do not; known are "
            f"{', '.join(sorted(known))}"
        )


def _class(target: Any) -> str:
    """The class at the end of a path such as package.module.Class."""
    return shortened(target.rpartition(".")[2], 80) if isinstance(target, str) else ""


def _found(names: Mapping[str, str]) -> str:
    return ", ".join(f"{place} is {name}" for place, name in names.items() if name) or "the config names no policy"


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

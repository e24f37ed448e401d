"""Policy directories that LeRobot wrote, opened without LeRobot: `config.json`, `model.safetensors`, its processors' files.

Settings and statistics are read here and become a `DiTPolicy`. Nothing comes from a hub and no code of the directory is
run; the CLIP encoders are built from the sizes of the checkpoint's own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from blockcache.errors import PolicyError, short, shortened
from blockcache.files import Fields, PathLike, TensorInfo, dict_of, read, read_tensors, reading
from blockcache.models.checkpoint import WHAT, check_sizes, policy_from
from blockcache.models.dit.clip import CHANNELS, ClipConfig, Tower, canonical
from blockcache.models.dit.policy import DiTConfig, DiTPolicy
from blockcache.models.dit.processors import statistics_of
from blockcache.models.policy_files import CONFIG, FORMAT, WEIGHTS, config_file, policy_directory
from blockcache.samplers import Euler, SamplerConfig
from blockcache.samplers.diffusers import from_config

TYPE, PLUGIN = "multi_task_dit", "blockcache"
_KINDS = {
    "diffusion": "a U-Net: it has convolutions and no transformer blocks whose outputs could be kept",
    "act": "a transformer that gives its chunk at once: there are no denoising steps between which outputs could be kept",
    "vqbet": "a transformer that chooses among coded actions at once, without denoising steps",
    "tdmpc": "a world model of small networks that plans by trying actions, no transformer",
    **dict.fromkeys(("sac", "gaussian_actor"), "an actor of small networks, trained by reinforcement, no transformer"),
    "pi0_fast": "a vision-language model that writes actions as tokens, one after the other, without denoising steps",
    **dict.fromkeys(
        ("pi0", "pi05", "smolvla", "groot", "xvla", "wall_x"),
        "a vision-language model whose action expert takes few steps of flow matching; most of its time goes elsewhere",
    ),
}
"""What other policies of LeRobot's are, so that a refusal says why."""
STATE, ACTION = "observation.state", "action"
_FEATURE = Fields({"type": str, "shape": list[int]})
_DIFFUSION = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "clip_sample", "clip_sample_range",
    "prediction_type",
)  # fmt: skip
_SIZES = ("horizon", "n_obs_steps", "n_action_steps", "num_layers", "num_heads", "hidden_dim", "timestep_embed_dim")
_DEFAULTS: dict[str, Any] = {
    "objective": "diffusion", "noise_scheduler_type": "DDPM", "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2", "beta_start": 0.0001, "beta_end": 0.02, "prediction_type": "epsilon",
    "clip_sample": True, "clip_sample_range": 1.0, "num_inference_steps": None, "num_integration_steps": 100,
    "integration_method": "euler", "horizon": 32, "n_obs_steps": 2, "n_action_steps": 24, "num_layers": 6,
    "num_heads": 8, "hidden_dim": 512, "timestep_embed_dim": 256, "use_rope": True, "rope_base": 10_000.0,
    "use_positional_encoding": False, "vision_encoder_name": "openai/clip-vit-base-patch16",
    "text_encoder_name": "openai/clip-vit-base-patch16", "use_separate_rgb_encoder_per_camera": False,
    "image_resize_shape": None, "image_crop_shape": (224, 224), "tokenizer_max_length": 77, "use_peft": False,
}  # fmt: skip
"""What decides an action, with the values that LeRobot gives where a config says nothing."""
_IDLE = {
    "type", "input_features", "output_features", "normalization_mapping", "device", "use_amp", "push_to_hub",
    "repo_id", "private", "tags", "license", "pretrained_path", "pretrained_revision", "sigma_min",
    "timestep_sampling_strategy", "timestep_sampling_s", "timestep_sampling_alpha", "timestep_sampling_beta",
    "dropout", "vision_encoder_lr_multiplier", "image_crop_is_random", "tokenizer_padding", "tokenizer_padding_side",
    "tokenizer_truncation", "optimizer_lr", "optimizer_betas", "optimizer_eps", "optimizer_weight_decay",
    "scheduler_name", "scheduler_warmup_steps", "do_mask_loss_for_padding", "drop_n_last_frames",
}  # fmt: skip
"""What is read elsewhere, or counts in training alone."""


def is_lerobot(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of LeRobot's: those say a `type`, this package's a `family`."""
    return "type" in config and "family" not in config


def load_policy(source: PathLike) -> DiTPolicy:
    """A policy directory that LeRobot wrote. It comes in eval mode, float32, on the CPU; actions are in robot units.

    Args:
        source: the directory.
    """
    config, tensors = read_directory(source)
    with reading(WHAT, policy_directory(source) / WEIGHTS):
        return policy_from(DiTPolicy, config, tensors)


def read_directory(source: PathLike) -> tuple[DiTConfig, dict[str, Tensor]]:
    """The config of a directory of LeRobot's, and its tensors by this package's names, the normaliser's among them."""
    directory = policy_directory(source)
    with FORMAT.reading(directory / CONFIG):
        settings = read_settings(FORMAT.load(config_file(directory)))
    found: list[DiTConfig] = []

    def check(infos: Mapping[str, TensorInfo]) -> None:
        with FORMAT.reading(directory / CONFIG):
            found.append(translated(settings, infos))
        check_sizes(found[0], len(infos), sum(math.prod(info.shape) for info in infos.values()))

    again = "save the policy again with LeRobot"
    _, tensors = read_tensors(directory / WEIGHTS, WHAT, again, safetensors.torch.load, check)
    with reading(WHAT, directory / WEIGHTS):
        own = _renamed(tensors)
    config = found[0]
    sizes = {**config.state, **dict.fromkeys(config.cameras, CHANNELS), ACTION: config.action_dim}
    return config, {**own, **statistics_of(directory, sizes)}


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By this package's names; a tensor that is there under the names of two versions of transformers must be one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = canonical(name)
        if new is None:
            continue
        if new in found and not torch.equal(found[new], tensor):
            raise PolicyError(
                f"{name} is another name of {new}, and the two differ; save the policy again with LeRobot"
            )
        found[new] = tensor
    return found


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """LeRobot's settings with its defaults filled in; a policy that is no DiT, or one of an unknown version, is refused."""
    kind = config["type"]
    if kind == PLUGIN:
        raise PolicyError(
            "this directory was made of a LeRobot policy for LeRobot's commands (--policy.path); name the original's "
            "directory, or the export policy.onnx in this one"
        )
    if kind != TYPE:
        what = _KINDS.get(kind) if isinstance(kind, str) else None
        this = (
            f"this is LeRobot's {kind!r} policy, {what}"
            if what
            else f"LeRobot's policies of type {short(kind)} are not known"
        )
        raise PolicyError(f"{this}; of LeRobot's policies this opens those of type {TYPE!r}")
    others = sorted(set(config) - set(_DEFAULTS) - set(_IDLE))
    if others:
        raise PolicyError(
            f"LeRobot's config holds settings of a version that is not known: {shortened(', '.join(others), 100)}; known "
            f"are those of {TYPE} as of August 2026 ({', '.join(sorted(_DEFAULTS))})"
        )
    read(Fields({}, dict.fromkeys(_SIZES, int), others=True), config)
    features = {
        name: read(dict_of(_FEATURE), config.get(name) or {}, name) for name in ("input_features", "output_features")
    }
    settings = {**_DEFAULTS, **{name: config[name] for name in config if name in _DEFAULTS}, **features}
    if settings["use_peft"]:
        raise PolicyError("a policy with PEFT adapters is not known; merge the adapters into the weights first")
    for name in ("vision_encoder_name", "text_encoder_name"):
        if not str(settings[name]).startswith("openai/clip-vit-"):
            raise PolicyError(
                f"{name} is {short(settings[name])}, known are OpenAI's CLIP models (openai/clip-vit-...)"
            )
    return settings


def translated(settings: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> DiTConfig:
    """The config of a policy: LeRobot's settings, and sizes of the encoders by the checkpoint's tensors."""
    inputs, outputs = settings["input_features"], settings["output_features"]
    for name, features in ((STATE, inputs), (ACTION, outputs)):
        if name not in features or len(features[name]["shape"]) != 1:
            raise PolicyError(f"LeRobot's config has no feature {name!r} of one number after the other")
    return DiTConfig(
        state={STATE: inputs[STATE]["shape"][0]},
        action_dim=outputs[ACTION]["shape"][0],
        **{name: settings[name] for name in (*_SIZES, "use_rope", "rope_base", "use_positional_encoding")},
        sampler=_sampler(settings),
        encoder=_encoder(settings, {canonical(name): tuple(info.shape) for name, info in infos.items()}),
        training={"converted_from": f"LeRobot {TYPE}"},
    )


def _sampler(settings: Mapping[str, Any]) -> SamplerConfig:
    if settings["objective"] == "flow_matching":
        if settings["integration_method"] != "euler":
            raise PolicyError(
                f"flow matching by {short(settings['integration_method'])} is not known here, only by euler; set "
                'integration_method in config.json, or accelerate the live policy, which engine="patched" takes as it is'
            )
        return Euler(num_inference_steps=settings["num_integration_steps"])
    if settings["objective"] != "diffusion":
        raise PolicyError(f"the objective is {short(settings['objective'])}, known are diffusion and flow_matching")
    chosen = {name: settings[name] for name in _DIFFUSION}
    name = f"{settings['noise_scheduler_type']}Scheduler"
    found, reason = from_config(name, chosen, settings["num_inference_steps"], {})
    if found is None:
        raise PolicyError(f"LeRobot's config asks for {reason}, which is not known; known are DDPM and DDIM")
    return found


def _encoder(settings: Mapping[str, Any], shapes: Mapping[str | None, tuple[int, ...]]) -> ClipConfig:
    cameras = {name: item["shape"] for name, item in settings["input_features"].items() if item["type"] == "VISUAL"}
    frames = {tuple(shape) for shape in cameras.values()}
    if len(frames) > 1 or any(len(shape) != 3 or shape[0] != CHANNELS for shape in frames):
        raise PolicyError(f"the cameras' frames must have one shape, (3, height, width); got {sorted(frames)}")
    frame = next(iter(frames))[1:] if frames else None
    resize, crop = (
        read(tuple[int, int] | None, settings[f"image_{name}_shape"], "image_shape") for name in ("resize", "crop")
    )
    room = resize or frame
    if room is None or crop is None or crop[0] > room[0] or crop[1] > room[1]:
        crop = None  # as LeRobot has it: what does not fit is not cut
    shared = not settings["use_separate_rgb_encoder_per_camera"]
    own = "vision_encoder" if shared else "vision_encoders.0"
    vision = f"observation_encoder.{own}.model"
    text = "observation_encoder.text_encoder.text_encoder"
    return ClipConfig(
        cameras=tuple(cameras),
        frame=frame,
        resize=resize,
        crop=crop,
        shared=shared,
        patch=shape_of(shapes, f"{vision}.embeddings.patch_embedding.weight", 4)[-1] if cameras else 1,
        vision=tower_of(shapes, vision) if cameras else None,
        text=tower_of(shapes, text),
        words=shape_of(shapes, f"{text}.embeddings.token_embedding.weight", 2)[0],
        tokens=settings["tokenizer_max_length"],
    )


def tower_of(shapes: Mapping[str | None, tuple[int, ...]], prefix: str) -> Tower:
    """CLIP's sizes; its heads, of which no tensor tells, have 64 numbers each in all of OpenAI's."""
    places, width = shape_of(shapes, f"{prefix}.embeddings.position_embedding.weight", 2)
    layers = 0
    while f"{prefix}.encoder.layers.{layers}.mlp.fc1.weight" in shapes:
        layers += 1
    hidden = shape_of(shapes, f"{prefix}.encoder.layers.0.mlp.fc1.weight", 2)[0]
    return Tower(width=width, layers=layers, heads=max(1, width // 64), hidden=hidden, places=places)


def shape_of(shapes: Mapping[str | None, tuple[int, ...]], name: str, axes: int) -> tuple[int, ...]:
    if len(found := shapes.get(name, ())) != axes:
        raise PolicyError(f"the weights do not fit the policy's config: missing {name}")
    return found

"""Checkpoints of the public Diffusion Policy code, made into policies. Nothing of a checkpoint is run.

A checkpoint is what its `BaseWorkspace.save_checkpoint` wrote: the config of the run, the tensors of the model, of its
average and of the optimiser, and other pickles, which stay closed. Settings come from the config, since tensors do not tell
heads, sampler or clipping, and the tensors must be just those that the config calls for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from blockcache.cache import Cache, source_hash
from blockcache.errors import ContentError, FileError, PolicyError, short, shortened
from blockcache.files import PathLike, digest, opened
from blockcache.foreign.configs import Config
from blockcache.foreign.pickles import as_mapping
from blockcache.foreign.torch_file import StoredTensor, TorchFile
from blockcache.models.checkpoint import check_sizes, load, load_tensors, naming, read_stored, save
from blockcache.models.dpt.encoder import EncoderConfig, Input, network_sizes
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.policy_files import check_new
from blockcache.progress import progress_bar
from blockcache.samplers import SamplerConfig
from blockcache.samplers.diffusers import from_config, scheduler_names

WHAT = "checkpoint"
_CONVERTED = Cache("a converted checkpoint", "policy")
LOW_DIM, HYBRID = "DiffusionTransformerLowdimPolicy", "DiffusionTransformerHybridImagePolicy"
DENOISER = "TransformerForDiffusion"
TASKS = {"pusht_lowdim": "pusht", "pusht_image": "pusht-image"}
"""The public code's names of tasks that this package has too, with the same observation."""
_POLICY = frozenset({
    "horizon", "obs_dim", "action_dim", "n_action_steps", "n_obs_steps", "num_inference_steps", "obs_as_cond",
    "pred_action_steps_only", "model", "noise_scheduler",
})  # fmt: skip
_NETWORK: dict[str, Any] = {
    "n_layer": 12, "n_head": 12, "n_emb": 768, "p_drop_emb": 0.1, "p_drop_attn": 0.1, "causal_attn": False,
    "time_as_cond": True, "n_cond_layers": 0,
}  # fmt: skip
"""The settings of the transformer, with the public code's defaults."""
_MODEL_SIZES = frozenset({
    "input_dim", "output_dim", "horizon", "n_obs_steps", "cond_dim", "obs_as_cond",
})  # fmt: skip
_CAMERA_NETWORK = {
    **_NETWORK, "n_layer": 8, "n_head": 4, "n_emb": 256, "causal_attn": True, "p_drop_emb": 0.0, "p_drop_attn": 0.3,
}  # fmt: skip
_CAMERA_POLICY = frozenset({
    "shape_meta", "horizon", "n_action_steps", "n_obs_steps", "num_inference_steps", "noise_scheduler", "crop_shape",
    "obs_encoder_group_norm", "eval_fixed_crop", "obs_as_cond", "pred_action_steps_only", *_CAMERA_NETWORK,
})  # fmt: skip


def convert_checkpoint(source: PathLike, directory: PathLike) -> DiffusionTransformerPolicy:
    """Write the policy directory of a checkpoint, and return the policy.

    Args:
        source: a file that the public Diffusion Policy code wrote.
        directory: where the policy shall be; nothing may be there yet.
    """
    check_new(directory)
    policy = read_checkpoint(source)
    save(policy, directory)
    return policy


def load_checkpoint(source: PathLike) -> DiffusionTransformerPolicy:
    """The policy of a checkpoint; converted once, and kept in the cache by the file's content."""
    with opened(source, WHAT) as (file, size):
        sha256 = _sha256(file, size)
        key = digest([sha256, source_hash(__file__)])
        policy = _CONVERTED.get(key, lambda directory: load(DiffusionTransformerPolicy, directory))
        if policy is None:
            policy = made = _converted(source, file, size, sha256)
            _CONVERTED.put(key, lambda directory: save(made, directory))
    return policy


def read_checkpoint(source: PathLike) -> DiffusionTransformerPolicy:
    """The policy of a checkpoint, in eval mode."""
    with opened(source, WHAT) as (file, size):
        return _converted(source, file, size, _sha256(file, size))


def _converted(source: PathLike, opened_file: BinaryIO, size: int, sha256: str) -> DiffusionTransformerPolicy:
    """The policy of an open checkpoint, which must hold the same bytes before and after it is read: those of its hash."""
    opened_file.seek(0)
    file = TorchFile(opened_file, size, WHAT, source)
    with naming(source, WHAT):
        content = as_mapping(file.content)
        if content is None or not {"cfg", "state_dicts"} <= content.keys():
            names = "" if content is None else shortened(", ".join(map(str, content)), 200)
            raise ContentError(
                "it is no checkpoint of Diffusion Policy: expected cfg and state_dicts in it, got "
                f"{names or type(file.content).__name__}"
            )
        config = Config(content["cfg"])
        kind = architecture(config)
        tensors = _tensors(file, content["state_dicts"], uses_ema(config))
        record = {"converted_from": shortened(Path(source).name, 200), "sha256": sha256}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        settings = camera_config(config, record, shapes) if kind == HYBRID else low_dim_config(config, record)
        storages = {tensor.storage for tensor in tensors.values()}
        check_sizes(settings, len(tensors), sum(storage.count for storage in storages))
        policy = DiffusionTransformerPolicy(settings)
        load_tensors(policy, _repeated(read_stored(file, tensors), policy))
    if _sha256(opened_file, size) != sha256:
        raise FileError(f"the {WHAT} {source} was changed while it was read; load it again once it is whole")
    return policy.eval()


def _tensors(file: TorchFile, states: Any, ema: bool) -> dict[str, StoredTensor]:
    """The weights that the config wants used, by name, still in the file."""
    held = as_mapping(states) or {}
    wanted = "ema_model" if ema else "model"
    state = as_mapping(held.get(wanted))
    if state is None:
        which = "the averaged weights (training.use_ema)" if ema else "weights that are not averaged"
        names = shortened(", ".join(map(str, held)), 200) or "nothing"
        raise PolicyError(
            f"the config wants {which}, but the checkpoint has no {wanted} (it holds {names}); take one that was saved "
            "with it"
        )
    found = {}
    for name, value in state.items():
        if not isinstance(name, str) or name.endswith("_dummy_variable"):
            continue
        try:
            found[name] = file.tensor(value)
        except ContentError as error:
            raise ContentError(f"{wanted} has {shortened(name, 80)}: {error}") from None
    return found


def _repeated(tensors: Mapping[str, Tensor], policy: DiffusionTransformerPolicy) -> dict[str, Tensor]:
    """The normaliser's tensors in full: the public code applies a shorter one, of an identity for example, over and over."""
    own = policy.state_dict()
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("normalizer.") and name in own and tensor.ndim == own[name].ndim == 1 and len(tensor):
            times, left = divmod(len(own[name]), len(tensor))
            found[name] = tensor if left else tensor.repeat(times)
    return found


def _sha256(file: BinaryIO, size: int) -> str:
    found = hashlib.sha256()
    file.seek(0)
    with progress_bar(desc="reading", total=size, unit="B", unit_scale=True, leave=False, delay=2.0) as bar:
        while part := file.read(2**22):
            found.update(part)
            bar.update(len(part))
    return found.hexdigest()


# -- the config of a run: defaults are those of the public code; what stands there that is not known is refused, since it
# -- could move actions


def architecture(config: Config) -> str:
    """LOW_DIM or HYBRID; any other policy is refused, with what was found and what is known."""
    targets = {place: config.get(f"{place}._target_", None) for place in ("policy", "policy.model")}
    names = {place: _class(target) for place, target in targets.items()}
    if any("unet" in name.lower() for name in names.values()):
        raise PolicyError(f"this is a U-Net ({_found(names)}); block-wise caching needs the transformer")
    known = names["policy"] in (LOW_DIM, HYBRID) and names["policy.model"] in ("", DENOISER)
    if not known or (names["policy"] == LOW_DIM and not names["policy.model"]):
        raise PolicyError(
            f"an architecture that blockcache does not know ({_found(names)}); known are {LOW_DIM} with the "
            f"model {DENOISER}, and {HYBRID}"
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
    refuse_unknown("policy", step_arguments, {"eta"})
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
            f"{where} in the config has {names}, which the public code or blockcache does not know; known are "
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
    sizes = {} if net is None else network_sizes(shapes, net)  # without a camera, the encoder says so
    return EncoderConfig(inputs, tuple(crop) if isinstance(crop, list) else crop, **sizes)

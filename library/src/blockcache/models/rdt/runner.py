"""The public RDT code's runner as `RDTPolicy` objects: its weights in a file, of which nothing is run, or a live object.

Of a file a state dict is enough: sizes, heads and adaptors show in the shapes of its tensors. It comes as safetensors, as
torch.save wrote it (`pytorch_model.bin`), or within what DeepSpeed wrote (`mp_rank_00_model_states.pt`, under "module").
What does not show, the sampler, the norms' kind and how many actions are executed, is as the public code has it, unless it
is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from blockcache.errors import ContentError, FileError, PolicyError, shortened
from blockcache.files import PathLike, read_tensors
from blockcache.foreign.pickles import as_mapping
from blockcache.foreign.torch_file import open_torch_file
from blockcache.models.checkpoint import check_sizes, naming, policy_from, read_stored, save
from blockcache.models.policy_files import check_new
from blockcache.models.rdt.denoiser import ADAPTORS, FRONT, RDTDenoiser
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy
from blockcache.models.rdt.port import norm_of, shaped
from blockcache.samplers.diffusers import from_diffusers

WHAT = "RDT weights"
MODULE = "module"
"""Where DeepSpeed keeps the model."""


def convert_weights(source: PathLike, directory: PathLike, **settings: Any) -> RDTPolicy:
    """Write the policy directory of a file of weights, and return the policy.

    Args:
        source: a state dict of the public runner.
        directory: where the policy shall be; nothing may be there yet.
        settings: of `RDTConfig`, where they do not show in the weights: sampler, norm, n_action_steps, lang_len.
    """
    check_new(directory)
    policy = read_weights(source, **settings)
    save(policy, directory)
    return policy


def read_weights(source: PathLike, **settings: Any) -> RDTPolicy:
    """The policy of a file of weights, in eval mode; the arguments of `convert_weights`."""
    if os.fspath(source).endswith(".safetensors"):
        _, tensors = read_tensors(source, WHAT, "fetch it again", safetensors.torch.load)
    else:
        tensors = _torch_tensors(source)
    with naming(source, WHAT):
        sizes = sizes_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        config = RDTConfig(**{**sizes, "n_action_steps": sizes["horizon"], **settings})
        check_sizes(config, len(tensors), sum(tensor.numel() for tensor in tensors.values()))
        return policy_from(RDTPolicy, config, tensors)


def _torch_tensors(source: PathLike) -> dict[str, Tensor]:
    with open_torch_file(source, WHAT) as file:
        content = as_mapping(file.content) or {}
        state = as_mapping(content[MODULE]) if MODULE in content else content
        try:
            stored = {str(name): file.tensor(value) for name, value in (state or {}).items()}
        except ContentError as error:
            held = shortened(", ".join(map(str, content)), 200) or type(file.content).__name__
            raise FileError(
                f"the {WHAT} {source} cannot be converted: expected tensors by name, or those under {MODULE!r}, got {held} "
                f"({error})"
            ) from error
        return read_stored(file, stored)


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What an RDTConfig says of sizes and adaptors, by the shapes of its tensors."""

    def shape(name: str, axes: int) -> tuple[int, ...]:
        found = shapes.get(name)
        if found is None or len(found) != axes:
            got = "no such tensor" if found is None else f"shape {found}"
            raise PolicyError(f"the weights are not those of an RDT: expected {name} with {axes} axes, got {got}")
        return found

    _, tokens, width = shape("model.x_pos_embed", 3)
    layers = {int(found.group(1)) for name in shapes if (found := re.match(r"model\.blocks\.(\d{1,4})\.", name))}
    (head,) = shape("model.blocks.0.attn.q_norm.weight", 1)
    inputs = {name: _adaptor(name, shapes, shape) for name in ("lang", "img", "state")}
    return {
        "action_dim": shape("model.final_layer.ffn_final.fc2.weight", 2)[0],
        "horizon": tokens - FRONT,
        "hidden_size": width,
        "depth": 1 + max(layers),
        "num_heads": width // max(head, 1),
        "max_lang_cond_len": shape("model.lang_cond_pos_embed", 3)[1],
        "img_cond_len": shape("model.img_cond_pos_embed", 3)[1],
        "lang_token_dim": inputs["lang"][1],
        "img_token_dim": inputs["img"][1],
        **{f"{name}_adaptor": kind for name, (kind, _) in inputs.items()},
    }


def _adaptor(name: str, shapes: Mapping[str, tuple[int, ...]], shape: Any) -> tuple[str, int]:
    """What the public code calls an adaptor, and the numbers that go into it."""
    alone = f"{name}_adaptor.weight"
    if alone in shapes:
        return "linear", shape(alone, 2)[1]
    count = sum(bool(re.fullmatch(rf"{name}_adaptor\.\d{{1,2}}\.weight", item)) for item in shapes)
    return f"mlp{count}x_gelu", shape(f"{name}_adaptor.0.weight", 2)[1]


def policy_of(runner: Any, n_action_steps: int | None = None) -> RDTPolicy:
    """A policy that takes one observation and shares the runner's modules; in eval mode if those are.

    Args:
        runner: has `model`, three adaptors, `noise_scheduler_sample` and `num_inference_timesteps`.
        n_action_steps: how many actions of a chunk are executed, all of them without it.
    """
    needed = ("model", *ADAPTORS, "noise_scheduler_sample", "num_inference_timesteps")
    if missing := [name for name in needed if getattr(runner, name, None) is None]:
        raise PolicyError(f"{type(runner).__name__} is no RDT runner: it lacks {', '.join(missing)}")
    if (lack := shaped(runner.model)) is not None:
        raise PolicyError(f"{type(runner).__name__} is no RDT runner: its model {lack}")
    sampler, unknown = from_diffusers(runner.noise_scheduler_sample, runner.num_inference_timesteps, {})
    if sampler is None:
        raise PolicyError(f"the runner's sampler is not known here: {unknown}")
    denoiser = RDTDenoiser(runner.model, runner.lang_adaptor, runner.img_adaptor, runner.state_adaptor)
    shapes = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    sizes = sizes_of(shapes)
    config = RDTConfig(
        **{**sizes, "n_action_steps": n_action_steps or sizes["horizon"]}, norm=norm_of(denoiser)[0], sampler=sampler
    )
    policy = RDTPolicy(config, denoiser)
    policy.training = denoiser.training = (
        runner.model.training
    )  # their own flags only: the runner's modules keep theirs
    return policy

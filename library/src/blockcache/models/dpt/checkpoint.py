"""Policy directories of DP-T: which tensors fit which config. `directory` reads and writes the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from blockcache.errors import PolicyError, shortened
from blockcache.files import PathLike, reading
from blockcache.models.directory import refuse_misfits, write_policy
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.reading import read_policy
from blockcache.models.weight_checks import check_action_scale, check_mask, check_weight


def load_policy(source: PathLike) -> DiffusionTransformerPolicy:
    """A shipped policy by name, or a policy directory. It comes in eval mode, float32, on the CPU."""
    config, tensors, place = read_policy(source, DPTConfig.from_dict, check_sizes)
    policy = DiffusionTransformerPolicy(config)
    with reading("policy weights", place):
        load_tensors(policy, tensors)
    return policy.eval()


def check_sizes(config: DPTConfig, tensors: int, held: int) -> None:
    """Refuse a config that would make a far larger network than its weights are, before that network is made.

    Bounds are enough here: which tensor differs is said once the network is there to compare with.

    config   what the network would be made by
    tensors  how many tensors there are
    held     how many numbers they hold
    """
    layers, tokens, width = config.n_layer + config.n_cond_layers, config.horizon, config.n_emb
    least = layers * 12 * width**2 + width * (tokens + config.obs_dim + config.sample_dim)
    least += tokens**2 if config.causal_attn else 0
    least += 0 if config.encoder is None else config.encoder.weights
    if layers * 12 > 12 + 2 * tensors or least > 1_000_000 + 4 * held:
        raise PolicyError(
            f"the weights do not fit the policy's config: {tensors:,} tensors of {held:,} numbers, expected {layers:,} "
            f"layers of {least:,} numbers at least"
        )


def save_policy(policy: DiffusionTransformerPolicy, directory: PathLike) -> None:
    """Write the policy's directory; an older one of the same name stays whole until the new one is complete.

    A directory that holds anything but a policy is refused; where the name is a link, its target is written.
    """
    if not isinstance(policy, DiffusionTransformerPolicy):
        refuse_foreign(policy)
    tensors = {names[0]: tensor.detach().cpu().contiguous() for names, tensor in _named_once(policy)}
    write_policy(directory, policy.config.to_dict(), tensors)


def refuse_foreign(policy: Any) -> NoReturn:
    """Of a policy that only its own code can save."""
    raise PolicyError(
        f"only policies of ours can be saved as a directory, got {type(policy).__name__}; keep your own checkpoint, and "
        "name a function that makes the policy from it (module:function) where a verb asks for POLICY"
    )


def load_tensors(policy: DiffusionTransformerPolicy, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors in by name, as a public checkpoint names them; a missing, unknown or misshapen one is refused.

    Left aside on both sides are tensors that take no part in an action: `_dummy_variable`s, and the statistics from
    which scales and offsets were once computed. A tensor with several names, as an encoder's have them, needs one of these;
    where there are more, they must agree.
    """
    own = policy.state_dict()
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("_dummy_variable")}
    groups = [names for names, _ in _named_once(policy)]
    missing = [names[0] for names in groups if given.keys().isdisjoint(names) and ".input_stats." not in names[0]]
    unknown = [name for name in given if name not in own]
    misshapen = [
        f"{shortened(name, 80)} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in given.items()
        if name in own and tensor.shape != own[name].shape
    ]
    refuse_misfits(missing, unknown, misshapen)
    for name, tensor in given.items():
        if name.endswith("input_stats.std"):
            continue  # for the record only
        if name.endswith("mask") and tensor.is_floating_point():
            check_mask(name, tensor)
        else:
            check_weight(name, tensor)
        if name.endswith("action.scale"):
            check_action_scale(tensor)
    for first, *others in ([name for name in names if name in given] for names in groups if len(names) > 1):
        if differing := [name for name in others if not torch.equal(given[name], given[first])]:
            raise PolicyError(
                f"the weights do not fit the policy's config: {first} and {differing[0]} are one tensor there, and differ "
                "here"
            )
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _named_once(policy: DiffusionTransformerPolicy) -> list[tuple[list[str], Tensor]]:
    """Every tensor once, with all of its names: a module that is part of two others has two."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())

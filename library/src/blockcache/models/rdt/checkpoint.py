"""Policy directories of RDT, `config.json` + `model.safetensors`, the tensors under the names of the public code.

A network is made without numbers and takes over those of the file, so that they are in memory once in the end, and twice
while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError, shortened
from blockcache.files import PathLike, reading
from blockcache.models.directory import refuse_misfits, write_policy
from blockcache.models.rdt.config import RDTConfig
from blockcache.models.rdt.denoiser import RDTDenoiser
from blockcache.models.rdt.policy import RDTPolicy
from blockcache.models.reading import read_policy
from blockcache.models.weight_checks import check_weight


def load_policy(source: PathLike) -> RDTPolicy:
    """A policy directory, by its path. It comes in eval mode, float32, on the CPU."""
    config, tensors, place = read_policy(source, RDTConfig.from_dict, check_sizes)
    with reading("policy weights", place):
        return made_of(config, tensors)


def check_sizes(config: RDTConfig, tensors: int, held: int) -> None:
    """Refuse a config that would make a far larger network than its weights are, before that network is made.

    config   what the network would be made by
    tensors  how many tensors there are
    held     how many numbers they hold
    """
    if config.depth * 21 > 100 + 2 * tensors or config.numbers > 1_000_000 + 4 * held:
        raise PolicyError(
            f"the weights do not fit the policy's config: {tensors:,} tensors of {held:,} numbers, expected "
            f"{config.depth:,} layers of {config.numbers:,} numbers at least"
        )


def made_of(config: RDTConfig, tensors: Mapping[str, Tensor]) -> RDTPolicy:
    """A policy in eval mode, of just these tensors, in float32; a missing, unknown or misshapen one is refused."""
    with torch.device("meta"):
        denoiser = RDTDenoiser.of(config)
    own = denoiser.state_dict()
    misshapen = [
        f"{shortened(name, 80)} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    refuse_misfits(
        [name for name in own if name not in tensors], [name for name in tensors if name not in own], misshapen
    )
    for name, tensor in tensors.items():
        check_weight(name, tensor)
    single = {name: nn.Parameter(tensor.to(torch.float32)) for name, tensor in tensors.items()}
    denoiser.load_state_dict(single, assign=True)
    return RDTPolicy(config, denoiser).eval()


def save_policy(policy: RDTPolicy, directory: PathLike) -> None:
    """Write the policy's directory; an older one of the same name stays whole until the new one is complete.

    A directory that holds anything but a policy is refused; where the name is a link, its target is written.
    """
    tensors = policy.denoiser.state_dict()
    write_policy(
        directory,
        policy.config.to_dict(),
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
    )

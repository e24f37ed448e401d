"""DiT policy directories: `config.json` + `model.safetensors`, strict to load; `directory` writes them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from blockcache.errors import PolicyError, shortened
from blockcache.files import PathLike, reading
from blockcache.models.directory import refuse_misfits, write_policy
from blockcache.models.dit.config import DiTConfig
from blockcache.models.dit.flops import CHUNKS
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.reading import read_policy
from blockcache.models.weight_checks import check_action_scale, check_weight

WHAT = "policy weights"


def load_policy(source: PathLike) -> DiTPolicy:
    """A policy directory of ours. It comes in eval mode, float32, on the CPU."""
    return made(*read_policy(source, DiTConfig.from_dict, check_sizes))


def made(config: DiTConfig, tensors: Mapping[str, Tensor], place: PathLike) -> DiTPolicy:
    """The policy of a config with these tensors, which are of the file at `place`; sizes are checked already."""
    policy = DiTPolicy(config)
    with reading(WHAT, place):
        load_tensors(policy, tensors)
    return policy.eval()


def load_tensors(policy: DiTPolicy, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors in by name; a missing, unknown or misshapen one is refused, and one that no action can come of."""
    own = policy.state_dict()
    misshapen = [
        f"{shortened(name, 80)} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    refuse_misfits([name for name in own if name not in tensors], [n for n in tensors if n not in own], misshapen)
    for name, tensor in tensors.items():
        check_weight(name, tensor)
    policy.load_state_dict(dict(tensors))
    check_action_scale(policy.normalizer.action.scale)


def check_sizes(config: DiTConfig, tensors: int, held: int) -> None:
    """Refuse a config that would make a far larger network than its weights are, before that network is made.

    config   what the network would be made by
    tensors  how many tensors there are
    held     how many numbers they hold
    """
    width, layers = config.hidden_dim, config.num_layers
    features = config.timestep_embed_dim + config.cond_dim
    least = layers * width * (12 * width + CHUNKS * features) + 2 * config.timestep_embed_dim**2
    least += config.horizon * width * config.use_positional_encoding + 2 * width * config.action_dim
    if config.encoder is not None:
        towers = [tower for tower in (config.encoder.vision, config.encoder.text) if tower is not None]
        least += sum(tower.layers * 4 * tower.width**2 + tower.places * tower.width for tower in towers)
        layers += sum(tower.layers for tower in towers)
    if layers * 8 > 12 + 2 * tensors or least > 1_000_000 + 4 * held:
        raise PolicyError(
            f"the weights do not fit the policy's config: {tensors:,} tensors of {held:,} numbers, expected {layers:,} "
            f"layers of {least:,} numbers at least"
        )


def save_policy(policy: DiTPolicy, directory: PathLike) -> None:
    """Write the policy's directory; an older one of the same name stays whole until the new one is complete."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    write_policy(directory, policy.config.to_dict(), tensors)

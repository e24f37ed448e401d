"""Small random RDT policies and what they observe."""

import torch
from conftest import randomise

from blockcache.models.rdt.policy import RDTConfig, RDTPolicy, public_sampler

SMALL = {
    "action_dim": 4,
    "horizon": 6,
    "n_action_steps": 3,
    "hidden_size": 32,
    "depth": 4,
    "num_heads": 4,
    "lang_token_dim": 7,
    "img_token_dim": 9,
    "max_lang_cond_len": 8,
    "img_cond_len": 10,
    "lang_len": 5,
}


def rdt_config(**changes):
    return RDTConfig(**{**SMALL, "sampler": public_sampler(6), **changes})


def rdt_policy(seed=0, **changes):
    return randomise(RDTPolicy(rdt_config(**changes)), seed).eval()


def rdt_observation(batch, config=None, seed=1, tokens=None):
    """An instruction of different lengths in a batch, a robot without the last number of an action."""
    config = config or rdt_config()
    generator = torch.Generator().manual_seed(seed)
    shapes = {**config.inputs, "lang_tokens": (tokens or config.lang_len, config.lang_token_dim)}
    obs = {name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()}
    lengths = 1 + torch.arange(batch) % shapes["lang_tokens"][0]
    obs["lang_attn_mask"] = torch.arange(shapes["lang_tokens"][0]) < lengths.flip(0)[:, None]
    obs["action_mask"] = torch.tensor([1.0] * (config.action_dim - 1) + [0.0]).expand(batch, 1, -1)
    obs["ctrl_freqs"] = 10.0 + torch.arange(batch)
    return obs

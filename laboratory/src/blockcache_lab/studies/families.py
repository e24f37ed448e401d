"""Which policies are accepted, and by which engines: found out by trying, on a small random policy of each kind.

A new family adds a line to `EXAMPLES`. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockcache.engines import accelerate
from blockcache.errors import EngineError
from blockcache.models.dit.policy import DiTConfig, DiTPolicy
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig, Shape
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy, public_sampler
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, Euler

ENGINES = ("patched", "loop", "onnx")


@dataclass(frozen=True)
class Accepted:
    """One kind of policy: the blocks of its layers, and by engine "yes", or "no" and what cannot be."""

    policy: str
    family: str
    blocks: str
    engines: Mapping[str, str]


def _dpt(**changes: Any) -> DiffusionTransformerPolicy:
    sizes: dict[str, Any] = {"obs_dim": 4, "action_dim": 2, "horizon": 4, "n_obs_steps": 2, "n_action_steps": 2}
    form = {"n_layer": 2, "n_head": 2, "n_emb": 8, "sampler": DDIM(num_inference_steps=2)}
    return DiffusionTransformerPolicy(DPTConfig(**{**sizes, **form, **changes})).eval()


def _dit(**changes: Any) -> DiTPolicy:
    sizes: dict[str, Any] = {"state": {"obs": 4}, "action_dim": 2, "horizon": 4, "n_action_steps": 2, "num_layers": 2}
    sizes |= {"num_heads": 2, "hidden_dim": 8, "timestep_embed_dim": 4, "sampler": DDIM(num_inference_steps=2)}
    return DiTPolicy.random(DiTConfig(**{**sizes, **changes}))


def _rdt() -> Any:
    sizes: dict[str, Any] = {"action_dim": 2, "horizon": 4, "n_action_steps": 2, "hidden_size": 8, "depth": 2}
    sizes |= {"num_heads": 2, "lang_token_dim": 3, "img_token_dim": 3, "max_lang_cond_len": 3, "img_cond_len": 3}
    return RDTPolicy.random(RDTConfig(**sizes, sampler=public_sampler(2)))


EXAMPLES: Mapping[str, Callable[[], Any]] = {
    "Diffusion Policy's transformer, observations as conditions": _dpt,
    "the same with cameras": Shape(
        width=8, layers=2, heads=2, horizon=4, n_action_steps=2, steps=2, sampler="ddim", cameras=1
    ).policy,
    "the same with a transformer that encodes the conditions": lambda: _dpt(n_cond_layers=1),
    "the same, encoder only, observations in-painted": lambda: _dpt(time_as_cond=False, obs_as_cond=False),
    "RDT (Robotics Diffusion Transformer)": _rdt,
    "LeRobot's DiT with adaLN, by DDPM or DDIM": _dit,
    "the same by flow matching, in Euler steps": lambda: _dit(sampler=Euler(num_inference_steps=2)),
    "the same with torch's own attention and learned positions": lambda: _dit(
        use_rope=False, use_positional_encoding=True
    ),
}


def accepted(examples: Mapping[str, Callable[[], Any]] = EXAMPLES) -> list[Accepted]:
    """Every engine tried on every example."""
    return [_tried(name, make()) for name, make in examples.items()]


def _tried(name: str, policy: Any) -> Accepted:
    port = port_of(policy)
    kinds = [block.kind for block in port.adapter.blocks if block.name.split(".")[1] == "0"]
    found = {}
    for engine in ENGINES:
        try:
            accelerate(port, None, engine=engine, threads=1).disable()
            found[engine] = "yes"
        except EngineError as error:
            found[engine] = f"no: {error.__cause__ or error}"
    return Accepted(name, port.adapter.family, ", ".join(kinds), found)

"""An RDT policy folded into its program. No matrix is copied: the program multiplies by the policy's own, as views.

At 1.2 thousand million numbers a copy would be five gigabytes. So only what is small is folded: the attention scale into the
gain of the queries' norms, and the time's embedding into a table over all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockcache.models.folding import signature, step_times
from blockcache.models.port import Port
from blockcache.models.program import Table, UnsupportedError
from blockcache.models.rdt.denoiser import FRONT, frequencies
from blockcache.models.rdt.flops import RDTShape
from blockcache.models.rdt.program import RDTProgram

_HIDDEN = 1e17
"""What is taken from the scores of tokens that are not there; within the limit of a program's weights."""


@torch.no_grad()
def fold(port: Port, shape: RDTShape, norm: tuple[str, float]) -> RDTProgram:
    """Fold the policy behind a port, or say what about it cannot be; `norm` is how its norms divide, and their eps."""
    denoiser: Any = port.adapter.denoiser
    model: Any = denoiser.model
    like: Tensor = model.x_pos_embed.detach()
    if like.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"weights in {like.dtype} (only float32 and float64)")
    heads, policy = port.adapter.widths["heads"], port.policy
    scale = (shape.width // heads) ** -0.5
    hidden = min(_HIDDEN, torch.finfo(like.dtype).max / 4)
    weights: dict[str, Tensor] = {
        "places": like,
        "lang_places": model.lang_cond_pos_embed.detach()[:, : policy.config.lang_len],
        "img_places": model.img_cond_pos_embed.detach(),
        "frequencies": frequencies(like.device).to(like)[None],
        "zero": like.new_zeros(1),
        "hide": like.new_tensor([hidden]),
        "hide_all": like.new_tensor([-hidden]),
    }
    adaptors = [_linears(getattr(denoiser, f"{name}_adaptor")) for name in ("lang", "img", "state")]
    for name, linears in zip(("lang", "img", "state"), adaptors, strict=True):
        for index, linear in enumerate(linears):
            weights |= _linear(name, linear, index)
    whole = weights["state_w0"]  # (2 A, d): of the sample, then of the mask
    weights |= {"state_w0": whole[: shape.action_dim], "mask_w": whole[shape.action_dim :]}
    up, down = _mlp(model.freq_embedder)
    weights |= {**_linear("freq_up", up), **_linear("freq_down", down)}
    for index, block in enumerate(model.blocks):
        weights |= _layer(index, block, shape.width, scale)
    final = model.final_layer
    weights |= {"final_gain": final.norm_final.weight.detach()}
    weights |= {**_linear("final_up", final.ffn_final.fc1), **_linear("final_down", final.ffn_final.fc2)}
    time: Tensor = model.t_embedder(step_times(port, like.device)).to(like)  # (K, d)
    return RDTProgram(
        inputs=port.inputs,
        chunk=(shape.horizon, shape.action_dim),
        tokens=shape.horizon,
        executed=port.executed,
        action_dim=shape.action_dim,
        blocks=shape.folded_blocks,
        once=shape.folded_once,
        every_step=shape.folded_every_step,
        weights=weights,
        tables={"time": Table(time[:, None, None], (1, FRONT, shape.width), (FRONT - 1, 0))},
        signature=signature(norm, time),
        shape=shape,
        heads=heads,
        norm=norm[0],
        norm_eps=norm[1],
        adaptors=(len(adaptors[0]), len(adaptors[1]), len(adaptors[2])),
    )


def _layer(index: int, block: Any, width: int, scale: float) -> dict[str, Tensor]:
    own, cross = block.attn, block.cross_attn
    both = _linear("kv", cross.kv)
    return {
        **{f"norm{place}_gain{index}": getattr(block, f"norm{place}").weight.detach() for place in (1, 2, 3)},
        **_linear("qkv", own.qkv, index),
        **_linear("out", own.proj, index),
        **_linear("query", cross.q, index),
        **_linear("cross", cross.proj, index),
        **_linear("up", block.ffn.fc1, index),
        **_linear("down", block.ffn.fc2, index),
        f"key_w{index}": both["kv_w"][:, :width],
        f"key_b{index}": both["kv_b"][:width],
        f"value_w{index}": both["kv_w"][:, width:],
        f"value_b{index}": both["kv_b"][width:],
        f"own_query_gain{index}": own.q_norm.weight.detach() * scale,
        f"own_key_gain{index}": own.k_norm.weight.detach(),
        f"query_gain{index}": cross.q_norm.weight.detach() * scale,
        f"key_gain{index}": cross.k_norm.weight.detach(),
    }


def _linear(name: str, module: Any, index: int | str = "") -> dict[str, Tensor]:
    """(inputs, outputs) and the bias, `x @ w + b`; a view of the module's own."""
    if type(module) is not nn.Linear or module.bias is None:
        raise UnsupportedError(f"a {type(module).__name__} where a Linear with a bias is expected")
    return {f"{name}_w{index}": module.weight.detach().T, f"{name}_b{index}": module.bias.detach()}


def _linears(adaptor: Any) -> list[Any]:
    """The matrices of an adaptor."""
    parts = list(adaptor) if isinstance(adaptor, nn.Sequential) else [adaptor]
    between = [part for part in parts[1::2] if not (type(part) is nn.GELU and part.approximate == "tanh")]
    if between or len(parts) % 2 == 0:
        raise UnsupportedError("an adaptor of other parts than matrices and GELU (tanh) in turn")
    return parts[::2]


def _mlp(embedder: Any) -> tuple[Any, Any]:
    parts = list(getattr(embedder, "mlp", ()))
    if len(parts) != 3 or type(parts[1]) is not nn.SiLU:
        raise UnsupportedError("an embedding other than Linear, SiLU, Linear")
    return parts[0], parts[2]

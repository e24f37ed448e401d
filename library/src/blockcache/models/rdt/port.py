"""Which policies are RDT, their port, and their denoiser as blockcache sees it: three blocks in a layer, language and images
attended to in turn.

A layer is known by its parts, and foreign code by what it computes as well: it is run on a few numbers beside
the expected order of its parts, so that another order, or norms behind the branches, are named instead of taken for granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from blockcache.errors import PolicyError
from blockcache.models.adapter import Adapter, Layer, Route, check_unpatched, names_by_layer
from blockcache.models.own_policy import OwnPort
from blockcache.models.port import Port
from blockcache.models.rdt.denoiser import ADAPTORS, FRONT, RDTDenoiser, RDTShape, divided
from blockcache.models.rdt.policy import FAMILY, MASK, RDTPolicy
from blockcache.models.rdt.program import fold

BRANCHES = (("norm1", "attn"), ("norm2", "cross_attn"), ("norm3", "ffn"))
_PARTS = tuple(part for branch in BRANCHES for part in branch)
_NEEDED = ("t_embedder", "freq_embedder", "x_pos_embed", "lang_cond_pos_embed", "img_cond_pos_embed", "final_layer")


def claim(policy: Any) -> Port | str:
    """The port of an RDT policy, or what it lacks to be one."""
    if isinstance(policy, RDTPolicy):
        if (lack := shaped(policy.denoiser.model)) is not None:
            raise PolicyError(f"the denoiser {type(policy.denoiser.model).__name__} {lack}")
        return RDTPort(policy, find(policy.denoiser, policy.config.lang_len))
    if all(hasattr(policy, name) for name in ("model", *ADAPTORS)) and shaped(policy.model) is None:
        raise PolicyError(
            f"{type(policy).__name__} is an RDT whose predict_action takes six arguments; "
            "blockcache.models.rdt.runner.policy_of(runner) makes a policy of it that takes one observation and shares its "
            "weights"
        )
    return "it is no RDTPolicy, and has no model of RDT's shape with lang_adaptor, img_adaptor and state_adaptor"


class RDTPort(OwnPort):
    """An RDT policy, made here or around the modules of a public runner."""

    policy: RDTPolicy

    def action_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        return kwargs["action_mask"] if "action_mask" in kwargs else args[6]

    @property
    def encoder_flops(self) -> int:
        """The adaptors of the conditions, which the policy itself runs once in a generation."""
        return self.sizes.adapting

    @cached_property
    def sizes(self) -> RDTShape:
        """What decides its cost."""
        return shape_of(self.policy.denoiser, self.policy.config.lang_len)

    def synthetic_observations(self, count: int) -> dict[str, Tensor]:
        """An instruction that fills half of its places, a robot that has every number but the last, 25 actions a second."""
        made = super().synthetic_observations(count)
        made[MASK] = (torch.arange(made[MASK].shape[1]) < (made[MASK].shape[1] + 1) // 2).float().expand_as(made[MASK])
        made["action_mask"] = torch.ones_like(made["action_mask"])
        made["action_mask"][..., 1:][..., -1:] = 0.0
        made["ctrl_freqs"] = torch.full_like(made["ctrl_freqs"], 25.0)
        return made


# -- the denoiser


def shaped(model: Any) -> str | None:
    """What a transformer lacks to be RDT's; None if nothing."""
    blocks = list(getattr(model, "blocks", None) or ())
    if not blocks:
        return "has no blocks"
    for index, block in enumerate(blocks):
        if missing := [name for name in _PARTS if not isinstance(getattr(block, name, None), nn.Module)]:
            return f"has blocks.{index} without {', '.join(missing)}; expected {', '.join(_PARTS)}"
        attention = [(block.attn, "qkv"), (block.cross_attn, "q"), (block.cross_attn, "kv")]
        attention += [(part, name) for part in (block.attn, block.cross_attn) for name in ("q_norm", "k_norm", "proj")]
        attention += [(block.ffn, "fc1"), (block.ffn, "fc2")]
        if missing := [name for part, name in attention if not isinstance(getattr(part, name, None), nn.Module)]:
            return f"has blocks.{index} whose branches lack {', '.join(missing)}"
    if missing := [name for name in _NEEDED if not hasattr(model, name)]:
        return f"lacks {', '.join(missing)}"
    return None


def find(denoiser: RDTDenoiser, lang_len: int) -> Adapter:
    """The adapter of a denoiser whose transformer is `shaped`; a PolicyError if it cannot be used as it is."""
    model: Any = denoiser.model
    for index, block in enumerate(model.blocks):
        _check(index, block)
    shape = shape_of(denoiser, lang_len)
    return Adapter(
        family=FAMILY,
        denoiser=denoiser,
        blocks=shape.blocks,
        layers=tuple(map(_layer, model.blocks, names_by_layer(shape.blocks, shape.layers))),
        widths={
            "width": shape.width,
            "heads": model.blocks[0].attn.num_heads,
            "tokens": shape.tokens,
            "lang_tokens": lang_len,
            "img_tokens": shape.conditions[1],
            "action_dim": shape.action_dim,
        },
        every_step=shape.every_step,
        fold=partial(fold, shape=shape, norm=norm_of(denoiser)),
        constant=tuple(block.cross_attn.kv for block in model.blocks),
    )


def shape_of(denoiser: Any, lang_len: int) -> RDTShape:
    """The sizes that decide its cost, read off the tensors."""
    model = denoiser.model
    return RDTShape(
        width=model.x_pos_embed.shape[-1],
        layers=len(model.blocks),
        tokens=model.x_pos_embed.shape[1],
        horizon=model.x_pos_embed.shape[1] - FRONT,
        action_dim=model.final_layer.ffn_final.fc2.out_features,
        conditions=(lang_len, model.img_cond_pos_embed.shape[1]),
        adaptors=tuple(_inputs(getattr(denoiser, name)) for name in ADAPTORS),
    )


def _inputs(adaptor: nn.Module) -> Sequence[int]:
    return [part.in_features for part in adaptor.modules() if isinstance(part, nn.Linear)]


def _layer(block: Any, names: tuple[str, ...]) -> Layer:
    sa, ca, ffn = names

    def forward(route: Route, x: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + route(sa, lambda: block.attn(block.norm1(x)))
        x = x + route(ca, lambda: block.cross_attn(block.norm2(x), c, mask))
        return x + route(ffn, lambda: block.ffn(block.norm3(x)))

    return Layer(block, names, forward, block.norm1, "x")


def _check(index: int, block: Any) -> None:
    """Refuse a block whose forward is not the one that the adapter expresses branch by branch."""
    check_unpatched(block, f"blocks.{index}")
    if type(block).__module__.startswith("blockcache."):
        return
    found = _order(block)
    if found is None:
        raise PolicyError(
            f"blocks.{index} ({type(block).__name__}) computes something else than three residual branches of its parts, so "
            "what each of them adds is not known"
        )
    order, post_norm = found
    if post_norm:
        raise PolicyError(
            f"blocks.{index} is post-norm (its norms come behind the branches): its blocks are not plain residuals and "
            "cannot be cached"
        )
    if order != BRANCHES:
        got, expected = (", ".join(branch for _, branch in item) for item in (order, BRANCHES))
        raise PolicyError(f"blocks.{index} runs {got}, expected {expected}: that order of blocks is not known")


@torch.no_grad()
def _order(block: Any) -> tuple[tuple[tuple[str, str], ...], bool] | None:
    """In which order a block runs its branches, and whether the norms come behind them; None if neither explains it."""
    like, generator = next(block.parameters()), torch.Generator().manual_seed(0)
    width = block.attn.qkv.in_features
    x, c = (torch.randn(1, tokens, width, generator=generator).to(like) for tokens in (3, 4))
    expected = block(x, c, None)
    for post_norm in (False, True):
        for order in permutations(BRANCHES):
            found = x
            for norm, branch in order:
                run, given = getattr(block, branch), (c, None) if branch == "cross_attn" else ()
                if post_norm:
                    found = getattr(block, norm)(found + run(found, *given))
                else:
                    found = found + run(getattr(block, norm)(found), *given)
            if found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-4)):
                return order, post_norm
    return None


def norm_of(denoiser: Any) -> tuple[str, float]:
    """How all norms divide, one of `policy.NORMS`, and their eps; found out by what they do."""
    model = denoiser.model
    parts = [getattr(block, norm) for block in model.blocks for norm, _ in BRANCHES]
    heads = [(block.attn, block.cross_attn) for block in model.blocks]
    parts += [getattr(part, name) for pair in heads for part in pair for name in ("q_norm", "k_norm")]
    parts.append(model.final_layer.norm_final)
    kinds = {_divides(part) for part in parts}
    if len(kinds) > 1 or None in kinds:
        raise PolicyError(
            "the norms of this RDT do not all divide by the standard deviation, nor all by the root mean square, with one "
            "eps; only these two kinds are known"
        )
    (kind,) = kinds
    assert kind is not None
    return kind


@torch.no_grad()
def _divides(norm: Any) -> tuple[str, float] | None:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "eps", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    x = torch.linspace(-0.5, 2.0, len(weight)).to(weight)[None]
    for kind in ("std", "rms"):
        if torch.allclose(norm(x), divided(x, kind, eps) * weight, rtol=1e-2 if weight.itemsize < 4 else 1e-4):
            return kind, eps
    return None

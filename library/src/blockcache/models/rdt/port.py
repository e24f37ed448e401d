"""Which policies are RDT, and their port."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockcache.errors import PolicyError
from blockcache.models.own_port import OwnPort
from blockcache.models.port import Port
from blockcache.models.rdt.adapter import find, shape_of, shaped
from blockcache.models.rdt.denoiser import ADAPTORS, RDTShape
from blockcache.models.rdt.policy import MASK, RDTPolicy


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

    @property
    def action_scale(self) -> NDArray[np.float64]:
        return np.ones(self.policy.action_dim)

    def action_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        mask: Tensor = kwargs["action_mask"] if "action_mask" in kwargs else args[6]
        return mask

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

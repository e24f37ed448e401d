"""Where a DiT's program begins: at an observation, with its normaliser, or at an encoder's conditioning vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dit.program import CONDITIONING
from blockcache.models.normalizer import ShiftedField


@dataclass(frozen=True, eq=False)
class ProgramInputs:
    """`inputs` are those of the program, `fields` their normalisers; `moments` and `vectors` as in `DiTProgram`."""

    inputs: Mapping[str, tuple[int, ...]]
    action: ShiftedField
    moments: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    fields: Mapping[str, ShiftedField] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        """What the program multiplies by and adds, in float64."""
        double = {name: _double(item) for name, item in self.fields.items()}
        shift, scale, base = _double(self.action)
        found = {"action_base": -base, "action_scale": 1.0 / scale, "action_shift": shift}
        for name, (shift, scale, base) in double.items():
            found |= {f"input_shift_{name}": -shift, f"input_scale_{name}": scale, f"input_base_{name}": base}
        return found


def inputs_of_policy(policy: DiTPolicy) -> ProgramInputs:
    """Of a `DiTPolicy` without an encoder."""
    config = policy.config
    names = (*config.state, *config.vectors)
    return ProgramInputs(
        config.inputs,
        policy.normalizer.action,
        tuple(config.state),
        tuple(config.vectors),
        {name: policy.normalizer.field(name) for name in names},
    )


def inputs_after_encoder(cond_dim: int, action: ShiftedField) -> ProgramInputs:
    """Of a policy whose encoder runs as it is."""
    return ProgramInputs({CONDITIONING: (cond_dim,)}, action)


def _double(item: ShiftedField) -> tuple[Tensor, Tensor, Tensor]:
    shift, scale, base = (part.detach().to(torch.float64) for part in (item.shift, item.scale, item.base))
    return shift, scale, base

"""How far a cloud of a few steps lies from the policy's own, so that it can be differentiated. Tensors in, tensors out.

`measure.distance` says the same of finished clouds, with intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Closeness:
    """Of a cloud to the policy's own, over all observations.

    Args:
        objective: What is minimised: 2 E|X - Y| - w E|X - X'| - E|Y - Y'|, over E|Y - Y'|; w = 1 is the energy distance.
        energy: The energy distance, over E|Y - Y'|.
        centre_shift: Root of the mean squared distance between the means, unbiased: what the means scatter by is taken
            off, and 0 where that leaves nothing.
        spread: E|X - X'| over E|Y - Y'|.
    """

    objective: float
    energy: float
    centre_shift: float
    spread: float


def objective(found: Tensor, reference: Tensor, spread: float) -> Tensor:
    """2 E|X - Y| - w E|X - X'|, the mean over observations; the term that no sampler changes is left out.

    Args:
        found: (observations, samples, features), X.
        reference: The same of the policy's own sampler, Y.
        spread: w: 1 keeps the spread of the policy's own cloud, less gives a sharper one.
    """
    return 2 * between(found, reference).mean() - spread * inside(found).mean()


def closeness(found: Tensor, reference: Tensor, spread: float) -> Closeness:
    """All that is reported of a cloud."""
    apart, own, others = between(found, reference).mean(), inside(reference).mean(), inside(found).mean()
    scatter = sum(cloud.var(dim=1).sum(dim=-1) / cloud.shape[1] for cloud in (found, reference))
    shift = ((found.mean(dim=1) - reference.mean(dim=1)) ** 2).sum(dim=-1) - scatter
    return Closeness(
        objective=float((2 * apart - spread * others - own) / own),
        energy=float((2 * apart - others - own) / own),
        centre_shift=float(shift.mean().clamp(min=0).sqrt()),
        spread=float(others / own),
    )


def between(found: Tensor, reference: Tensor) -> Tensor:
    """Mean distance of a sample of the one to a sample of the other, for each observation."""
    # the quicker way through a matrix product is off by the root of the precision where two samples are near
    return torch.cdist(found, reference, compute_mode="donot_use_mm_for_euclid_dist").mean(dim=(1, 2))


def inside(cloud: Tensor) -> Tensor:
    """Mean distance of two samples of a cloud, for each observation; none is paired with itself."""
    return torch.stack([torch.pdist(one).mean() for one in cloud])

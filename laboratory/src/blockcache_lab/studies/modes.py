"""Where a policy sees several ways to go on, and how often each is taken. Plain arrays in, plain values out.

A sharper sampler may drop a mode that the policy takes now and then; a mean or a distance over all observations would not
tell. So the reference's samples at each observation are parted in two, and where the two parts lie clearly apart, the
method's samples are counted by the nearer part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from blockcache.measure.distance import Cloud
from blockcache.results.distances import Modes

APART = 4.0
"""A fork: the parts' means lie this many times a part's own width (root mean square, along the line between them) apart."""
LEAST_SHARE = 0.1
"""Of the samples in the smaller part; fewer are outliers."""


def modes(found: Cloud, reference: Cloud) -> Modes | None:
    """How often a method takes the reference's smaller mode; None where the reference has one mode everywhere."""
    shares = []
    for ours, theirs in zip(found, reference, strict=True):
        centres = fork(theirs)
        if centres is not None:
            shares.append((_share(ours, centres), _share(theirs, centres)))
    if not shares:
        return None
    by_found, by_reference = np.array(shares).T
    return Modes(
        forks=len(shares),
        reference=float(by_reference.mean()),
        found=float(by_found.mean()),
        apart=float(np.abs(by_found - by_reference).mean()),
        dropped=int((by_found == 0).sum()),
    )


def fork(samples: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The means (2, features) of two modes, the smaller one first; None where there is one mode only."""
    if not np.ptp(samples, axis=0).any():
        return None
    centres, side = kmeans2(samples, 2, minit="++", seed=0)
    sizes = np.bincount(side, minlength=2)
    if sizes.min() < LEAST_SHARE * len(samples):
        return None
    line = centres[1] - centres[0]
    along = (samples - centres[side]) @ (line / np.linalg.norm(line))
    if np.linalg.norm(line) < APART * np.sqrt((along**2).mean()):
        return None
    return np.asarray(centres[np.argsort(sizes, kind="stable")], dtype=np.float64)


def _share(samples: NDArray[np.float64], centres: NDArray[np.float64]) -> float:
    nearer = np.linalg.norm(samples[:, None] - centres, axis=-1).argmin(axis=1)
    return float((nearer == 0).mean())

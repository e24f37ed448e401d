"""Files of a policy that there is not, of any size: what a page is made from, without a model."""

import numpy as np

from blockcache import Block, Fingerprint, Recording, Schedule, solve

NASTY = "<script>alert(1)</script>&\"'`|*"
"""A name that would do harm wherever it is not escaped."""


def blocks(layers, kinds=("SA", "CA", "FFN")):
    names = [(f"layers.{layer}.{kind}", kind) for layer in range(layers) for kind in kinds]
    return tuple(Block(name, kind, order, 10) for order, (name, kind) in enumerate(names))


def fingerprint(layers=8, steps=100, weights="ab" * 32):
    return Fingerprint(
        "dp-t", tuple(block.name for block in blocks(layers)), {"width": 16}, steps, {"type": "ddpm"}, weights
    )


def recording(layers=8, steps=100, weights="ab" * 32):
    """Outputs that change faster and faster, each block's at its own pace."""
    rng, own = np.random.default_rng(0), blocks(layers)
    places = np.cumsum(rng.gamma(1.0, 0.01, (len(own), steps)) * np.linspace(0.2, 3, steps), axis=1)
    similarity = np.exp(-np.abs(places[:, :, None] - places[:, None, :]))
    return Recording(
        blocks=own,
        matrices={"cosine": similarity},
        scores=rng.random(len(own)),
        input_change=rng.random((2, steps - 1)),
        output_change=rng.random((2, steps - 1)),
        generations=2,
        fingerprint=fingerprint(layers, steps, weights),
    )


def schedule(layers=8, steps=100, weights="ab" * 32):
    return solve(recording(layers, steps, weights), updates=max(2, steps // 10), union=5)


def named_schedule(name):
    """Of one block with that name."""
    return Schedule(5, {name: [0, 2]}, origin={"method": name})

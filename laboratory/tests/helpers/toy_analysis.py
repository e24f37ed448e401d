"""A made-up analysis with every section, as small as it can be: three layers of SA and FFN, 24 steps."""

import numpy as np

from blockcache import Block, Fingerprint
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.analysis.sections import (
    LAGS,
    STAGES,
    ActionCosts,
    Caching,
    Correlation,
    FeatureMaps,
    Homogeneity,
    Response,
    Similarity,
    Stability,
    SubLayers,
    WeakerPolicy,
    WeightNorms,
)

LAYERS, STEPS, EPISODES, CHANNELS = 3, 24, 5, 4
BLOCKS = tuple(
    Block(f"layers.{layer}.{kind}", kind, 2 * layer + place, 10)
    for layer in range(LAYERS)
    for place, kind in enumerate(("SA", "FFN"))
)
NAMES = tuple(block.name for block in BLOCKS)
SCHEDULES = ("bac", "blockwise", "unified", "uniform")
FINGERPRINT = Fingerprint("dp-t", NAMES, {"width": 16}, STEPS, {"type": "ddpm"}, "ab" * 32)


def similarity():
    """Alike in the beginning, less and less so later; each block in its own way."""
    steps = np.arange(STEPS)
    rates = 0.001 * (1 + np.arange(len(NAMES)))[:, None]
    places = np.cumsum(rates * steps, axis=1)  # (blocks, K)
    return Similarity(LAGS, np.exp(-np.abs(places[:, :, None] - places[:, None, :])))


def updates():
    marks = np.zeros((len(SCHEDULES), len(NAMES), STEPS), dtype=bool)
    marks[:, :, [0, 6, 12, 18]] = True
    marks[1, ::2] = np.roll(marks[1, ::2], 1, axis=1)
    marks[1, :, 0] = True
    return marks


def caching():
    marks = updates()
    errors = np.zeros(marks.shape)
    for step in range(1, STEPS):
        errors[:, :, step] = np.where(marks[:, :, step], 0.02, errors[:, :, step - 1] + 0.02)
    errors[1, 1::2, 6:] += 0.3  # without the union the FFNs' errors surge at an update and stay
    return Caching(SCHEDULES, errors, marks)


def sections():
    rng = np.random.default_rng(0)
    found, marks = similarity(), updates()
    rising = np.linspace(0.1, 1.0, STEPS - 1)
    betas = np.linspace(0, 2, 5)
    scales = 10.0 ** -np.arange(1, 5)
    truth = rng.normal(size=(2, STEPS, CHANNELS))
    spread = np.linspace(0.0, 0.4, STEPS) ** 2
    at = (0, 12, STEPS - 1)
    mean = np.broadcast_to(1 - spread[list(at)], (len(NAMES), len(at)))
    between = np.full((EPISODES, EPISODES), 1 - spread[-1])
    np.fill_diagonal(between, 1.0)
    return (
        found,
        caching(),
        SubLayers("layers.2.FFN", "blockwise", (6, 18), STAGES, rng.random((2, len(STAGES)))),
        Correlation("layers.1.FFN", "layers.2.FFN", rising, 0.5 * rising, 12, betas, 0.2 * betas, 0.1 * betas),
        Response("layers.2.FFN", 12, scales, scales, 0.5 * scales**2),
        WeightNorms(
            ("layers.0", "layers.1", "layers.2"),
            ("W1", "W2", "SA W_V"),
            np.array([[6.0] * 3, [6.0] * 3, [2.0] * 3]),
            np.array([[1024] * 3, [1024] * 3, [256] * 3]),
        ),
        FeatureMaps("bac", NAMES[:2], truth, truth + 0.1, marks[0, :2]),
        Homogeneity(
            True,
            at,
            mean,
            0.1 * mean,
            mean - 0.1,
            mean,
            np.broadcast_to(1 - spread, (len(NAMES), STEPS)),
            np.broadcast_to(1 - spread**2, (len(NAMES), STEPS)),
            "layers.2.FFN",
            STEPS - 1,
            between,
            np.stack([found.cosine[5], found.cosine[4]]),
        ),
        Stability(8, 4, (1, 4), np.array([[0.5, 0.6], [0.8, 0.9]]), np.array([[0.1, 0.2], [0.04, 0.02]])),
        ActionCosts((1, 5), rng.random((2, len(NAMES), STEPS)), rng.random((2, len(NAMES), STEPS))),
        WeakerPolicy("bac:S=10,n=5", ("good", "weak"), np.array([0.1, 0.3]), np.array([0.2, 0.3])),
    )


def toy_analysis(*, without=(), **changes):
    """Every section but those that are named in `without`."""
    content = {
        "source": "toy",
        "fingerprint": FINGERPRINT,
        "blocks": BLOCKS,
        "setting": {
            "seed": 0,
            "generations": 8,
            "observations": {"count": 16, "hash": "cd" * 32},
            "command": "blockcache analyse toy",
            "machine": {"cores": 2},
        },
        "schedules": {name: {"origin": {"method": name}} for name in SCHEDULES},
        "sections": {item.name: item for item in sections() if item.name not in without},
        "absent": {},
        "seconds": {"similarity": 1.5},
    }
    return Analysis(**{**content, **changes})

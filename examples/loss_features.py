"""Would more features of actions predict losses better? Tails over observations, single dimensions, a method's own states.

python examples/loss_features.py docs/generated/records/* -o docs/generated/loss-features.md

Every method that the shipped data on losses know is drawn again, without a simulator, once at the recorded observations and
once at observations moved by what the method's own shift suggests. Then all tasks are predicted with each group of features
on top of those that the library has, each task by a model that did not see it (see `blockcache_lab.studies.loss_data`).
"""

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from blockcache.cli.arguments import PolicySource
from blockcache.compare.candidates import Candidate, running
from blockcache.errors import BlockcacheError
from blockcache.files import write_bytes
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.distance import energy_of_spread, pair_distances, shifts
from blockcache.measure.features import ActionFeatures, flattened, roughness
from blockcache.observations import batch_size, pick
from blockcache.progress import progress_bar
from blockcache.results.losses import TERMS
from blockcache.results.rollouts import Results
from blockcache_lab.studies.loss_data import judge, known_losses
from blockcache_lab.studies.losses import OBSERVATIONS, SAMPLES, candidate_of, what_ran

TAIL = 90
"""In percent: the observation that is taken for a tail."""
AHEAD, FEW = 4, 4
"""So many times its shift a method is moved, and samples at the states that it reaches."""
LEAST_SPREAD = 1e-3
"""Of a single dimension, such as a gripper's, for its energy distance over it to mean something."""


@dataclass(frozen=True)
class MoreFeatures(ActionFeatures):
    tail_shift: float
    tail_energy: float
    tail_rougher: float
    worst_shift: float
    worst_beyond_spread: float
    worst_rougher: float
    common_shift: float
    moved_shift: float
    moved_rougher: float


GROUPS = {
    "as the library has it": (),
    "tails over observations": ("tail_shift", "tail_energy", "tail_rougher"),
    "the worst action dimension": ("worst_shift", "worst_beyond_spread", "worst_rougher"),
    "a shift common to all observations": ("common_shift",),
    "at states that the method reaches": ("moved_shift", "moved_rougher"),
}


def more_features(known, found, own, moved):
    """Of chunks (observations, samples, actions, A) of a method, of the policy, and of the method at states it reaches."""
    values, one, other = np.sqrt(own[0, 0].size), flattened(found), flattened(own)
    between, inside, others = pair_distances(one, other)
    added = [roughness(x[None]) - roughness(y[None]) for x, y in zip(found, own, strict=True)]
    single = [of_dimension(found[..., [place]], own[..., [place]]) for place in range(own.shape[-1])]
    means = (found.mean(axis=1) - own.mean(axis=1)).reshape(len(own), -1)
    halves = (means[::2].mean(axis=0) * means[1::2].mean(axis=0)).sum()
    return MoreFeatures(
        **asdict(known),
        tail_shift=float(np.percentile(shifts(one, other), TAIL)) / values,
        tail_energy=float(np.percentile(2 * between - inside - others, TAIL) / others.mean()),
        tail_rougher=float(np.percentile(added, TAIL)),
        **dict(
            zip(
                ("worst_shift", "worst_beyond_spread", "worst_rougher"),
                map(max, zip(*single, strict=True)),
                strict=True,
            )
        ),
        common_shift=float(np.sqrt(max(0.0, halves))) / values,
        moved_shift=float(shifts(flattened(moved), other).mean()) / values,
        moved_rougher=roughness(moved) - roughness(own),
    )


def of_dimension(found, own):
    """Centre shift, energy beyond spread and added roughness of one action dimension, in the units of the library's."""
    one, other = flattened(found), flattened(own)
    between, inside, others = (values.mean() for values in pair_distances(one, other))
    shift, spread = shifts(one, other).mean() / np.sqrt(own.shape[2]), max(others, LEAST_SPREAD * np.sqrt(own.shape[2]))
    beyond = (2 * between - inside - others) / spread - energy_of_spread(inside / spread)
    return float(shift), float(beyond), roughness(found) - roughness(own)


def moved_by(observations, own, found):
    """The observations where the policy would do what the method does, AHEAD times as far: a line through what it does
    where tells how actions and observations go together."""
    actions = own.mean(axis=(1, 2))
    centred, shift = actions - actions.mean(axis=0), found.mean(axis=(1, 2)) - actions
    square = centred.T @ centred
    square += 0.1 * np.trace(square) / len(square) * np.eye(len(square))

    def moved(values):
        if values.dtype.kind != "f":
            return values
        flat = values.reshape(len(values), -1)
        slopes = np.linalg.solve(square, centred.T @ (flat - flat.mean(axis=0)))
        return (flat + AHEAD * shift @ slopes).reshape(values.shape).astype(values.dtype)

    arrays = isinstance(observations, dict)
    return {name: moved(np.asarray(one)) for name, one in observations.items()} if arrays else moved(observations)


def drawn(port, candidate, observations, samples, file):
    """Chunks, kept in a file."""
    if not file.exists():
        with running(port, candidate) as fast:
            chunks = draw_chunks(fast.act, observations, samples, port.action_scale, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, chunks.astype(np.float32))
    return np.load(file).astype(np.float64)


def measured(data, candidates, state):
    """The data with more features; rows whose method no record has are left out."""
    rows, seen = [], {}
    for row in progress_bar([row for found in data.told.values() for row in found], "methods", unit="method"):
        if (row.policy, row.ran) not in candidates:
            continue
        if row.policy not in seen:
            source = PolicySource(row.policy)
            recorded = source.observations(None)
            chosen = np.random.default_rng(0).permutation(batch_size(recorded))[:OBSERVATIONS]
            seen[row.policy] = source.port, pick(recorded, sorted(chosen.tolist()))
        port, observations = seen[row.policy]
        candidate, at = candidates[row.policy, row.ran], state / row.policy
        own = drawn(port, Candidate(engine="auto"), observations, SAMPLES, at / "own.npy")
        found = drawn(port, candidate, observations, SAMPLES, at / f"{row.ran}.npy")
        there = moved_by(observations, own, found)
        moved = drawn(port, candidate, there, FEW, at / f"{row.ran}-moved.npy")
        rows.append(replace(row, features=more_features(row.features, found, own, moved)))
    return replace(data, rows=tuple(rows))


def without(data, task):
    return replace(data, rows=tuple(row for row in data.rows if row not in data.told[task]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+", type=Path, help="Of the results that the shipped data come from.")
    parser.add_argument("-o", "--output", default="loss-features.md")
    parser.add_argument("--state", type=Path, default=Path("loss-features.state"), help="What is drawn is kept here.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    candidates = {}
    for file in sorted(path for directory in given.directories for path in directory.glob("*.json*")):
        try:
            results = Results.load(file)
        except BlockcacheError:  # timings and distances lie there, too
            continue
        for method in results.methods:
            if (candidate := candidate_of(method)) is not None:
                candidates[results.policy["source"], what_ran(method)] = candidate
    data = measured(known_losses(), candidates, given.state)
    lines = [
        "# Features that were tried for predicting losses",
        "",
        f"{len(data.rows)} methods, {OBSERVATIONS} observations, {SAMPLES} chunks each ({FEW} at states that a method "
        f"reaches: observations moved by {AHEAD} times what its shift suggests). Each task is predicted by a model "
        "that did not see it, neither to choose terms nor to fit them. *Error*: of predicted losses, its mean. *With a "
        "task fewer*: the mean rank correlation if one of the tasks were not in the data at all, least and most. Made by "
        f"`python {shlex.join(map(str, sys.argv[:1]))} docs/generated/records/*`.",
        "",
        "| features | rank correlation | worst task | covered | error | "
        + " | ".join(data.told)
        + " | with a task fewer |",
        "|---|---|---|---|---|---|" + "---|" * len(data.told),
    ]
    for group, names in GROUPS.items():
        terms = TERMS | {name: lambda of, name=name: getattr(of, name) for name in names}
        found = judge(data, terms)
        ranks, error = [one.rank for one in found], mean(one.error for one in found)
        fewer = [mean(one.rank for one in judge(without(data, task), terms)) for task in data.told]
        figures = [mean(ranks), min(ranks), mean(one.covered for one in found if one.covered is not None)]
        columns = [*(f"{value:.2f}" for value in figures), f"{error:.4f}", *(f"{rank:.2f}" for rank in ranks)]
        lines.append(f"| {group} | {' | '.join(columns)} | {min(fewer):.2f} to {max(fewer):.2f} |")
        print(lines[-1], flush=True)
    write_bytes(given.output, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()

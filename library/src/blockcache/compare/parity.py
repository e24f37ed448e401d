"""An export beside the policy that it was made of: the reference that `blockcache_runtime.parity` compares with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockcache.engines import accelerate
from blockcache.engines.onnx import OnnxRunner
from blockcache.files import PathLike
from blockcache.models.port import Port
from blockcache.models.registry import port_of
from blockcache.models.sampling import draw_all
from blockcache.observations import batch_size, rows
from blockcache.progress import progress_bar
from blockcache.samplers import table
from blockcache.schedule import Schedule
from blockcache_runtime.parity import TOLERANCE, Parity, Reference, compare, export_hash, reference_path


def check_export(
    path: PathLike,
    policy: Any,
    observations: Any = None,
    count: int = 16,
    tolerance: float = TOLERANCE,
    original: Port | None = None,
) -> Parity:
    """Compare the actions of an export with those of the policy that it was made of, with the same noise.

    Args:
        path: The export.
        policy: The policy object, or its port; one that the file was not made of is refused.
        observations: A batch of them, of which the first are taken; made-up ones without it.
        count: How many observations.
        tolerance: The largest difference that is accepted, where actions have the range -1 to 1.
        original: See `reference_of`.
    """
    runner = OnnxRunner(path, threads=1)
    return compare(runner.exported, reference_of(runner, port_of(policy), observations, count, original), tolerance)


def reference_of(
    runner: OnnxRunner, port: Port, observations: Any = None, count: int = 16, original: Port | None = None
) -> Reference:
    """What a policy answers under the schedule of its export, computed by its own modules (the patched engine).

    Args:
        runner: The opened export.
        port: The policy that it was made of.
        observations: A batch of them, of which the first are taken; made-up ones without it.
        count: How many observations.
        original: The policy as it was before it was tuned: what it answers in full precision, beginning with the same noise,
            is taken in place of what the file stands for.
    """
    runner.check_policy(port.fingerprint, port.executed)
    assert port.sampler is not None  # it was exported
    sampler = table(port.sampler)
    asked, followed = (original, None) if original else (port, Schedule(sampler.steps, runner.header["schedule"]))
    like = next(port.adapter.denoiser.parameters())
    chunk = (1, port.horizon, port.sample_dim)
    inputs, noises, actions = [], [], []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        batch = port.synthetic_observations(count) if observations is None else observations
        total = min(count, batch_size(batch))
        constants = {name: torch.tensor([value]) for name, value in runner.header.get("fixed", {}).items()}
        with accelerate(asked, followed, engine="patched"):
            for place in progress_bar(range(total), "the policy's own answers", unit="chunk", leave=False, delay=1.0):
                one = rows(batch, place, place + 1)
                obs = port.prepare_observation({**one, **constants} if constants else one)
                given = port.file_inputs(obs)
                inputs.append({name: given[name].numpy() for name in given if name in runner.sizes})
                torch.manual_seed(place)
                actions.append(asked.action_of(getattr(asked.policy, asked.entry)(obs)).numpy())
                torch.manual_seed(place)
                noises.append(draw_all(sampler, chunk, like, None).numpy())
    return Reference(
        export_hash(runner.path),
        {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]},
        np.concatenate(noises, axis=1),
        np.concatenate(actions),
        np.asarray(port.action_scale, dtype=np.float32),
    )


def save_reference(path: PathLike, policy: Any, observations: Any = None, count: int = 16) -> Path:
    """Write a reference beside an export, NAME.reference.npz beside NAME.onnx, and return where.

    Args:
        path: The export.
        policy: The policy object that it was made of, or its port.
        observations: A batch of them, of which the first are taken; made-up ones without it.
        count: How many observations.
    """
    place = reference_path(path)
    reference_of(OnnxRunner(path, threads=1), port_of(policy), observations, count).save(place)
    return place

"""How the engines behave away from the benchmark's one point: other shapes, memory, long runs."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockcache.engines import accelerate, export_policy
from blockcache.measure.latency import measure
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, Shape
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache.schedule import Schedule
from blockcache.solvers.presets import stretched_schedule

LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SHAPES: dict[str, Shape] = {
    "width 128": Shape(width=128),
    "width 768, T = 16": Shape(width=768, horizon=16),
    "T = 16": Shape(horizon=16),
    "DDIM-40": Shape(sampler="ddim", steps=40),
    "DPM-Solver++ 20": Shape(sampler="dpmsolver++", steps=20),
    "batch 8": Shape(batch=8),
    "batch 64": Shape(batch=64),
}
"""Of random policies, by the name of their row on the page."""


def printed_for(shape: Shape) -> Schedule:
    """The paper's square_ph schedule, stretched to the shape.

    Args:
        shape: Sizes of a policy of family DP-T.
    """
    return stretched_schedule("square_ph", port_of(shape.policy()).adapter.blocks, shape.steps)


def compare_shapes(threads: int, repeats: int) -> list[dict[str, Any]]:
    """Each engine under the (stretched) printed schedule: milliseconds, and the largest difference to patched.

    torch has all `threads` here, as it has by default; the onnx engine is measured with one and with all.

    Args:
        threads: All cores.
        repeats: Interleaved rounds.
    """
    rows = []
    torch.set_num_threads(threads)
    for name, shape in progress_bar(SHAPES.items(), "other shapes", unit="shape"):
        policy, schedule = shape.policy(), printed_for(shape)
        obs = torch.randn(shape.batch, shape.n_obs_steps, shape.obs_dim, generator=torch.Generator().manual_seed(0))
        engines = {"patched": ("patched", 1), "loop": ("loop", 1), "onnx_1": ("onnx", 1), "onnx_n": ("onnx", threads)}
        with ExitStack() as stack:
            calls: dict[str, Callable[[], dict[str, Tensor]]] = {}
            for label, (engine, count) in engines.items():
                own = copy.deepcopy(policy)
                stack.enter_context(accelerate(own, schedule, engine, threads=count))
                calls[label] = partial(_generate, own, obs)
            latency = measure(calls, repeats, warmup=1, progress=False)
            actions = {label: call()["action_pred"] for label, call in calls.items()}
        # a random policy's unclipped samples can be large: relative to the largest action, where that is above 1
        largest = actions["patched"].abs().max().clamp_min(1.0)
        differences = {
            label: float((found - actions["patched"]).abs().max() / largest) for label, found in actions.items()
        }
        milliseconds = {label: value.p50 * 1e3 for label, value in latency.items()}
        rows.append({"name": name, "ms": milliseconds, "difference": differences})
    return rows


def _generate(policy: DiffusionTransformerPolicy, obs: Tensor) -> dict[str, Tensor]:
    return policy.predict_action(obs, generator=torch.Generator().manual_seed(0))


def footprint(shape: Shape, calls: int, generations: int, large_pages: bool = False) -> dict[str, Any]:
    """Export, then load and run in a process without torch, as on a robot: seconds, megabytes, steadiness, growth.

    Args:
        shape: Sizes of a random policy.
        calls: Generations whose milliseconds are counted.
        generations: Further ones, over which memory may grow.
        large_pages: On Linux, whether the process asks for pages of 2 MB for all that it allocates.
    """
    policy, schedule = shape.policy(), printed_for(shape)
    weights = sum(parameter.numel() * 4 for parameter in policy.parameters())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "policy.onnx"
        started = time.perf_counter()
        export_policy(policy, schedule, path)
        export_s = time.perf_counter() - started
        size = path.stat().st_size
        found = _in_process(_PROBE, str(path), calls, generations, environment=LARGE_PAGES if large_pages else {})
    milliseconds = found.pop("ms")
    return {
        "weights_mb": weights / 1e6,
        "file_mb": size / 1e6,
        "export_s": export_s,
        "calls": calls,
        "generations": generations,
        "p50_ms": float(np.percentile(milliseconds, 50)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
        "peak_over_weights": found["peak_mb"] * 1e6 / weights,
        **found,
    }


def calibration(shape: Shape, observations: int = 16) -> dict[str, Any]:
    """Seconds and peak megabytes of `calibrate`, plain and with action costs, each in a process of its own.

    Args:
        shape: Sizes of a random policy.
        observations: How many to calibrate on.
    """
    plain, costs = (_in_process(_CALIBRATION, asdict(shape), observations, with_costs) for with_costs in (False, True))
    return {
        "observations": observations,
        "blocks": costs["blocks"],
        "steps": shape.steps,
        "plain_s": plain["seconds"],
        "costs_s": costs["seconds"],
        "plain_mb": plain["peak_mb"],
        "costs_mb": costs["peak_mb"],
        "solve_s": costs["solve_s"],
    }


def _in_process(code: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON that a process of its own prints last; it finds its arguments in `asked`."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **(environment or {})},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_BEGIN = """
import json, sys, time

def megabytes(what):  # getrusage would count the parent, from which this process was forked
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith(what))

asked = json.loads(sys.argv[1])
"""

_CALIBRATION = """
from blockcache import calibrate, solve
from blockcache.models.dpt.policy import Shape
from blockcache.models.registry import port_of

shape, observations, with_costs = asked
port = port_of(Shape(**shape).policy())
seen = next(iter(port.synthetic_observations(observations).values())).split(1)
started = time.perf_counter()
recording = calibrate(port, seen, action_costs=with_costs, progress=False)
seconds, solved = time.perf_counter() - started, time.perf_counter()
if with_costs:
    solve(recording, method="action", budget=0.2)
solve_s = time.perf_counter() - solved
blocks = len(port.adapter.blocks)
print(json.dumps({"seconds": seconds, "solve_s": solve_s, "peak_mb": megabytes("VmHWM"), "blocks": blocks}))
"""

_PROBE = """
import numpy as np
import onnxruntime  # here already: what the library takes is not the policy's
from blockcache_runtime import open_export

path, calls, generations = asked
before = megabytes("VmRSS")
started = time.perf_counter()
policy = open_export(path, threads=1)
loaded = time.perf_counter() - started
rng = np.random.default_rng(0)
obs, noise = rng.standard_normal([1, *policy.sizes["obs"][1:]], dtype=np.float32), policy.draw_noise(1, rng)
for _ in range(5):
    policy.predict_action(obs, noise=noise)
peak = megabytes("VmHWM")
ms = []
for _ in range(calls):
    started = time.perf_counter()
    policy.predict_action(obs, noise=noise)
    ms.append((time.perf_counter() - started) * 1e3)
settled = megabytes("VmRSS")
for _ in range(generations):
    policy.predict_action(obs, noise=noise)
assert "torch" not in sys.modules
print(json.dumps({"load_s": loaded, "peak_mb": peak - before, "growth_mb": megabytes("VmRSS") - settled, "ms": ms}))
"""

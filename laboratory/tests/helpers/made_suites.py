"""Results of suites by a rule of thumb, as if they had been run."""

import numpy as np

from blockcache.compare.methods import parse_method
from blockcache.compare.reuse_parts import Solved, TeaCache
from blockcache.measure.action_error import ActionError
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache_lab.studies.suites import suite_by_name

STEPS = 100
OWN = {"type": "ddpm", "num_train_timesteps": 100, "num_inference_steps": STEPS, "beta_schedule": "squaredcos_cap_v2"}


def equal(kind, method):
    """As many FLOPs, by the rule of thumb of this file: `cost`."""
    wanted = cost(method.name)
    if kind == "teacache":
        return parse_method(f"teacache:threshold={wanted / 100}")
    return parse_method(f"{kind}-{wanted}" if kind in ("ddim", "ddpm") else f"{kind}:S={wanted}")


def cost(name):
    """In steps' worth: S of them, and one for each two blocks of a union."""
    method = parse_method(name)
    if isinstance(method.reuse, Solved):
        return method.reuse.updates + (method.reuse.union // 2 if method.reuse.word == "bac" else 0)
    if isinstance(method.reuse, TeaCache):
        return round(method.reuse.threshold * 100)
    return STEPS if method.sampler is None else method.sampler.steps


def method_run(name):
    sampler = parse_method(name).sampler
    used = OWN if sampler is None else {**OWN, "type": sampler.sampler, "num_inference_steps": sampler.steps}
    flops = cost(name) * 40_000_000
    reuse = None if name == "full" else {"updates": {"layers.0.SA": [0, len(name)]}}
    return MethodRun(name, "onnx", used, reuse, sampler is None, flops, 0.5, ActionError(0.1, 0.2))


def make_suite(name, lost, rollouts=40, main_rollouts=60, quick=False, weights="w" * 64, spread=0.04, task="pusht"):
    """A suite's results in which each method loses `lost(name)` on average, `spread` more or less in each pair."""
    suite = suite_by_name(name, equal, quick)
    main = {cell.method for cell in suite.cells if cell.main} | {"full"}
    names = list(dict.fromkeys(("full", *suite.methods)))
    records = []
    for method in names:
        for seed in range(100_000, 100_000 + (main_rollouts if method in main and name == "main" else rollouts)):
            score = float(np.random.default_rng(seed).uniform(0.6, 0.8))
            if method != "full":
                score += spread * (1 if (seed + len(method)) % 2 else -1) - lost(method)
            records.append(Record(method, seed, score, score > 0.7, 50, None, 0.1, 0.1))
    return Results(
        task={"name": task, "success": "coverage >= 0.95", "max_steps": 300},
        policy={"source": "tiny", "fingerprint": fingerprint(weights)},
        setting={
            "first_seed": 100_000,
            "rollouts": main_rollouts if name == "main" else rollouts,
            "group": 10,
            "open_loop_observations": 32,
            "calibration": {"generations": 16, "seed": 0, "observations": "x"},
            "suite": suite.describe(),
        },
        noise_floor=ActionError(0.09, 0.2),
        methods=tuple(method_run(method) for method in names),
        records=tuple(records),
    )


def fingerprint(weights="w" * 64):
    about = {"family": "dp-t", "blocks": ["layers.0.SA"], "widths": {"width": 8}, "steps": STEPS, "sampler": OWN}
    return {**about, "weights": weights}


def lost(name):
    """Reuse and fewer steps cost alike, Uniform twice as much; nothing is lost above 15 steps' worth."""
    worth = cost(name) / (2 if "uniform" in name else 1)
    return max(0.0, (15 - worth) / 30) + (0.3 if "consecutive" in name else 0.0)


def rows(text, first):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {first}")]

"""Random policies under random schedules: every engine, and an export on a robot's libraries, against the reference."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import blockcache as bc
from blockcache.errors import SamplerError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import SamplerConfig, table
from blockcache.solvers.bac import bubbling_union
from blockcache_runtime import open_export

from . import reference

torch.set_num_threads(1)
TOLERANCE = 1e-4  # the promise, in normalised units; as a share where values exceed 1 (no clipping)
ENGINES = ("patched", "loop", "onnx", "deploy")


@dataclass(frozen=True)
class Comparison:
    """One random policy; `gaps` by engine, the largest difference of an action from the reference."""

    case: int
    about: str
    gaps: dict[str, float]
    amplified: float = 1.0
    """By the sampler: with second-order steps a hundredth apart (19.01, 19) a rounding error of x0 counts 2,000 times."""
    error: str | None = None

    @property
    def agrees(self) -> bool:
        return self.error is None and all(gap <= TOLERANCE * self.amplified for gap in self.gaps.values())


def random_sampler(chance: random.Random) -> SamplerConfig:
    """Any kind, any settings, whole steps or placed ones; what a sampler refuses is drawn again."""
    while True:
        kind = chance.choice(["ddpm", "ddim", "dpmsolver++", "sde-dpmsolver++", "euler"])
        count = chance.randint(1, 9)
        settings: dict[str, Any] = {"type": kind, "num_inference_steps": count}
        if chance.random() < 0.25:
            # not too close together: across a step twenty times the one before, a solver of order 2 adds up rounding errors
            places = sorted(chance.sample(range(20), count), reverse=kind != "euler")
            if kind == "euler":
                settings["timesteps"] = [(place + chance.random() / 2) / 20 for place in places]
            else:
                settings["timesteps"] = [
                    5 * place + chance.choice([0, 1, round(2 * chance.random(), 2)]) for place in places
                ]
        if kind != "euler":
            dpm = kind.endswith("dpmsolver++")
            settings |= {
                "prediction_type": chance.choice(["epsilon", "epsilon", "sample", "v_prediction"]),
                "beta_schedule": chance.choice(["squaredcos_cap_v2", "linear", "scaled_linear"]),
                "clip_sample": chance.random() < (0.5 if dpm else 0.8),
                "clip_sample_range": chance.choice([1.0, 1.0, 2.0]),
                "timestep_spacing": chance.choice(["leading", "linspace", "trailing"]),
            }
            if dpm:
                settings |= {"solver_order": chance.choice([1, 2]), "lower_order_final": chance.random() < 0.5}
                settings["final_sigmas_type"] = chance.choice(["zero", "sigma_min"])
        if kind == "ddpm":
            settings["variance_type"] = chance.choice(["fixed_small", "fixed_small_log", "fixed_large"])
        if kind == "ddim":
            # with eta = 1 a first step may leave only a rounding error for eps, and torch's is another than numpy's (2e-4)
            settings |= {"eta": chance.choice([0.0, 0.0, 0.5, 0.9]), "set_alpha_to_one": chance.random() < 0.7}
        try:
            return SamplerConfig.from_dict(settings)
        except SamplerError:
            continue


def random_policy(chance: random.Random) -> DiffusionTransformerPolicy:
    heads, form = chance.choice([1, 2, 3, 4]), chance.choice(["mlp"] * 6 + ["transformer", "encoder-only"])
    observed, executed = chance.randint(1, 3), chance.randint(1, 4)
    config = DPTConfig(
        obs_dim=chance.randint(1, 6),
        action_dim=chance.randint(1, 4),
        horizon=observed - 1 + executed + chance.randint(0, 4),
        n_obs_steps=observed,
        n_action_steps=executed,
        n_layer=chance.randint(1, 3),
        n_head=heads,
        n_emb=heads * chance.choice([4, 6, 8]),
        n_cond_layers=chance.randint(1, 2) if form == "transformer" else 0,
        causal_attn=chance.random() < 0.7,
        time_as_cond=form != "encoder-only",
        obs_as_cond=form != "encoder-only",
        sampler=random_sampler(chance),
    )
    draw = torch.Generator().manual_seed(chance.randrange(2**31))
    policy = DiffusionTransformerPolicy(config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():  # large enough for every block to matter
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(gain + 0.3 * torch.randn(parameter.shape, generator=draw))
        for field in (policy.normalizer.obs, policy.normalizer.action):
            field.scale.copy_(0.5 + torch.rand(field.scale.shape, generator=draw))
            field.offset.copy_(torch.randn(field.offset.shape, generator=draw))
    return policy.eval()


def random_updates(names: list[str], steps: int, chance: random.Random) -> dict[str, tuple[int, ...]]:
    """Of any kind that a solver may give: full, step 0 only, uniform, each block its own, and with a union."""
    kind = chance.choice(["full", "first", "uniform", "own", "own", "union", "union"])
    share = chance.random()
    own = {name: (0, *(k for k in range(1, steps) if chance.random() < share)) for name in names}
    if kind == "union":
        upstream = chance.sample(names, chance.randint(1, len(names)))
        found = bubbling_union(own, upstream)
        assert found == reference.bubbling_union(own, upstream), "the union is not the paper's"
        return found
    alike = {"full": range(steps), "first": (0,), "uniform": range(0, steps, chance.randint(1, steps))}
    return own if kind == "own" else {name: tuple(alike[kind]) for name in names}


def compare(seed: int, case: int, directory: Path) -> Comparison:
    """One random policy in every engine."""
    chance = random.Random(f"{seed}/engines/{case}")
    policy = random_policy(chance)
    config = policy.config.to_dict()
    kinds = ("SA", "CA", "FFN") if config["time_as_cond"] else ("SA", "FFN")
    names = [f"layers.{layer}.{kind}" for layer in range(config["n_layer"]) for kind in kinds]
    updates = random_updates(names, policy.num_inference_steps, chance)
    batch, cut = chance.randint(1, 4), config["causal_attn"] and chance.random() < 0.5
    draw = torch.Generator().manual_seed(chance.randrange(2**31))
    obs = torch.randn(batch, policy.n_obs_steps, policy.obs_dim, generator=draw)
    noise = policy.draw_noise(batch, draw)
    weights = {name: value.double().numpy() for name, value in policy.state_dict().items()}
    expected = reference.generate(weights, config, updates, obs.double().numpy(), noise.double().numpy())
    first = policy.n_obs_steps - 1
    expected = expected[:, first : first + policy.n_action_steps]
    scale = weights["normalizer.params_dict.action.scale"]
    sizes = f"{len(names)} blocks, {policy.horizon} tokens, batch {batch}"
    about = f"{policy.sampler.type} x {policy.num_inference_steps}, {sizes}"
    gaps = {}
    try:
        for engine, found in _answers(
            policy, bc.Schedule(policy.num_inference_steps, updates), obs, noise, cut, directory
        ):
            assert found.shape == expected.shape, f"{engine}: {found.shape} instead of {expected.shape}"
            size = max(1.0, float(np.abs(expected * scale).max()))
            gap = float(np.abs((found - expected) * scale).max()) / size
            gaps[engine] = gap if np.isfinite(gap) else float("inf")
    except Exception as error:
        return Comparison(case, about, gaps, error=f"{type(error).__name__}: {error}"[:300])
    return Comparison(case, about, gaps, max(1.0, float(np.abs(table(policy.sampler).b).max()) / 10))


def _answers(
    policy: DiffusionTransformerPolicy, schedule: bc.Schedule, obs: Any, noise: Any, cut: bool, directory: Path
) -> Iterator[tuple[str, Any]]:
    whole_loop = policy.config.time_as_cond and policy.config.n_cond_layers == 0  # the others run in patched only
    for engine in ENGINES[:3] if whole_loop else ENGINES[:1]:
        output = "action" if cut and engine != "patched" else "chunk"
        with bc.accelerate(policy, schedule, engine=engine, output=output, threads=1) as fast:
            yield engine, fast.predict_action(obs, noise=noise)["action"].double().numpy()
    if not whole_loop:
        return
    path = directory / f"{os.getpid()}.onnx"
    bc.export_policy(policy, schedule, path, "action" if cut else "chunk")
    yield (
        "deploy",
        open_export(path, threads=1).predict_action(obs.numpy(), noise=noise.numpy())["action"].astype(float),
    )

"""Policies run under an engine, and what comes out compared: shared by the tests of loop and onnx."""

import torch

import blockcache as bc
from blockcache.models.registry import port_of
from blockcache.samplers.base import sampler_class

CLOSE = 1e-5  # normalised units; the promise is 1e-4
BLOCKS = tuple(f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN"))


def sampler(kind, steps=6, **settings):
    if kind.endswith(
        "dpmsolver++"
    ):  # does not clip: from the cosine schedule's end everything would drown in large numbers
        settings = {"beta_schedule": "linear", **settings}
    return sampler_class(kind)(num_inference_steps=steps, **settings)


SAMPLERS = {
    "ddpm": sampler("ddpm"),
    "ddpm, fixed_large": sampler("ddpm", variance_type="fixed_large"),
    "ddpm, no clipping": sampler("ddpm", clip_sample=False),
    "ddpm, clipped at 2": sampler("ddpm", clip_sample_range=2.0),
    "ddpm, sample": sampler("ddpm", prediction_type="sample"),
    "ddpm, v": sampler("ddpm", prediction_type="v_prediction"),
    "ddpm, trailing": sampler("ddpm", timestep_spacing="trailing", steps=5),  # draws at its last step too
    "ddpm, one step": sampler("ddpm", steps=1),
    "ddim": sampler("ddim"),
    "ddim, eta 0.7": sampler("ddim", eta=0.7),
    "ddim, eta 0.7, no clipping": sampler("ddim", eta=0.7, clip_sample=False),
    "ddim, sample": sampler("ddim", prediction_type="sample"),
    "ddim, v, eta 0.7": sampler("ddim", prediction_type="v_prediction", eta=0.7),
    "ddim, one step": sampler("ddim", steps=1),
    "dpmsolver++, order 1": sampler("dpmsolver++", solver_order=1),
    "dpmsolver++, order 2": sampler("dpmsolver++"),
    "dpmsolver++, order 2 to the end": sampler("dpmsolver++", lower_order_final=False, final_sigmas_type="sigma_min"),
    "dpmsolver++, sample": sampler("dpmsolver++", prediction_type="sample"),
    "dpmsolver++, v": sampler("dpmsolver++", prediction_type="v_prediction"),
    "dpmsolver++, one step": sampler("dpmsolver++", steps=1),
    "dpmsolver++, clipped": sampler("dpmsolver++", beta_schedule="squaredcos_cap_v2", clip_sample=True),
    "sde-dpmsolver++, order 1": sampler("sde-dpmsolver++", solver_order=1),
    "sde-dpmsolver++, order 2": sampler("sde-dpmsolver++"),
    "sde-dpmsolver++, order 2 to the end": sampler("sde-dpmsolver++", 15, final_sigmas_type="sigma_min"),
    "ddpm, placed": sampler("ddpm", 4, timesteps=[70, 57.5, 20, 5]),
    "ddim, placed": sampler("ddim", 4, timesteps=[70, 57.5, 20, 0], eta=0.7),
    "sde-dpmsolver++, placed": sampler("sde-dpmsolver++", 4, timesteps=[70, 57.5, 20, 5.25]),
    "euler": sampler("euler"),
    "euler, placed": sampler("euler", 4, timesteps=[0, 0.1, 0.3, 0.8]),
}


def accelerate(policy, schedule=None, engine="loop", **settings):
    return bc.accelerate(policy, schedule, engine=engine, threads=1, **settings)


def observe(policy, batch=1, seed=0):
    return torch.randn(batch, policy.n_obs_steps, policy.obs_dim, generator=generator(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def act(policy, batch=1, seed=0):
    """All that comes out for a random observation."""
    return policy.predict_action(observe(policy, batch, seed), generator=generator(seed))


def difference(policy, found, expected):
    """The largest one in normalised units, as a share of the largest value where that is above 1 (no clipping)."""
    assert found.shape == expected.shape
    scale = policy.normalizer.action.scale
    size = max(1.0, float((expected * scale).abs().max()))
    return float(((found - expected) * scale).abs().max()) / size


def names(policy):
    return [f"layers.{index}.{kind}" for index in range(policy.config.n_layer) for kind in ("SA", "CA", "FFN")]


def schedule_for(policy, random_updates, seed=0):
    steps = policy.num_inference_steps
    return bc.Schedule(steps, random_updates(names(policy), steps, seed))


def block_names(policy):
    """Of its blocks."""
    return [block.name for block in port_of(policy).adapter.blocks]


def snapshot(policy):
    """Every attribute of the policy and of all its modules, by identity."""
    return [(module, dict(vars(module))) for module in policy.modules()]

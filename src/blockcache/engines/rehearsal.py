"""A foreign policy is known by its shape alone, so a whole-loop engine rehearses before it takes its place.

A few generations at full precision, the policy's own beside ours with the same noise. A `predict_action` that does more
than the public code's, such as turning differences into positions, is found out here and not on the robot.
"""

from __future__ import annotations

import torch

from blockcache.engines.compiled import CompiledPolicy
from blockcache.engines.loop import Loop
from blockcache.errors import EngineError
from blockcache.models.noise import draw_all
from blockcache.models.port import Target
from blockcache.schedule import Schedule
from blockcache.schedule.plan import compile_plan

_SAMPLES = 4


def rehearse(target: Target, policy: CompiledPolicy, engine: str) -> None:
    """Refuse a foreign policy whose actions come out differently; leaves torch's generators as they were."""
    names = [block.name for block in target.adapter.blocks]
    loop = Loop(policy, compile_plan(Schedule.every_step(policy.sampler.steps, names)))
    like = policy.input_b
    field = {part: target.policy.state_dict()[f"normalizer.params_dict.obs.{part}"] for part in ("scale", "offset")}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        # all over the range that it was trained on; what lies beyond may be clipped, and nobody would mind
        seen = torch.rand(_SAMPLES, policy.n_obs_steps, policy.obs_dim, dtype=like.dtype, device=like.device)
        obs = (2 * seen - 1 - field["offset"]) / field["scale"]
        torch.manual_seed(1)
        try:
            expected = target.policy.predict_action({"obs": obs})["action"]
        except Exception as error:  # foreign code may raise anything
            raise _refusal(
                engine, f"it fails with an observation under 'obs': {type(error).__name__}: {error}"
            ) from error
        torch.manual_seed(1)
        found = loop(obs, draw_all(policy.sampler, policy.chunk(_SAMPLES), like, None))["action"]
    if expected.shape != found.shape:
        raise _refusal(engine, f"its actions have shape {tuple(expected.shape)}, ours {tuple(found.shape)}")
    normalised = (expected.to(found) - policy.action_offset) / policy.action_scale
    gap = (expected.to(found) - found) / policy.action_scale
    difference = float(gap.abs().max() / normalised.abs().max().clamp(min=1.0))
    if not difference <= torch.finfo(like.dtype).eps ** 0.4:  # 2e-3 in float32; NaN is refused as well
        raise _refusal(engine, f"its actions differ from ours by up to {difference:.1g} with the same noise")


def _refusal(engine: str, reason: str) -> EngineError:
    return EngineError(
        f'the {engine} engine cannot stand in for this policy\'s own predict_action, {reason}; use engine="patched"'
    )

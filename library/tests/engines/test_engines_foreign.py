"""Loop and onnx on a foreign policy: a class with the public interface and tensor names that shares nothing with ours."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, ObservationError, StaleWeightsError
from foreign_policy import BLOCKS, COSINE, OBS, SEEN, STEPS, TOKENS, Denoiser, Policy

pytestmark = pytest.mark.usefixtures("exports_stay_here")


class Moving(Policy):
    """Does more than the public code: its actions are differences that it adds up."""

    def predict_action(self, obs_dict):
        return {name: value.cumsum(dim=1) for name, value in super().predict_action(obs_dict).items()}


class Eager(Policy):
    """Draws once more than the public code does."""

    def predict_action(self, obs_dict):
        torch.randn(1)
        return super().predict_action(obs_dict)


class Timid(Policy):
    """Sees what is to its right twice as far away; its normaliser takes 0 to 512 to -1 to 1."""

    def __init__(self):
        super().__init__()
        self.normalizer.params_dict["obs"]["scale"].fill_(1 / 256)
        self.normalizer.params_dict["obs"]["offset"].fill_(-1)

    def predict_action(self, obs_dict):
        obs = obs_dict["obs"]
        return super().predict_action({"obs": torch.where(obs > 256, 2 * obs - 256, obs)})


class Wordy(Policy):
    """Wants its observation under another name."""

    def predict_action(self, obs_dict):
        return super().predict_action({"obs": obs_dict["state"]})


def observe(batch=1):
    return {"obs": torch.randn(batch, SEEN, OBS, generator=torch.Generator().manual_seed(batch))}


def act(policy, batch=1, seed=0):
    torch.manual_seed(seed)
    return policy.predict_action(observe(batch))


def difference(found, expected):
    """The largest one, as a share of the largest value where that is above 1 (DPM-Solver++ does not clip)."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def schedule(random_updates, seed=0):
    return bc.Schedule(STEPS, random_updates(BLOCKS, STEPS, seed))


POLICIES = {
    "ddpm": lambda: Policy(),
    "ddpm, fixed_large, v": lambda: Policy(
        DDPMScheduler(20, variance_type="fixed_large", prediction_type="v_prediction", **COSINE)
    ),
    "ddim": lambda: Policy(DDIMScheduler(20, **COSINE)),
    "ddim with eta": lambda: Policy(DDIMScheduler(20, **COSINE), eta=0.5),
    "dpmsolver++": lambda: Policy(DPMSolverMultistepScheduler(20)),
    "sde-dpmsolver++": lambda: Policy(DPMSolverMultistepScheduler(20, algorithm_type="sde-dpmsolver++")),
    "identity normaliser": lambda: Policy(identity=True),
    "masks outside the state": lambda: Policy(denoiser=Denoiser("attributes")),
    "masks of booleans": lambda: Policy(denoiser=Denoiser("booleans")),
    "no masks": lambda: Policy(denoiser=Denoiser("none")),
}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_the_same_actions_as_its_own(engine, make, random_updates):
    policy = make()
    expected = {batch: act(policy, batch) for batch in (1, 3)}
    with bc.accelerate(policy, schedule(random_updates), engine="patched"):
        skipped = act(policy)["action_pred"]
    assert difference(skipped, expected[1]["action_pred"]) > 1e-3
    with bc.accelerate(policy, engine=engine, threads=1):
        for batch in (1, 3, 1):
            found = act(policy, batch)
            assert set(found) == {"action", "action_pred"}
            for name in found:
                assert difference(found[name], expected[batch][name]) < 1e-5
    with bc.accelerate(policy, schedule(random_updates), engine=engine, threads=1):
        assert difference(act(policy)["action_pred"], skipped) < 1e-5
    assert torch.equal(act(policy)["action_pred"], expected[1]["action_pred"])


class Goal(Policy):
    """Appends a goal to the normalised observation, so that the denoiser takes more numbers than the robot gives."""

    def __init__(self):
        super().__init__(denoiser=Denoiser())
        self.model.cond_obs_emb = nn.Linear(OBS + 1, self.model.cond_obs_emb.out_features)

    @torch.no_grad()
    def predict_action(self, obs_dict):
        goal = torch.ones(*obs_dict["obs"].shape[:2], 1)
        x = torch.randn(len(goal), self.horizon, self.action_dim)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            cond = torch.cat([obs_dict["obs"], goal], dim=2)
            x = self.noise_scheduler.step(self.model(x, t, cond), t, x).prev_sample
        return {"action": x, "action_pred": x}


def test_what_does_not_quite_fit_is_left_to_the_patched_engine(engine):
    policy = Goal().eval()
    expected = act(policy)["action"]
    with pytest.raises(
        EngineError, match=r'a normaliser of obs with another number of values than 5; use engine="patched"'
    ):
        bc.accelerate(policy, engine=engine, threads=1)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"
        assert [note.split(":")[0] for note in fast.stats().notes] == ["not onnx", "not loop"]
        assert torch.equal(act(policy)["action"], expected)


def test_auto_takes_it(random_updates):
    policy = Policy()
    expected = act(policy)["action"]
    with bc.accelerate(policy, output="action") as fast:
        assert fast.engine == "onnx"
        assert difference(act(policy)["action"], expected) < 1e-5


def test_enabling_leaves_no_trace_in_the_noise(engine):
    """An engine rehearses on a foreign policy; whoever seeded torch must not notice."""
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    with bc.accelerate(Policy(), engine=engine, threads=1):
        assert torch.equal(torch.randn(4), expected)


def test_changed_weights_are_noticed(engine):
    policy = Policy()
    with bc.accelerate(policy, engine=engine, threads=1):
        policy.normalizer.params_dict["action"]["scale"].mul_(2)
        with pytest.raises(StaleWeightsError):
            act(policy)


def test_its_own_name_for_the_observation_is_understood(engine):
    policy = Policy()
    torch.manual_seed(0)
    expected = policy.predict_action(obs_dict=observe())["action"]
    with bc.accelerate(policy, engine=engine, threads=1):
        torch.manual_seed(0)
        assert difference(policy.predict_action(obs_dict=observe())["action"], expected) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: setattr(policy, "num_inference_steps", STEPS - 1),
        lambda policy: setattr(policy, "noise_scheduler", DDIMScheduler(20, **COSINE)),
        lambda policy: setattr(policy, "n_action_steps", 1),
        lambda policy: policy.kwargs.update(eta=1.0),
        lambda policy: setattr(policy, "pred_action_steps_only", True),
    ],
    ids=["steps", "scheduler", "actions", "eta", "steps only"],
)
def test_changed_settings_are_noticed(engine, change):
    policy = Policy()
    with bc.accelerate(policy, engine=engine, threads=1):
        act(policy)
        change(policy)
        with pytest.raises(EngineError, match="sampler or sizes changed"):
            act(policy)


@pytest.mark.parametrize(
    "obs", [torch.zeros(1, SEEN - 1, OBS), torch.zeros(1, SEEN, OBS - 1), torch.zeros(0, SEEN, OBS), torch.zeros(OBS)]
)
def test_other_observations_are_refused(engine, obs):
    policy = Policy()
    with bc.accelerate(policy, engine=engine, threads=1), pytest.raises(ObservationError, match="expected"):
        policy.predict_action({"obs": obs})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Moving, "its actions differ from the engine's by up to"),
        (Eager, "its actions differ from the engine's by up to"),
        (Timid, "its actions differ from the engine's by up to"),
        (Wordy, "it fails with an observation under 'obs': KeyError: 'state'"),
    ],
)
def test_a_policy_that_does_something_else_is_found_out(engine, make, reason):
    policy = make()
    obs = {**observe(), "state": observe()["obs"]}
    torch.manual_seed(0)
    expected = policy.predict_action(obs)["action"]
    with pytest.raises(EngineError) as caught:
        bc.accelerate(policy, engine=engine, threads=1)
    assert str(caught.value).startswith(f"the {engine} engine cannot stand in for this policy's own predict_action")
    assert reason in str(caught.value)
    assert str(caught.value).endswith('use engine="patched"')
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"
        torch.manual_seed(0)
        assert torch.equal(policy.predict_action(obs)["action"], expected)


@pytest.mark.parametrize(
    ("scheduler", "named"),
    [
        (EulerDiscreteScheduler(20), "the sampler EulerDiscreteScheduler"),
        (FlowMatchEulerDiscreteScheduler(20), "the sampler FlowMatchEulerDiscreteScheduler"),
        (DDPMScheduler(20, thresholding=True, **COSINE), "the sampler DDPMScheduler with thresholding = True"),
        (DDPMScheduler(20, variance_type="learned", **COSINE), "variance_type: .* got 'learned'"),
        (DDPMScheduler(20, prediction_type="flow", **COSINE), "prediction_type: .* got 'flow'"),
        (
            DPMSolverMultistepScheduler(20, algorithm_type="sde-dpmsolver++", solver_type="heun", **COSINE),
            "solver_type = heun",
        ),
        (DPMSolverMultistepScheduler(20, solver_order=3, **COSINE), "solver_order: .* got 3"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_samplers_that_only_the_patched_engine_runs(engine, scheduler, named):
    policy = Policy(scheduler)
    with pytest.raises(EngineError, match=f'^the {engine} engine does not support .*{named}.*; use engine="patched"$'):
        bc.accelerate(policy, engine=engine, threads=1)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda policy: delattr(policy, "horizon"), "a policy without horizon"),
        (lambda policy: delattr(policy, "obs_dim"), "a policy without obs_dim"),
        (lambda policy: delattr(policy, "normalizer"), "a policy without the tensor normalizer.params_dict.obs.scale"),
        (lambda policy: setattr(policy, "pred_action_steps_only", True), "pred_action_steps_only"),
        (
            lambda policy: setattr(policy, "horizon", TOKENS - 1),
            "a horizon that is not the denoiser's number of tokens",
        ),
        (lambda policy: setattr(policy, "n_obs_steps", 1), "condition tokens other than time and observations"),
        (lambda policy: delattr(policy.model, "ln_f"), "a denoiser without time_emb and ln_f"),
    ],
)
def test_policies_that_lack_something_are_refused(engine, change, named):
    policy = Policy()
    change(policy)
    with pytest.raises(EngineError, match=f'does not support {named}; use engine="patched"'):
        bc.accelerate(policy, engine=engine, threads=1)


def test_a_policy_that_is_no_module_is_refused(engine):
    class Bare:
        def __init__(self, inner):
            self.__dict__.update({name: getattr(inner, name) for name in ("model", "noise_scheduler", "horizon")})
            self.num_inference_steps = inner.num_inference_steps
            self.predict_action = inner.predict_action

    with pytest.raises(EngineError, match="does not support a policy that is no torch module"):
        bc.accelerate(Bare(Policy()), engine=engine)


def test_relu_is_refused(engine):
    with pytest.raises(EngineError, match="an activation other than GELU"):
        bc.accelerate(Policy(denoiser=Denoiser(activation="relu")), engine=engine)

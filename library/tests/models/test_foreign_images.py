"""A foreign policy with a camera and an encoder of its own: run as it is, with the engines behind that encoder."""

import pytest
import torch
from torch import nn

import blockcache as bc
import foreign_policy
from blockcache.compare.evaluation import prepare
from blockcache.errors import EngineError, ObservationError, PolicyError
from blockcache.fingerprint import fingerprint_differences
from blockcache.models.registry import port_of
from blockcache.testing import PolicyContract
from foreign_policy import ACTION, BLOCKS, EXECUTED, OBS, SEEN, STEPS, TOKENS, Denoiser, act
from toy_task import Toy

pytestmark = pytest.mark.usefixtures("exports_stay_here")

PIXELS = 6


class Encoder(nn.Module):
    """An image and a position become one vector of as many numbers as the denoiser takes."""

    def __init__(self):
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        self.feel = nn.Linear(2, OBS - 2)

    def forward(self, obs):
        return torch.cat([self.see(obs["image"]), self.feel(obs["agent_pos"])], dim=-1)


class CameraPolicy(nn.Module):
    """The shape of the public code's image policies: an encoder of its own in front of DP-T, nested nowhere."""

    def __init__(self):
        super().__init__()
        inner = foreign_policy.Policy(denoiser=Denoiser())
        self.model, self.noise_scheduler = inner.model, inner.noise_scheduler
        self.normalizer = inner.normalizer
        del self.normalizer.params_dict["obs"]
        self.num_inference_steps, self.kwargs = STEPS, {}
        self.horizon, self.n_obs_steps, self.n_action_steps = TOKENS, SEEN, EXECUTED
        self.action_dim, self.obs_feature_dim = ACTION, OBS
        self.pred_action_steps_only = False
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.obs_encoder = Encoder()
        self.eval()

    @torch.no_grad()
    def predict_action(self, obs_dict):
        assert "past_action" not in obs_dict
        seen = {name: value[:, : self.n_obs_steps].flatten(0, 1) for name, value in obs_dict.items()}
        cond = self.obs_encoder(seen).unflatten(0, (-1, self.n_obs_steps))
        x = torch.randn(len(cond), self.horizon, self.action_dim)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.model(x, t, cond), t, x, **self.kwargs).prev_sample
        field = self.normalizer.params_dict["action"]
        chunk = (x - field["offset"]) / field["scale"]
        start = self.n_obs_steps - 1
        return {"action": chunk[:, start : start + self.n_action_steps], "action_pred": chunk}


def observed(batch=2, steps=SEEN):
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.rand(batch, steps, 3, PIXELS, PIXELS, generator=generator),
        "agent_pos": torch.randn(batch, steps, 2, generator=generator),
    }


class TestCamera(PolicyContract):
    """Everything that any policy promises."""

    declares_observations = False

    def policy(self):
        return CameraPolicy()

    def observation(self, batch):
        return observed(batch)


def test_calibrate_solve_accelerate():
    policy = CameraPolicy()
    plain = act(policy, observed())
    recording = bc.calibrate(policy, [observed(3), observed(1)], progress=False)
    assert recording.samples == 4
    assert [block.name for block in recording.blocks] == BLOCKS
    schedule = bc.solve(recording, updates=2, union=2)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = act(policy, observed())
    with bc.accelerate(policy, schedule) as fast:
        assert fast.engine == "onnx"
        assert torch.allclose(act(policy, observed()), expected, atol=1e-5)
        assert not torch.equal(act(policy, observed()), plain)
        assert fast.stats().reused_share > 0.4
        assert torch.equal(act(policy, observed(steps=SEEN + 2)), act(policy, observed(steps=SEEN + 2)))
    assert torch.equal(act(policy, observed()), plain)


def test_its_encoder_is_part_of_no_file():
    with pytest.raises(EngineError, match="the encoder of CameraPolicy is not one that can be part of a file"):
        bc.export_policy(CameraPolicy(), None, "policy.onnx")


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.zeros(1, SEEN, OBS), "got Tensor"),
        ({"obs": observed()}, "got dict {'obs': 'dict'}"),
        ({"agent_pos": torch.zeros(1, SEEN, 2)}, r"got dict {'agent_pos': 'Tensor'} \(KeyError: 'image'\)"),
    ],
    ids=["tensor", "nested", "no image"],
)
@pytest.mark.parametrize("engine", ["patched", "loop"])
def test_other_observations_are_refused_with_one_sentence(given, got, engine):
    policy = CameraPolicy()
    with (
        bc.accelerate(policy, engine=engine),
        pytest.raises(ObservationError, match=f"CameraPolicy takes a mapping of tensors by name, {got}"),
    ):
        act(policy, given)


def test_a_pixel_that_is_not_finite_is_refused():
    obs = observed()
    obs["image"][1, 0, 2, 3, 3] = torch.nan
    with bc.accelerate(CameraPolicy(), engine="patched") as fast, pytest.raises(ObservationError, match="NaN"):
        act(fast, obs)


def test_its_encoder_s_weights_and_mode_count():
    policy = CameraPolicy()
    before = port_of(policy).fingerprint
    with torch.no_grad():
        policy.obs_encoder.feel.bias.add_(1)
    (difference,) = fingerprint_differences(before, port_of(policy).fingerprint)
    assert difference.startswith("weights")
    policy.obs_encoder.see[1] = nn.BatchNorm2d(4)
    with pytest.raises(PolicyError, match=r"train mode, as obs_encoder\.see\.1 \(BatchNorm2d\) shows"):
        bc.accelerate(policy)


def test_a_task_without_cameras_is_refused(tmp_path):
    with pytest.raises(
        PolicyError, match="CameraPolicy does not say what it observes, which files of observations and rollouts need"
    ):
        prepare(CameraPolicy(), "toy", (), observed(12), state=tmp_path, make=Toy, progress=False)

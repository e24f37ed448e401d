"""Camera policies in every engine: ours, a live one of the public code, and one whose encoder nobody knows."""

import copy

import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.engines.build import build
from blockcache.errors import EngineError, ObservationError, StaleError, StaleWeightsError
from blockcache.models.dpt.cameras import known_encoder
from blockcache.models.program import UnsupportedError
from blockcache.models.registry import port_of
from blockcache.testing import PolicyContract
from image_policies import (
    ENCODERS,
    REDUCED,
    CentreCrop,
    PublicImagePolicy,
    Strange,
    image_policy,
    observed,
    strange,
)

pytestmark = pytest.mark.usefixtures("exports_stay_here")


def act(policy, obs, seed=0):
    if isinstance(policy, PublicImagePolicy):
        torch.manual_seed(seed)
        return policy.predict_action(obs)["action_pred"]
    return policy.predict_action(obs, generator=torch.Generator().manual_seed(seed))["action_pred"]


class TestOneCamera(PolicyContract):
    encoder = "one camera"

    def policy(self):
        return image_policy(self.encoder)

    def observation(self, batch):
        return observed(self.encoder, batch, dtype=torch.float32)


class TestOfThePublicCode(TestOneCamera):
    def policy(self):
        return PublicImagePolicy(image_policy(self.encoder))


class TestBehindAStrangeEncoder(PolicyContract):
    declares_observations = False

    def policy(self):
        return strange()

    def observation(self, batch):
        return observed(batch=batch, dtype=torch.float32)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_engines_agree(encoder, engine):
    policy, frames = image_policy(encoder), observed(encoder, 3)
    plain = act(policy, frames)
    with bc.accelerate(policy, REDUCED, "patched"):
        expected = act(policy, frames)
    assert (expected - plain).abs().max() > 1e-3
    for schedule, wanted in ((None, plain), (REDUCED, expected)):
        with bc.accelerate(policy, schedule, engine, threads=1):
            assert torch.allclose(act(policy, frames), wanted, atol=1e-5)
        with bc.accelerate(policy, schedule, engine, output="action", threads=1):
            found = policy.predict_action(frames, generator=torch.Generator().manual_seed(0))["action"]
            assert torch.allclose(found, wanted[:, policy.config.executed], atol=1e-5)


def test_the_encoder_looks_once_in_a_generation(engine):
    policy = image_policy()
    looks = []
    policy.obs_encoder.register_forward_pre_hook(lambda *_: looks.append(1))
    act(policy, observed())
    assert len(looks) == 1
    with bc.accelerate(policy, REDUCED, "patched"):
        act(policy, observed())
    assert len(looks) == 2
    program = build(port_of(image_policy()), REDUCED, engine).program
    (network,) = program.networks
    without = build(port_of(image_policy("no crop, no numbers")), REDUCED, engine).program
    assert program.encoder_flops == 2 * network.flops
    assert program.once > program.encoder_flops > 100 * without.every_step


def test_an_encoder_s_flops_are_those_of_its_convolutions():
    """Counted by torch, for one frame."""
    policy = image_policy()
    (network,) = port_of(policy).program().networks
    counted = []

    def count(module, given, found):
        if isinstance(module, nn.Conv2d):
            counted.append(2 * found[0].numel() * module.weight[0].numel())
        elif isinstance(module, nn.Linear):
            counted.append(2 * module.weight.numel())

    net = policy.obs_encoder.obs_nets["image"]
    for module in net.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        net(torch.zeros(1, 3, *network.sides))
    assert network.flops == sum(counted) + 4 * network.keypoints * network.places  # the softmax's sums of x and y


def test_a_live_policy_of_the_public_code_is_accelerated_in_place(engine):
    for encoder in ENCODERS:
        policy = PublicImagePolicy(image_policy(encoder))
        frames = observed(encoder, dtype=torch.float32)
        plain, longer = act(policy, frames), observed(encoder, steps=4, dtype=torch.float32)
        expected = act(policy, longer)
        port = port_of(policy)
        assert (port.cameras, dict(port.inputs)) == (
            port_of(image_policy(encoder)).cameras,
            dict(port_of(image_policy(encoder)).inputs),
        )
        with bc.accelerate(policy, engine=engine, threads=1) as fast:
            assert torch.allclose(act(policy, frames), plain, atol=1e-5)
            assert torch.allclose(act(policy, longer), expected, atol=1e-5)
            fast.verify()
            act(policy, frames)  # what its networks wrote down meanwhile is no change
        assert torch.equal(act(policy, frames), plain)


@pytest.mark.parametrize("make", [image_policy, lambda: PublicImagePolicy(image_policy())], ids=["ours", "public"])
def test_changed_weights_of_an_encoder_are_noticed(make, engine):
    policy, frames = make(), observed(dtype=torch.float32)
    with bc.accelerate(policy, engine=engine, threads=1):
        act(policy, frames)
        with torch.no_grad():
            policy.obs_encoder.obs_nets["image"].backbone.nets[4][0].bn1.bias.add_(0.1)
        with pytest.raises(StaleWeightsError):
            act(policy, frames)


def test_a_change_of_a_live_policy_s_encoder_is_noticed(engine):
    policy, frames = PublicImagePolicy(image_policy()), observed(dtype=torch.float32)
    with bc.accelerate(policy, engine=engine, threads=1):
        act(policy, frames)
        policy.obs_encoder.obs_randomizers["image"].crop_height += 1
        with pytest.raises(StaleError):
            act(policy, frames)


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda image: (image * 255).to(torch.uint8),
            "holds uint8, expected floats from 0 to 1, as PublicImagePolicy takes",
        ),
        (lambda image: image * 255, "holds floats up to 25.*divide by 255"),
        (lambda image: image.movedim(2, -1), "channels come before height and width"),
        (lambda image: image[..., 1:], "resize the frames to 44 x 76"),
    ],
)
def test_what_the_public_code_would_answer_wrongly_is_refused(engine, change, said):
    policy, frames = PublicImagePolicy(image_policy()), observed(dtype=torch.float32)
    with bc.accelerate(policy, engine=engine, threads=1), pytest.raises(ObservationError, match=said):
        act(policy, {**frames, "image": change(frames["image"])})


def test_a_missing_camera_is_said(engine):
    policy, frames = PublicImagePolicy(image_policy()), observed(dtype=torch.float32)
    del frames["image"]
    with (
        bc.accelerate(policy, engine=engine, threads=1),
        pytest.raises(
            ObservationError, match=r"takes a mapping of tensors: 'image' \(batch, 2, 3, 44, 76\) and 'hand' .* got"
        ),
    ):
        act(policy, frames)


class RandomCrop(CentreCrop):
    def forward_in(self, x):
        top = int(torch.randint(x.shape[-2] - self.crop_height + 1, ()))
        return x[..., top : top + self.crop_height, : self.crop_width]


def test_behind_an_encoder_that_draws_noise_engines_draw_as_the_policy_does(engine):
    """A crop at random in the run, as the public code has it without eval_fixed_crop."""
    policy, frames = PublicImagePolicy(image_policy()), observed(dtype=torch.float32)
    policy.obs_encoder.obs_randomizers["image"] = RandomCrop([3, 44, 76], (37, 70)).eval()
    expected = [act(policy, frames, seed) for seed in range(3)]
    with bc.accelerate(policy, engine=engine, threads=1) as fast:
        assert port_of(policy).begins_after_encoder
        for seed, wanted in enumerate(expected):
            assert torch.allclose(act(fast.policy, frames, seed), wanted, atol=1e-5)


def test_behind_an_encoder_the_first_observation_is_compared(engine):
    class Bent(PublicImagePolicy):
        def predict_action(self, obs_dict):
            found = super().predict_action(obs_dict)
            return {name: value + 0.1 for name, value in found.items()}

    policy = Bent(image_policy())
    policy.obs_encoder = Strange(policy.obs_encoder).eval()
    with bc.accelerate(policy, engine=engine, threads=1) as fast:
        fast.verify()  # nothing has come yet
        with pytest.raises(
            EngineError, match=r"cannot stand in for the policy's own predict_action, its actions differ"
        ):
            act(policy, observed(dtype=torch.float32))


def test_an_encoder_that_runs_as_it_is_may_change(engine):
    policy, frames = strange(), observed(dtype=torch.float32)
    with bc.accelerate(policy, engine=engine, threads=1) as fast:
        before = act(policy, frames)
        with torch.no_grad():
            policy.obs_encoder.own.obs_nets["image"].nets[3].bias.add_(0.5)
        after = act(policy, frames)
        fast.verify()
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(act(policy, frames), after, atol=1e-5)


def test_an_encoder_that_nobody_knows_is_part_of_no_file(tmp_path):
    with pytest.raises(EngineError, match="the encoder of PublicImagePolicy is not one that can be part of a file"):
        bc.export_policy(strange(), None, tmp_path / "policy.onnx")
    assert not list(tmp_path.glob("*.onnx"))


def _changed(change):
    encoder = copy.deepcopy(PublicImagePolicy(image_policy()).obs_encoder)
    change(encoder, encoder.obs_nets["image"])
    return encoder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda encoder, net: setattr(encoder, "activation", nn.Mish()), "a ReLU as its activation"),
        (lambda encoder, net: setattr(encoder, "obs_shapes", None), "obs_shapes and obs_nets"),
        (
            lambda encoder, net: net.backbone.nets.__setitem__(1, nn.BatchNorm2d(16)),
            r"has BatchNorm2d\(16,.*as obs_nets\.image\.backbone\.nets\.1, where GroupNorm\(1, 16,.* is expected",
        ),
        (
            lambda encoder, net: net.backbone.nets.__setitem__(3, nn.AvgPool2d(3, 2, 1)),
            r"has AvgPool2d\(.* as obs_nets\.image\.backbone\.nets\.3, where MaxPool2d\(.* is expected",
        ),
        (
            lambda encoder, net: setattr(net.backbone.nets[5][0], "conv1", nn.Conv2d(16, 32, 3, 2, 1)),
            r"as obs_nets\.image\.backbone\.nets\.5\.0\.conv1, where Conv2d\(16, 32.*bias=False\) is expected",
        ),
        (lambda encoder, net: setattr(net.pool, "output_variance", True), "plain keypoints"),
        (
            lambda encoder, net: net.nets.append(nn.Tanh()),
            r"has Tanh\(\) as obs_nets\.image\.nets\.4, where nothing is expected",
        ),
        (
            lambda encoder, net: setattr(encoder.obs_randomizers["image"], "crop_width", 60),
            "a crop in the middle|tensors of another shape",
        ),
        (lambda encoder, net: encoder.obs_randomizers.update({"hand": nn.Dropout()}), "numbers as they are"),
    ],
)
def test_other_encoders_are_none_that_we_know(change, said):
    with pytest.raises(UnsupportedError, match=said):
        known_encoder(_changed(change))


def test_the_encoder_in_a_program_is_a_copy():
    policy = image_policy()
    seen = {name: tensor for name, tensor in port_of(policy).program().weights.items() if name.startswith("obs.")}
    own = {tensor.data_ptr() for tensor in policy.state_dict().values()}
    assert len(seen) > 60
    assert not own & {tensor.data_ptr() for tensor in seen.values()}

"""The hybrid image policy: as the public code computes it, saved and loaded, and told apart from what does not fit it."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import tiny_config
from safetensors import safe_open

import blockcache as bc
from blockcache.errors import FileError, ObservationError, PolicyError
from blockcache.models.checkpoint import load_tensors
from blockcache.models.dpt.encoder import EncoderConfig, Input, corner
from blockcache.models.dpt.policy import DPTConfig
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from image_policies import CROP, ENCODERS, HAND, IMAGE, WRIST, PublicImagePolicy, image_policy, observed


def act(policy, obs):
    return policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action_pred"]


@pytest.fixture(params=ENCODERS)
def encoder(request):
    return request.param


def test_it_acts_as_the_public_code_does(encoder):
    own = image_policy(encoder)
    public, frames = PublicImagePolicy(own), observed(encoder, 3, dtype=torch.float32)
    torch.manual_seed(0)
    expected = public.predict_action(frames)["action_pred"]
    found = act(own, frames)
    assert torch.allclose(found, expected, atol=1e-5)
    others = observed(encoder, 3, seed=1, dtype=torch.float32)
    for name in own.config.inputs:  # every input has a say
        assert (act(own, {**frames, name: others[name]}) - found).abs().max() > 1e-3, name


def test_tensors_have_the_public_names(encoder):
    own = image_policy(encoder)
    public = PublicImagePolicy(own)
    assert list(own.state_dict()) != []
    assert set(own.state_dict()) == set(public.state_dict())
    assert port_of(own).weights == port_of(public).weights


def test_bytes_and_fractions_are_the_same_frames():
    policy, frames = image_policy(), observed()
    fractions = {**frames, "image": frames["image"].float() / 255}
    arrays = {name: value.numpy() for name, value in frames.items()}
    assert torch.equal(act(policy, frames), act(policy, fractions))
    assert torch.equal(act(policy, frames), act(policy, arrays))


def test_it_is_saved_and_loaded(encoder, tmp_path):
    policy = image_policy(encoder)
    save_policy(policy, tmp_path / "policy")
    loaded = bc.load_policy(tmp_path / "policy")
    assert loaded.config == policy.config
    assert torch.equal(act(loaded, observed(encoder)), act(policy, observed(encoder)))
    with safe_open(tmp_path / "policy" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert not [name for name in names if ".nets.0.nets." in name]  # each tensor once, under its first name
    assert port_of(loaded).weights == port_of(policy).weights


def test_a_tensor_s_other_names_may_be_given_too_and_must_agree():
    policy, given = image_policy(seed=1), image_policy(seed=0)
    everything = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    load_tensors(policy, everything)
    assert torch.equal(act(policy, observed()), act(given, observed()))
    only_others = {name: tensor for name, tensor in everything.items() if ".backbone." not in name}
    load_tensors(image_policy(seed=1), only_others)
    everything["obs_encoder.obs_nets.image.nets.0.nets.0.weight"][0, 0, 0, 0] += 1
    with pytest.raises(
        PolicyError, match=r"backbone\.nets\.0\.weight and .*nets\.0\.nets\.0\.weight are one tensor there"
    ):
        load_tensors(policy, everything)
    del only_others["obs_encoder.obs_nets.image.nets.0.nets.4.1.bn2.bias"]
    with pytest.raises(PolicyError, match=r"missing obs_encoder\.obs_nets\.image\.backbone\.nets\.4\.1\.bn2\.bias"):
        load_tensors(policy, only_others)


def test_weights_of_another_width_are_refused(tmp_path):
    policy = image_policy()
    save_policy(policy, tmp_path / "policy")
    wider = replace(policy.config.encoder, width=1024)
    with pytest.raises(
        PolicyError, match=r"the weights do not fit the policy's config: .* expected 2 layers of [\d,]{10}"
    ):
        _with_encoder(tmp_path / "policy", wider)
    with pytest.raises(PolicyError, match=r"the weights do not fit the policy's config: .* has shape"):
        _with_encoder(tmp_path / "policy", replace(policy.config.encoder, width=32))


def _with_encoder(directory, encoder):
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace('"width": 16', f'"width": {encoder.width}'))
    try:
        bc.load_policy(directory)
    except FileError as error:
        raise PolicyError(str(error)) from error
    finally:
        (directory / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("frame", "crop", "expected"),
    [((96, 96), (76, 76), (10, 10)), ((85, 86), (76, 76), (4, 5)), ((87, 84), (76, 84), (6, 0))],
)
def test_the_crop_is_in_the_middle(frame, crop, expected):
    assert corner(frame, crop) == expected  # 4.5 is rounded to 4, 5.5 to 6


def test_while_it_trains_it_crops_at_random():
    policy = image_policy()
    frames = {name: value.flatten(0, 1) for name, value in observed(dtype=torch.float32).items()}
    with torch.no_grad():
        middle = policy.obs_encoder(frames)
        policy.train()
        found = {tuple(policy.obs_encoder(frames)[0].tolist()) for _ in range(6)}
    assert len(found) > 3
    assert tuple(middle[0].tolist()) not in found or len(found) > 4


def wrong(**changes):
    return {**observed(), **changes}


FRAMES = observed()["image"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            wrong(image=FRAMES.movedim(2, -1)),
            r"expected \(batch, 2, 3, 44, 76\): channels come before height and width",
        ),
        (
            wrong(image=FRAMES[..., :70]),
            r"\(2, 2, 3, 44, 70\), expected \(batch, 2, 3, 44, 76\); resize the frames to 44 x 76",
        ),
        (wrong(image=FRAMES[0]), r"expected \(batch, 2, 3, 44, 76\); put the batch in front"),
        (wrong(image=FRAMES.float()), "holds floats up to 25.*, expected 0 to 1; divide by 255"),
        (wrong(image=FRAMES.float() / 127.5 - 1), "holds floats down to -.*, expected 0 to 1; the policy normalises"),
        (wrong(image=FRAMES.long()), "holds int64, expected uint8 from 0 to 255 or floats from 0 to 1"),
        (wrong(image=FRAMES.float() * torch.nan), "'image' holds NaN or infinity"),
        (wrong(image={"left": FRAMES}), r"'image' is a mapping, expected an array \(batch, 2, 3, 44, 76\)"),
        (wrong(hand=torch.zeros(2, 2, 3)), r"'hand' has shape \(2, 2, 3\), expected \(batch, 2, 2\)"),
        (wrong(hand=torch.zeros(1, 2, 2)), "one batch size for all its inputs, got {'image': 2, 'hand': 1}"),
        (
            {"hand": torch.zeros(2, 2, 2)},
            r"has no 'image', expected 'image' \(batch, 2, 3, 44, 76\) and 'hand' .*, got hand",
        ),
        (torch.zeros(2, 2, 9), r"is a mapping of arrays, expected 'image' .*, got Tensor"),
        ([FRAMES], r"is a mapping of arrays, expected 'image' .*, got list"),
        (None, "is a mapping of arrays, expected 'image' .*, got NoneType"),
    ],
    ids=[
        *(
            "channels last",
            "another size",
            "no batch",
            "0 to 255",
            "normalised already",
            "whole numbers",
            "nan",
            "nested",
        ),
        *("another width", "two batches", "a camera missing", "an array", "a list", "nothing"),
    ],
)
def test_what_is_wrong_with_an_observation_is_said(given, said):
    with pytest.raises(ObservationError, match=said):
        image_policy().predict_action(given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": (HAND,)}, "needs a camera among its inputs"),
        ({"inputs": (IMAGE, IMAGE)}, "each name once"),
        ({"crop": (45, 70)}, r"within the frames of 'image', 44 x 76, or null; got \(45, 70\)"),
        ({"width": 24}, "width must be a multiple of 16"),
        ({"keypoints": 0}, "keypoints must be a positive whole number"),
        ({"shared": 1}, "shared must be true or false"),
        ({"shared": True, "crop": None, "inputs": (IMAGE, replace(WRIST, shape=(3, 40, 40)))}, "frames of one shape"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(change, said):
    with pytest.raises(PolicyError, match=said):
        replace(ENCODERS["one camera"], **change)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("noise", (2,), "none of action"),
        ("a.b", (2,), "a name of letters"),
        ("image", (3, 96), "must be a camera"),
        ("image", (3, 96, 96.0), "must be a camera"),
        ("arm", (0,), "or numbers"),
    ],
)
def test_an_input_that_cannot_be_is_refused(name, shape, said):
    with pytest.raises(PolicyError, match=said):
        Input(name, shape)


def test_a_config_that_does_not_fit_its_encoder_is_refused():
    encoder = ENCODERS["one camera"]
    with pytest.raises(PolicyError, match="obs_dim is 5, expected 9"):
        tiny_config(encoder=encoder)
    with pytest.raises(PolicyError, match="features cannot be in-painted"):
        tiny_config(obs_dim=9, encoder=encoder, time_as_cond=False, obs_as_cond=False)
    with pytest.raises(PolicyError, match="must be an encoder's config"):
        tiny_config(encoder={"inputs": []})
    content = tiny_config(obs_dim=9, encoder=encoder).to_dict()
    assert DPTConfig.from_dict(content).encoder == encoder
    for damaged, said in (
        ({**content["encoder"], "trunk": "vit"}, "missing or unknown keys under 'encoder': trunk"),
        (
            {**content["encoder"], "inputs": [{"name": "image"}]},
            "missing or unknown keys under 'encoder.inputs.*': shape",
        ),
        ({**content["encoder"], "crop": [3]}, "needs a length of 2"),
        ("vit", "it needs an object under 'encoder'"),
    ):
        with pytest.raises(PolicyError, match=said):
            DPTConfig.from_dict({**content, "encoder": damaged})
    policy = image_policy()
    with pytest.raises(PolicyError, match="cannot be called 'keys'"):
        type(policy)(tiny_config(obs_dim=7, encoder=replace(encoder, inputs=(Input("keys", (3, 44, 76)),))))


def test_a_policy_without_cameras_has_the_file_that_it_had(make_policy, tmp_path):
    save_policy(make_policy(), tmp_path / "policy")
    assert "encoder" not in (tmp_path / "policy" / "config.json").read_text()
    names = safetensors.torch.load_file(tmp_path / "policy" / "model.safetensors")
    assert set(names) == set(make_policy().state_dict())


def test_its_port_says_what_it_looks_at():
    port = port_of(image_policy("two cameras apart"))
    assert dict(port.inputs) == {"arm": (2, 3), "image": (2, 3, 44, 76), "hand": (2, 2), "wrist": (2, 3, 44, 76)}
    assert port.cameras == ("image", "wrist")
    assert port.trusted
    made = port.synthetic_observations(3)
    assert float(made["image"].min()) >= 0
    assert 0.9 < float(made["image"].max()) <= 1
    assert set(port.prepare_observation({name: np.asarray(value) for name, value in made.items()})) == set(port.inputs)
    policy = image_policy()
    policy.obs_encoder.obs_nets["image"].pool.register_forward_hook(lambda *_: None)
    assert not port_of(policy).trusted


def test_a_crop_beyond_the_public_one_is_seen():
    """What lies outside of the crop has no say."""
    policy, frames = image_policy(), observed()
    top, left = corner(IMAGE.shape[1:], CROP)
    outside = frames["image"].clone()
    outside[..., :top, :] = 0
    outside[..., top + CROP[0] :, :] = 0
    outside[..., :left] = 0
    assert torch.equal(act(policy, {**frames, "image": outside}), act(policy, frames))
    outside[..., top, left] = 255 - outside[..., top, left]
    assert not torch.equal(act(policy, {**frames, "image": outside}), act(policy, frames))


def test_the_public_sizes_make_the_public_network():
    config = EncoderConfig((Input("image", (3, 96, 96)), Input("agent_pos", (2,))), (76, 76))
    assert config.size == 66
    assert config.weights < 11_197_088 < 1.05 * config.weights  # what the public encoder holds

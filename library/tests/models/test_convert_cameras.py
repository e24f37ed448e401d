"""Checkpoints of the public hybrid image policy: the same actions from the same frames, and what is refused."""

import pytest
import torch

import blockcache as bc
from blockcache.errors import PolicyError
from blockcache.models.dpt.public import TASKS, convert_checkpoint, read_checkpoint
from blockcache.tasks import task_spec
from image_policies import ENCODERS, PublicImagePolicy, image_policy, observed
from public_policy import hybrid_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def written(encoder="one camera", change=None, **changes):
    """A checkpoint of a policy that shares nothing with ours, and that policy."""
    reference = PublicImagePolicy(image_policy(encoder))
    return write_checkpoint("a.ckpt", hybrid_config(image_policy(encoder).config, **changes), change, policy=reference)


def actions(policy, obs, seed=0):
    torch.manual_seed(seed)
    return policy.predict_action(obs)["action_pred"]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_actions_are_the_same(encoder):
    reference = written(encoder)
    policy = convert_checkpoint("a.ckpt", "policy")
    frames = observed(encoder, dtype=torch.float32)
    expected = actions(reference, frames)
    assert expected.std() > 0.1
    for found in (policy, bc.load_policy("policy"), bc.load_policy("a.ckpt")):
        torch.testing.assert_close(actions(found, frames), expected, atol=1e-5, rtol=0)
    other = observed(encoder, dtype=torch.float32, seed=1)
    assert not torch.allclose(actions(reference, other), expected, atol=1e-3), "the frames matter"


def test_settings_come_from_the_config_and_sizes_of_networks_from_the_tensors():
    written("two cameras apart")
    found = read_checkpoint("a.ckpt").config
    assert found.encoder == ENCODERS["two cameras apart"]
    assert (found.obs_dim, found.task, found.training["task"]) == (found.encoder.size, None, "lift_image_abs")


def test_the_verb_names_the_cameras(blockcache):
    written("two cameras apart")
    assert ", horizon 6, cameras image, wrist, 6 ddpm steps" in blockcache("policy", "convert", "a.ckpt", "out")


def test_tasks_that_both_know_have_the_same_observation():
    """Sizes and names are those of the public code's configs."""
    assert {public: task_spec(ours).shapes for public, ours in TASKS.items()} == {
        "pusht_lowdim": {"obs": (20,)},
        "pusht_image": {"image": (3, 96, 96), "agent_pos": (2,)},
    }


def test_a_camera_policy_runs_in_the_whole_loop_engine():
    reference = written()
    frames = observed(dtype=torch.float32)
    expected = actions(reference, frames)
    with bc.accelerate(bc.load_policy("a.ckpt"), engine="onnx") as fast:
        torch.testing.assert_close(actions(fast, frames), expected, atol=1e-5, rtol=0)


def without(name):
    def change(saved):
        saved["state_dicts"]["ema_model"] = {
            key: value for key, value in saved["state_dicts"]["ema_model"].items() if name not in key
        }

    return change


def described(**parts):
    """Another shape_meta."""
    return {"shape_meta": {"obs": {"image": {"shape": [3, 44, 76], "type": "rgb"}, **parts}, "action": {"shape": [3]}}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"obs_encoder_group_norm": False}, "known with group norms only"),
        ({"eval_fixed_crop": False}, "cropped at random where the policy runs"),
        ({"obs_as_cond": False}, "cannot be in-painted"),
        ({"pred_action_steps_only": True}, "pred_action_steps_only"),
        ({"crop_shape": [99, 99]}, r"crop must be \[height, width\] within the frames of 'image'"),
        ({"crop_shape": "x"}, "crop must be"),
        ({"rotation": 3}, "policy in the config has rotation"),
        ({"shape_meta": 3}, "must have obs and action, got 3"),
        (described(depth={"shape": [1, 44, 76], "type": "depth"}), "has 'depth' as .* expected a camera"),
        (described(hand={"shape": [2, 2]}), "has 'hand' as"),
        (described(hand={"shape": [2], "horizon": 3}), "policy.shape_meta of 'hand' in the config has horizon"),
        (described(wrist={"shape": [3, 44, 76], "type": "rgb"}), "missing .*obs_nets.wrist"),
        (described(hand={"shape": [9]}), "the weights do not fit"),
        (
            {"shape_meta": {"obs": {"hand": {"shape": [2]}}, "action": {"shape": [3]}}},
            "needs a camera among its inputs",
        ),
        ({"shape_meta": {"obs": {}, "action": {"shape": [3]}}}, "needs a camera among its inputs"),
        ({"n_emb": 32}, "the weights do not fit"),
    ],
)
def test_what_cannot_be_followed_is_refused(changes, sentence):
    written(**changes)
    with pytest.raises(PolicyError, match=sentence):
        read_checkpoint("a.ckpt")


def test_another_encoder_is_refused_by_its_tensors():
    written(change=without("pool"))
    with pytest.raises(PolicyError, match=r"lack \S+image\.pool\.nets\.weight: expected a ResNet18"):
        read_checkpoint("a.ckpt")

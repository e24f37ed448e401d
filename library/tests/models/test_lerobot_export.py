"""LeRobot directories as files: the vision encoder in the graph, the words a constant or an input, no torch to run it."""

from concurrent.futures import Executor, Future

import numpy as np
import pytest
import torch

import blockcache as bc
import lerobot_directory
from blockcache.errors import EngineError, ObservationError
from blockcache.models.dit.clip import FEATURE, MASK, TOKENS
from blockcache.models.registry import port_of
from blockcache.samplers import ChosenSampler, Euler
from blockcache_runtime import Player, open_export
from blockcache_runtime.serve.policies import ClientState, ServedExport
from dit_policies import LivePolicy
from lerobot_directory import Reference, config, observation

pytestmark = pytest.mark.usefixtures("exports_stay_here", "clip")
CAMERA = lerobot_directory.CAMERAS[0]


def policy_in(directory, **changes):
    """By flow matching: nothing clips the answers, so that everything shows in them."""
    return bc.load_policy(Reference(config(objective="flow_matching", **changes)).write(directory, version=5))


@pytest.fixture
def policy(tmp_path):
    return policy_in(tmp_path / "policy")


def one_task(obs):
    return {name: value[:1].expand_as(value) if name in (TOKENS, MASK) else value for name, value in obs.items()}


def words(obs):
    return {name: obs[name][:1].numpy() for name in (TOKENS, MASK)}


def drawn(policy, batch):
    return policy.draw_noise(batch, torch.Generator().manual_seed(3))


def gap(opened, policy, obs):
    """The largest difference between file and policy, as a share of the largest action."""
    noise = drawn(policy, len(obs[TOKENS]))
    expected = policy.predict_action(obs, noise=noise)["action"].numpy()
    inputs = {**obs, FEATURE: policy.language_feature(obs[TOKENS], obs[MASK])}
    given = {name: inputs[name].numpy() for name in opened.sizes if name != "noise"}
    found = opened.predict_action(given, noise=noise.numpy())["action"]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_resize_shape": [18, 17]},  # scaled, then cut
        {"image_resize_shape": [16, 16], "image_crop_shape": None},
        {"image_resize_shape": [20, 20]},  # the frames' own size
        {"use_rope": False},
    ],
    ids=str,
)
def test_a_file_acts_as_the_policy_does(tmp_path, changes, monkeypatch):
    if "use_rope" in changes:
        monkeypatch.setattr(lerobot_directory, "Predictor", lambda size: _without_rope(size))
    policy, obs = policy_in(tmp_path / "policy", **changes), observation(2)
    notes = bc.export_policy(policy, None, tmp_path / "any.onnx")
    assert notes == (f"the file takes {FEATURE!r}: {open_export(tmp_path / 'any.onnx').header['outside'][FEATURE]}",)
    assert gap(open_export(tmp_path / "any.onnx", threads=1), policy, obs) < 1e-5
    assert bc.export_policy(policy, None, tmp_path / "one.onnx", fixed=words(obs)) == ()
    one = open_export(tmp_path / "one.onnx", threads=1)
    assert gap(one, policy, one_task(obs)) < 1e-5
    assert list(one.sizes) == ["observation.state", *lerobot_directory.CAMERAS, "noise"]
    assert (one.n_obs_steps, one.cameras) == (2, lerobot_directory.CAMERAS)


def _without_rope(size):
    from dit_policies import Predictor

    return Predictor(size, rope=False)


def test_a_schedule_and_an_encoder_for_each_camera(tmp_path):
    """What differs from the policy's own answer is the schedule's doing: the patched engine follows the same one."""
    reference = Reference(config(objective="flow_matching", use_separate_rgb_encoder_per_camera=True))
    encoder = reference.observation_encoder
    first, second = encoder.vision_encoder, Reference().observation_encoder.vision_encoder
    with torch.no_grad():
        second.model.embeddings.class_embedding.add_(0.5)
    encoder.vision_encoders = torch.nn.ModuleList([first, second])
    del encoder.vision_encoder
    policy = bc.load_policy(reference.write(tmp_path / "policy", version=5))
    obs = observation(2)
    schedule = bc.Schedule(5, {block.name: [0, 2] for block in port_of(policy).adapter.blocks})
    bc.export_policy(policy, schedule, tmp_path / "policy.onnx")
    opened = open_export(tmp_path / "policy.onnx", threads=1)
    assert gap(opened, policy, obs) > 1e-3
    with bc.accelerate(policy, schedule, "patched"):
        assert gap(opened, policy, obs) < 1e-5


def test_everything_that_goes_in_shows_in_the_answer(policy, tmp_path):
    """So that the comparisons above are comparisons of something."""
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    opened, obs = open_export(tmp_path / "policy.onnx", threads=1), observation(1)
    given = {name: value.numpy() for name, value in port_of(policy).file_inputs(obs).items()}
    noise = drawn(policy, 1).numpy()
    before = opened.predict_action(given, noise=noise)["action"]
    for name in given:
        changed = given | {name: given[name] * 0.5}
        assert np.abs(opened.predict_action(changed, noise=noise)["action"] - before).max() > 1e-2, name


@pytest.mark.parametrize("changes", [{}, {"image_resize_shape": [18, 17]}], ids=str)
def test_no_frame_is_encoded_twice(tmp_path, changes):
    policy = policy_in(tmp_path / "policy", **changes)
    bc.export_policy(policy, None, tmp_path / "policy.onnx", fixed=words(observation(1)))
    opened, obs = open_export(tmp_path / "policy.onnx", threads=1), observation(1)
    given = {name: obs[name].numpy() for name in opened.sizes if name != "noise"}
    noise = drawn(policy, 1).numpy()
    found = opened.predict_action(given, noise=noise)["action"]
    again = opened.predict_action(given, noise=noise)["action"]  # with the features of the first call
    assert np.array_equal(found, again)
    features = opened.features(opened.check_observation(given))
    assert features.shape == (2, 1, 2 * lerobot_directory.SIGHT)


def test_what_is_missing_is_named_with_how_to_come_by_it(policy, tmp_path):
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    opened, obs = open_export(tmp_path / "policy.onnx", threads=1), observation(1)
    with pytest.raises(ObservationError, match=rf"no key '{FEATURE}' \(.*policy\.language_feature\(tokens, mask\)"):
        opened.predict_action({name: value.numpy() for name, value in obs.items()})
    feature = policy.language_feature(obs[TOKENS], obs[MASK])
    assert feature.shape == (1, 16)
    opened.predict_action({FEATURE: feature.numpy()} | {name: value.numpy() for name, value in obs.items()})


def moment(obs, opened, feature=None):
    """What a robot sees now, without history; the first of a batch."""
    names = [name for name in opened.inputs if name != FEATURE]
    now = {name: obs[name][0, -1].numpy() for name in names}
    return now if feature is None else now | {FEATURE: feature[0].numpy()}


def test_a_player_takes_the_words_with_each_observation_or_once(policy, tmp_path):
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    obs = observation(1)
    feature = policy.language_feature(obs[TOKENS], obs[MASK])
    chunks = []
    for given, fixed in ((feature, None), (None, {FEATURE: feature[0].numpy()}), (None, {FEATURE: -feature.numpy()})):
        opened = open_export(tmp_path / "policy.onnx", threads=1, fixed=fixed)
        assert (FEATURE in opened.inputs) == (fixed is None)
        worker = SameThread()
        with Player(opened, rate_hz=0.1, replan=1, seed=0, worker=worker) as player:
            player.observe(moment(obs, opened, given))
            player.next_action()
            chunks.append(player.next_action())
            assert player.error is None
    assert np.array_equal(chunks[0], chunks[1])
    assert np.abs(chunks[0] - chunks[2]).max() > 1e-3


class SameThread(Executor):
    def submit(self, function, /, *args, **named):
        done = Future()
        try:
            done.set_result(function(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, *args, **named):
        pass


def test_a_player_and_a_server_say_what_is_missing(policy, tmp_path):
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    obs, opened = observation(1), open_export(tmp_path / "policy.onnx", threads=1)
    sentence = rf"no key '{FEATURE}' \(.*policy\.language_feature\(tokens, mask\), once for a task\)"
    with Player(opened, rate_hz=0.1, replan=1) as player, pytest.raises(ObservationError, match=sentence):
        player.observe(moment(obs, opened))
    client = ClientState(ServedExport(opened), {})
    with pytest.raises(ObservationError, match=r"language_feature\(tokens, mask\).*start the server with --fixed"):
        client.observe(moment(obs, opened))


def test_a_server_takes_the_words_from_the_client_or_has_them(policy, tmp_path):
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    obs = observation(1)
    feature = policy.language_feature(obs[TOKENS], obs[MASK])
    answers = []
    for given, fixed in ((feature, None), (None, {FEATURE: feature.numpy()})):
        served = ServedExport(open_export(tmp_path / "policy.onnx", threads=1, fixed=fixed))
        state = ClientState(served, {})
        seen = [state.observe(moment(obs, served, given)) for _ in range(2)]
        answers.append(served.predict(seen, [np.random.default_rng(3), np.random.default_rng(4)]))
    assert np.array_equal(answers[0], answers[1])


@pytest.mark.parametrize(
    ("fixed", "sentence"),
    [
        ({"observation.state": np.ones(5)}, rf"cannot be fixed, expected an input without moments: {FEATURE}"),
        ({FEATURE: np.ones(3)}, r"shape \(3,\), expected \(16,\)"),
        ({FEATURE: np.full(16, np.nan)}, "finite|NaN|nan"),
    ],
)
def test_inputs_that_cannot_be_fixed_are_refused(policy, tmp_path, fixed, sentence):
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    with pytest.raises(ObservationError, match=sentence):
        open_export(tmp_path / "policy.onnx", threads=1, fixed=fixed)


def test_an_encoder_that_does_something_else_is_found_out(policy, tmp_path):
    """The vision encoder is another project's code: it is compared with the file before that is written."""
    inner = policy.observation_encoder.vision_encoder
    plain = type(inner).forward
    inner.forward = lambda frames: 2 * plain(inner, frames)
    with pytest.raises(EngineError, match="a file cannot stand in for this policy's own predict_action, its actions"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


@pytest.mark.parametrize(
    ("fixed", "sentence"),
    [
        ({TOKENS: np.ones((1, 6))}, "the words can"),
        ({"observation.state": np.ones((1, 2, 5))}, r"observation\.state cannot be constants of a file"),
        ({TOKENS: np.ones((2, 6)), MASK: np.ones((2, 6))}, "got 2 tasks"),
        ({TOKENS: np.full((1, 6), 50), MASK: np.ones((1, 6))}, "token ids outside 0 to 49"),
        ({TOKENS: np.ones((1, 5)), MASK: np.ones((1, 5))}, r"shape \(1, 5\), expected"),
    ],
)
def test_constants_that_cannot_be_are_refused(policy, tmp_path, fixed, sentence):
    with pytest.raises((EngineError, ObservationError), match=sentence):
        bc.export_policy(policy, None, tmp_path / "policy.onnx", fixed=fixed)


def test_a_live_policy_is_told_what_to_do(tmp_path):
    with pytest.raises(EngineError, match=r"not one that can be part of a file; save policy and processors.*save_pret"):
        bc.export_policy(LivePolicy("ddpm"), None, tmp_path / "policy.onnx")
    from dit_policies import tiny_dit

    with pytest.raises(EngineError, match="goal cannot be constants of a file: no input of this policy can"):
        bc.export_policy(tiny_dit(), None, tmp_path / "policy.onnx", fixed={"goal": [1.0]})


def test_what_tune_writes_for_a_directory_becomes_a_file(tmp_path, monkeypatch, blockcache):
    """The directory that `tune` writes, and its sampler and schedule beside LeRobot's own directory."""
    monkeypatch.chdir(tmp_path)
    port = port_of(policy_in(tmp_path / "my_dit"))
    sampler = Euler(num_inference_steps=3)
    schedule = bc.Schedule(
        3, {block.name: [0, 2] for block in port.adapter.blocks}, port.with_sampler(sampler).fingerprint
    )
    port.with_sampler(sampler).save(tmp_path / "fast")  # as `compare.tuned.save_tuned` does
    ChosenSampler(sampler, port.fingerprint, {}).save("fast/sampler.json")
    schedule.save("fast/schedule.json")
    np.savez("task.npz", **words(observation(1)))
    blockcache("export", "fast", "-o", "whole.onnx", "--fixed", "task.npz")
    parts = ["fast/schedule.json", "--sampler-file", "fast/sampler.json"]
    blockcache("export", "my_dit", *parts, "-o", "parts.onnx", "--fixed", "task.npz")
    tuned = bc.load_policy("fast")
    with bc.accelerate(tuned, engine="patched"):  # follows the schedule beside the config
        for name in ("whole.onnx", "parts.onnx"):
            assert gap(open_export(name, threads=1), tuned, one_task(observation(2))) < 1e-5, name

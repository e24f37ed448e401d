"""Policy directories that LeRobot wrote: opened without LeRobot, and what is refused."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

import blockcache as bc
import lerobot_directory
import small_clip
from blockcache.compare.bench import run_bench
from blockcache.compare.bench_candidates import CandidateMaker
from blockcache.errors import BlockcacheError, FileError, ObservationError, PolicyError
from blockcache.models.registry import port_of
from blockcache.testing import PolicyContract
from dit_policies import STEPS, LivePolicy, live_observation
from lerobot_directory import Reference, config, observation
from pages import fenced, section

REAL = find_spec("transformers") is not None
pytestmark = pytest.mark.usefixtures("exports_stay_here", "clip")


@pytest.fixture
def directory(tmp_path):
    return Reference().write(tmp_path / "policy")


def run(call, obs, seed=3):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return call(obs)


def gap(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("objective", ["diffusion", "flow_matching"])
def test_a_directory_answers_as_lerobots_policy_does(tmp_path, objective, version):
    reference = Reference(config(objective=objective))
    policy = bc.load_policy(reference.write(tmp_path / "policy", version))
    obs = observation(2)
    expected = run(reference.answer, obs)
    assert gap(run(policy.predict_action, obs)["action"], expected) < 1e-5
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(policy, None, engine):
            assert gap(run(policy.predict_action, obs)["action"], expected) < 1e-5, engine
    frames = {name: (255 * obs[name]).round().to(torch.uint8) for name in lerobot_directory.CAMERAS}
    rounded = {name: frames[name] / 255 for name in frames}
    found = run(policy.predict_action, obs | frames)["action"]
    assert gap(found, run(reference.answer, obs | rounded)) < 1e-5


class TestContract(PolicyContract):
    """The program begins at the conditioning vector: the encoders run as they are."""

    @pytest.fixture(autouse=True)
    def _directory(self, directory):
        self.place = directory

    def policy(self):
        return bc.load_policy(self.place)

    def observation(self, batch):
        return observation(batch)


@pytest.mark.skipif(not REAL, reason="compares with transformers, which is not installed")
def test_the_stand_in_is_what_transformers_has():
    import transformers

    for name, sizes in (
        ("Text", {"vocab_size": 50, "max_position_embeddings": 9, "eos_token_id": 2, "bos_token_id": 0}),
        ("Vision", {"image_size": 16, "patch_size": 8}),
    ):
        both = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        settings = getattr(transformers, f"CLIP{name}Config")(**both, **sizes)
        real = getattr(transformers, f"CLIP{name}Model")(settings).eval()
        real = getattr(real, f"{name.lower()}_model", real)
        own = getattr(small_clip, f"CLIP{name}Model")(settings).eval()
        own.load_state_dict(real.state_dict())
        with torch.no_grad():
            if name == "Vision":
                frames = torch.rand(2, 3, 16, 16)
                found, expected = (item(pixel_values=frames).last_hidden_state[:, 0] for item in (own, real))
            else:
                words = {
                    "input_ids": torch.randint(0, 50, (2, 6)),
                    "attention_mask": torch.ones(2, 6, dtype=torch.int64),
                }
                found, expected = (item(**words).pooler_output for item in (own, real))
        assert torch.allclose(found, expected, atol=1e-5), name


def test_a_schedule_beside_the_config_is_followed(directory):
    policy = bc.load_policy(directory)
    recording = bc.calibrate(policy, [observation(2)], progress=False)
    schedule = bc.solve(recording, updates=2)
    schedule.save(directory / "schedule.json")
    with bc.accelerate(policy, engine="loop") as fast:
        run(policy.predict_action, observation(1))
        stats = fast.stats()
    assert stats.computed == {name: len(steps) for name, steps in schedule.updates.items()}
    assert sum(stats.computed.values()) < STEPS * len(stats.computed)
    assert stats.notes == (f"the schedule is {directory / 'schedule.json'}",)
    with bc.accelerate(policy, None, engine="loop") as fast:  # full precision is asked for
        run(policy.predict_action, observation(1))
        assert set(fast.stats().computed.values()) == {STEPS}
    with bc.accelerate(port_of(policy).copy(), engine="loop") as fast:  # a copy was loaded from nowhere
        assert fast.stats().notes == ()


def test_it_is_saved_as_a_directory_of_ours(directory, tmp_path):
    policy = bc.load_policy(directory)
    bc.save_policy(policy, tmp_path / "own")
    again = bc.load_policy(tmp_path / "own")
    assert json.loads((tmp_path / "own/config.json").read_text())["family"] == "dit"
    found, expected = (run(item.predict_action, observation(1))["action"] for item in (again, policy))
    assert torch.equal(found, expected)


def rewritten(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"type": "diffusion"}, "LeRobot's 'diffusion' policy, a U-Net"),
        (
            {"type": "act"},
            "LeRobot's 'act' policy, a transformer that gives.*those of type 'multi_task_dit'",
        ),
        (
            {"type": "mine"},
            "type 'mine' are not known; of LeRobot's policies this opens those of type 'multi_task_dit'",
        ),
        ({"use_flash": True}, "settings of a version that is not known: use_flash; known are those of multi_task_dit"),
        ({"use_peft": True}, "merge the adapters into the weights"),
        ({"text_encoder_name": "laion/CLIP-ViT-B-32"}, "known are OpenAI's CLIP models"),
        ({"objective": "flow_matching", "integration_method": "rk4"}, "only by euler"),
        ({"objective": "guessing"}, "known are diffusion and flow_matching"),
        ({"noise_scheduler_type": "PNDM"}, "known are DDPM and DDIM"),
        ({"hidden_dim": 15}, "divisible by num_heads"),
        ({"hidden_dim": "512"}, "a whole number"),
        ({"hidden_dim": 50_000}, "the weights do not fit the policy's config"),
        ({"image_crop_shape": [12, 12]}, "must give CLIP the size that it was made for"),
        ({"output_features": {}}, "has no feature 'action'"),
    ],
)
def test_settings_that_are_not_known_are_refused(directory, changes, sentence):
    with pytest.raises(BlockcacheError, match=sentence) as caught:
        bc.load_policy(rewritten(directory, **changes))
    assert "config.json" in str(caught.value) or "model.safetensors" in str(caught.value)


def test_missing_and_extra_tensors_are_listed(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    gone = "noise_predictor.transformer_blocks.1.mlp.2.bias"
    save_file({name: value for name, value in tensors.items() if name != gone} | {"guest": torch.ones(2)}, path)
    with pytest.raises(PolicyError, match=rf"missing {gone}; unknown guest"):
        bc.load_policy(directory)


def test_statistics_are_read_as_lerobot_means_them(directory):
    pre, post = (directory / f"policy_{kind}processor.json" for kind in ("pre", "post"))
    whole = json.loads(pre.read_text())
    whole["steps"][1]["config"]["norm_map"]["STATE"] = "SQUARED"
    pre.write_text(json.dumps(whole))
    with pytest.raises(PolicyError, match="by 'SQUARED', known are IDENTITY, MEAN_STD, MIN_MAX"):
        bc.load_policy(directory)
    whole["steps"][1]["config"]["norm_map"]["STATE"] = "MEAN_STD"
    pre.write_text(json.dumps(whole))
    with pytest.raises(PolicyError, match=r"needs the statistic observation\.state\.mean"):
        bc.load_policy(directory)
    whole["steps"][1]["config"]["norm_map"]["STATE"] = "IDENTITY"
    pre.write_text(json.dumps(whole))
    field = bc.load_policy(directory).normalizer.field("observation.state")
    assert torch.equal(field.normalize(torch.ones(5)), torch.ones(5))
    whole["steps"][1]["state_file"] = "../elsewhere.safetensors"
    pre.write_text(json.dumps(whole))
    with pytest.raises(FileError, match="not a file beside it"):
        bc.load_policy(directory)
    post.unlink()
    whole["steps"][1]["state_file"] = None
    pre.write_text(json.dumps(whole))
    with pytest.raises(FileError, match=r"policy_postprocessor\.json"):
        bc.load_policy(directory)


def edited(directory, kind, edit):
    """A processor's file after `edit(its steps)`."""
    path = directory / f"policy_{kind}processor.json"
    whole = json.loads(path.read_text())
    edit(whole["steps"])
    path.write_text(json.dumps(whole))
    return directory


def step(name, **config):
    return {"registry_name": name, "config": config}


@pytest.mark.parametrize(
    ("kind", "added", "named"),
    [
        ("post", step("absolute_actions_processor", enabled=True), "absolute_actions_processor"),
        ("pre", step("relative_actions_processor", enabled=True, exclude_joints=[]), "relative_actions_processor"),
        (
            "pre",
            step("rename_observations_processor", rename_map={"observation.images.top": "b"}),
            "rename_observations",
        ),
        ("pre", step("image_crop_resize_processor", crop_params_dict={}), "image_crop_resize_processor"),
        ("pre", step("device_processor", device="cuda", float_dtype="bfloat16"), "'float_dtype': 'bfloat16'"),
        ("pre", {"class": "my_robot.steps.Mirror", "config": {}}, "my_robot.steps.Mirror"),
        ("pre", step("unnormalizer_processor"), "unnormalizer_processor"),
        ("post", {"config": {}}, "a step without a name"),
    ],
)
def test_steps_of_processors_that_are_not_known_are_refused(directory, kind, added, named):
    edited(directory, kind, lambda steps: steps.append(added))
    with pytest.raises(
        PolicyError, match=rf"policy_{kind}processor\.json: the step .*{named}.*accelerate the live object"
    ):
        bc.load_policy(directory)


def test_steps_that_change_nothing_are_accepted(directory):
    before = run(bc.load_policy(directory).predict_action, observation(1))["action"]
    idle = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        step("tokenizer_processor", max_length=77, tokenizer_name="openai/clip-vit-base-patch16"),
        step("relative_actions_processor", enabled=False),
        step("device_processor", device="cuda", float_dtype="float32"),
    ]
    edited(directory, "pre", lambda steps: steps.extend(idle))
    edited(directory, "post", lambda steps: steps.append(step("absolute_actions_processor", enabled=False)))
    assert torch.equal(run(bc.load_policy(directory).predict_action, observation(1))["action"], before)


def test_actions_without_statistics_are_refused(directory):
    """They would come out between -1 and 1, and a robot would take them for its own units."""
    edited(directory, "post", lambda steps: steps[1].update(state_file=None))
    with pytest.raises(PolicyError, match="undoes MIN_MAX for actions and holds no statistics of them"):
        bc.load_policy(directory)
    edited(directory, "post", lambda steps: steps[1]["config"]["norm_map"].update(ACTION="IDENTITY"))
    assert bc.load_policy(directory).normalizer.action.scale.tolist() == [1.0] * 4  # nothing to undo


def test_actions_are_unnormalised_whether_or_not_the_features_name_them(directory):
    """As LeRobot has it: of the postprocessor's features it looks at none."""
    before = run(bc.load_policy(directory).predict_action, observation(1))["action"]
    edited(directory, "post", lambda steps: steps[1]["config"].update(features={}))
    assert torch.equal(run(bc.load_policy(directory).predict_action, observation(1))["action"], before)


def test_two_names_of_one_tensor_must_agree(tmp_path):
    """Versions of transformers name CLIP's tensors differently; a file may hold both, and one of them would win."""
    place = Reference().write(tmp_path / "policy", version=5)
    path = place / "model.safetensors"
    tensors = load_file(path)
    name = "observation_encoder.text_encoder.text_encoder.final_layer_norm.weight"
    other = name.replace(".text_encoder.final", ".text_encoder.text_model.final")
    save_file({**tensors, other: tensors[name].clone()}, path)
    bc.load_policy(place)
    save_file({**tensors, other: tensors[name] + 1}, path)
    with pytest.raises(PolicyError, match=r"final_layer_norm\.weight is another name of .*, and the two differ"):
        bc.load_policy(place)


def test_observations_that_do_not_fit_are_refused(directory):
    policy, obs = bc.load_policy(directory), observation(1)
    with pytest.raises(ObservationError, match=r"no 'observation\.language\.tokens'"):
        policy.predict_action({name: value for name, value in obs.items() if "language" not in name})
    odd = obs | {"observation.language.tokens": torch.full((1, 6), 50)}
    with pytest.raises(ObservationError, match="token ids outside 0 to 49"):
        policy.predict_action(odd)


def test_action_costs_are_known_where_a_number_of_the_action_never_changes(tmp_path):
    policy = bc.load_policy(Reference(config(objective="flow_matching")).write(tmp_path / "policy"))
    assert float(policy.predict_action(observation(3))["action"][..., 2].std()) < 1e-6
    recording = bc.calibrate(policy, [observation(3)], action_costs=True, progress=False)
    assert recording.action_costs.max() < float("inf")  # NaN is not either
    assert recording.action_costs.max() > 0


def test_without_transformers_the_extra_is_named(directory, monkeypatch):
    monkeypatch.setattr("blockcache.extras.find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r"transformers, which is not installed; .*blockcache\[lerobot\]"):
        bc.load_policy(directory)


def test_the_page_works(tmp_path, monkeypatch):
    """What docs/your-policy.md says of LeRobot, with small policies in the places of the reader's."""
    monkeypatch.chdir(tmp_path)
    Reference().write(tmp_path / "my_dit")
    policy, batch = LivePolicy("ddpm"), live_observation(1)
    policy._queues["observation.state"] = list(batch["observation.state"].unbind(1))
    names = {"policy": policy, "batch": batch, "batches": [live_observation(2)], "observation": observation(1)}
    for code in fenced(section("docs/your-policy.md", "## LeRobot's DiT"), "python"):
        if "from lerobot" in code:
            continue  # run by plugin/tests, where LeRobot is
        updates = str(STEPS - 1)  # a small policy has few steps
        exec(compile(code.replace("updates=10", f"updates={updates}"), "page", "exec"), names)
    assert any("schedule.json" in note for note in names["fast"].stats().notes)


def test_it_is_benchmarked_with_its_encoders(directory, monkeypatch):
    monkeypatch.setattr(CandidateMaker, "compiled", lambda *_: None)  # torch.compile takes a minute
    port = port_of(bc.load_policy(directory))
    schedule = bc.Schedule(STEPS, {block.name: [0, 2] for block in port.adapter.blocks})
    torch.manual_seed(0)
    found = run_bench(port, schedule, port.synthetic_observations(1), {}, threads=1, repeats=2, progress=False)
    names = {row.name for row in found.rows}
    assert {"full precision, loop", "BAC, loop", "BAC, onnx, 1 thread", "BAC, patched"} <= names
    assert found.unavailable["savings"].startswith("they begin behind the policy's own encoder")
    gaps = {row.name: row.max_difference for row in found.rows if row.name.startswith("full precision")}
    assert max(gaps.values()) < 1e-5
    assert found.encoder  # what share of the time it takes

"""The directory for LeRobot's commands and what runs it, without LeRobot."""

import importlib
import json
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import blockcache as bc
import lerobot_directory
from blockcache.compare.tuned import Tuned, save_tuned
from blockcache.errors import BlockcacheError
from blockcache.models.dit.clip import MASK, TOKENS
from blockcache.models.dit.plugin import load_words, plugin_processors
from blockcache.results.tuning import Tuning
from blockcache_runtime.errors import FileError, ObservationError
from blockcache_runtime.parity import Parity
from dit_policies import STEPS
from file_formats import MACHINE, write_tuning
from lerobot_policy_blockcache import interface
from lerobot_policy_blockcache.runner import Runner, left_over

pytestmark = pytest.mark.usefixtures("exports_stay_here", "clip")


def write(directory, **changes):
    reference = lerobot_directory.Reference(lerobot_directory.config(**changes))
    with torch.no_grad():
        for parameter in reference.noise_predictor.parameters():  # actions near the range that actions have
            parameter.mul_(0.5)
        reference.noise_predictor.output_proj.weight.mul_(0.2)
    return reference.write(directory)


@pytest.fixture(params=["diffusion", "flow_matching"])
def original(request, tmp_path):
    return write(tmp_path / "original", objective=request.param)


@pytest.fixture
def made(original, blockcache, tmp_path):
    said = blockcache("export", original, "--lerobot", tmp_path / "fast")
    assert "the file agrees with its policy: 16 observations" in said
    assert "beside the original: actions differ by" in said
    return tmp_path / "fast"


def test_what_the_directory_says(original, made):
    found, before = (json.loads((place / "config.json").read_text()) for place in (made, original))
    assert found["type"] == "blockcache"
    for name in ("n_obs_steps", "horizon", "n_action_steps", "input_features", "output_features"):
        assert found[name] == before[name]
    assert found["made_from"]["directory"] == "original"  # no path of this machine
    assert found["made_from"]["blocks"] == "computed at every step"
    own, first = (Parity.load(made / f"{name}.json") for name in ("parity", "original"))
    assert own.agrees
    assert first.agrees  # nothing was tuned
    assert own.count == first.count == 16
    card = (made / "README.md").read_text()
    assert card.startswith('---\nlicense: "unknown"\n')
    assert "lerobot-eval --policy.path=fast " in card
    assert f"The file {own}." in card


def test_processors_keep_steps_and_statistics_and_do_not_normalise(original, made):
    for kind in ("pre", "post"):
        name = f"policy_{kind}processor.json"
        found, before = (json.loads((place / name).read_text()) for place in (made, original))
        for step in before["steps"]:
            if "norm_map" in step["config"]:
                step["config"]["norm_map"] = dict.fromkeys(step["config"]["norm_map"], "IDENTITY")
        assert found == before
    for path in original.glob("policy_*.safetensors"):
        assert (made / path.name).read_bytes() == path.read_bytes()


def test_actions_are_those_of_the_library(original, made):
    obs, policy = lerobot_directory.observation(3), bc.load_policy(original)
    torch.manual_seed(4)
    expected = policy.predict_action(obs)["action"]
    runner = Runner(made, threads=1)
    torch.manual_seed(4)
    found = runner.chunk(obs)
    assert float((found - expected).abs().max()) < 1e-5
    torch.manual_seed(4)
    start = torch.randn(expected.shape[0], 7, 4)
    assert torch.equal(runner.chunk(obs, noise=start), found)  # the rest of the noise is drawn behind it
    with pytest.raises(ObservationError, match=r"noise has shape \(1, 7, 4\), expected \(3, 7, 4\)"):
        runner.chunk(obs, noise=start[:1])
    with pytest.raises(ObservationError, match=r"no 'observation\.state', got .*the policy's own directory"):
        runner.chunk({name: value for name, value in obs.items() if name != "observation.state"})


def test_words_are_encoded_once(made):
    runner, obs = Runner(made, threads=1), lerobot_directory.observation(2)
    calls = []
    say = runner.words.say
    runner.words.say = lambda tokens, mask: calls.append(len(tokens)) or say(tokens, mask)
    runner.chunk(obs)
    runner.chunk(obs)
    assert calls == [1, 1]  # two instructions
    runner.chunk(obs | {TOKENS: obs[TOKENS].flip(0)[:, [1, 0, 2, 3, 4, 5]]})
    assert len(calls) == 4


def test_one_task_is_part_of_the_file(original, blockcache, tmp_path):
    obs = lerobot_directory.observation(2)
    one = {name: obs[name][:1] for name in (TOKENS, MASK)}
    np.savez(tmp_path / "task.npz", **one)
    blockcache("export", original, "--fixed", tmp_path / "task.npz", "--lerobot", tmp_path / "fast")
    assert not (tmp_path / "fast/model.safetensors").exists()
    runner, policy = Runner(tmp_path / "fast", threads=1), bc.load_policy(original)
    same = obs | {name: value.repeat(2, 1) for name, value in one.items()}
    torch.manual_seed(4)
    expected = policy.predict_action(same)["action"]
    torch.manual_seed(4)
    assert float((runner.chunk(same) - expected).abs().max()) < 1e-5
    with pytest.raises(ObservationError, match="told another task than the one that was made part of its file"):
        runner.chunk(obs)


def test_fewer_actions_are_executed_as_tuned(original, blockcache, tmp_path):
    before = json.loads((original / "config.json").read_text())["n_action_steps"]
    assert before > 1
    tuning = Tuning.load(write_tuning(tmp_path))
    chosen = replace(tuning.chosen, method="replan=1")
    found = Tuned(replace(tuning, points=(chosen,), chosen=chosen, machine=MACHINE), None, None)
    save_tuned(bc.load_policy(original), found, tmp_path / "tuned")
    blockcache("export", original, "--tuned", tmp_path / "tuned", "--lerobot", tmp_path / "fast")
    assert json.loads((tmp_path / "fast/config.json").read_text())["n_action_steps"] == 1
    obs, policy, runner = (
        lerobot_directory.observation(2),
        bc.load_policy(original),
        Runner(tmp_path / "fast", threads=1),
    )
    torch.manual_seed(4)
    expected = policy.predict_action(obs)["action"][:, :1]
    torch.manual_seed(4)
    assert float((runner.chunk(obs) - expected).abs().max()) < 1e-5
    assert "1 actions of 4 numbers" in (tmp_path / "fast/README.md").read_text()


def test_a_schedule_and_its_difference_are_told(original, blockcache, tmp_path):
    policy = bc.load_policy(original)
    recording = bc.calibrate(policy, [lerobot_directory.observation(2)], progress=False)
    solved = bc.solve(recording, updates=3)
    bc.Schedule(solved.steps, solved.updates).save(tmp_path / "any.json")
    said = blockcache("export", original, tmp_path / "any.json", "--lerobot", tmp_path / "fast")
    assert said.count("note: ") == said.count("note: the schedule was made for no weights in particular\n") == 1
    said = json.loads((tmp_path / "fast/config.json").read_text())["made_from"]["blocks"]
    assert re.fullmatch(r"computed at [34]\.\d steps each", said)
    assert STEPS == 5
    own, first = (Parity.load(tmp_path / f"fast/{name}.json") for name in ("parity", "original"))
    assert own.agrees
    assert own.largest < 1e-3 < first.largest
    assert first.beside == "the original policy"
    card = (tmp_path / "fast/README.md").read_text()
    assert re.search(rf"Beside the original policy, in full .*, actions differ by {first.largest:.1e} at most", card)


def test_what_lerobot_has_left_of_a_chunk():
    actions = torch.tensor([[1.0, 2.0], [0.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    told = left_over(actions, 1, 10)
    assert told.actions.tolist() == [[1.0, 2.0], [0.0, 3.0]]
    assert (told.delay, told.overlap) == (1, 10)
    assert left_over(torch.zeros(3, 2), 1, 10) is None
    assert left_over(torch.zeros(0, 2), 1, 10) is None
    assert left_over(actions[None].repeat(2, 1, 1), 1, 10).actions.shape == (2, 2, 2)


def test_processors_that_normalise_too_are_refused(original, made):
    for damage, sentence in (
        ((original / "policy_postprocessor.json").read_text(), "normalises .*MIN_MAX.* actions would be wrong"),
        ("[]", "is no processor of LeRobot's"),
    ):
        (made / "policy_postprocessor.json").write_text(damage)
        with pytest.raises(FileError, match=sentence):
            Runner(made)


def test_a_text_encoder_that_does_not_fit_is_refused(made):
    path = made / "model.safetensors"
    whole = load_file(path)
    assert load_words(path).config.words == lerobot_directory.WORDS
    name = next(name for name in whole if "fc1.weight" in name)
    for tensors in (
        {key: value for key, value in whole.items() if "projection" not in key},
        whole | {name: whole[name][:, :3].contiguous()},
        whole | {name: whole[name] * float("nan")},
    ):
        save_file(tensors, path)
        with pytest.raises(BlockcacheError):
            load_words(path)
    path.write_bytes(b"cut")
    with pytest.raises(FileError):
        load_words(path)


# -- the policy type, over a stand-in of LeRobot's classes


def populate_queues(queues, batch):
    """As LeRobot's: the first moment fills a queue."""
    for name in queues.keys() & batch.keys():
        missing = queues[name].maxlen - len(queues[name])
        queues[name].extend([batch[name]] * max(missing, 1))


class StandIn(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.fixture
def open_policy(made, monkeypatch):
    """Opens the directory as LeRobot does, with what is said on its command line."""
    settings = type("Config", (), {"pretrained_path": None, "register_subclass": lambda name: lambda config: config})
    for name, parts in {
        "lerobot": {},
        "lerobot.configs.policies": {"PreTrainedConfig": settings},
        "lerobot.policies.pretrained": {"PreTrainedPolicy": StandIn},
        "lerobot.policies.utils": {"populate_queues": populate_queues},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    for name in ("configuration_blockcache", "modeling_blockcache"):
        monkeypatch.delitem(sys.modules, f"lerobot_policy_blockcache.{name}", raising=False)
    modeling = importlib.import_module("lerobot_policy_blockcache.modeling_blockcache")
    said = json.loads((made / "config.json").read_text())
    own = {name: said[name] for name in ("n_obs_steps", "horizon", "n_action_steps")}
    return lambda **more: modeling.BlockcachePolicy(modeling.BlockcacheConfig(**own | {"threads": 1} | more), made)


def moment(batch=2):
    whole = lerobot_directory.observation(batch)
    return {name: value if "language" in name else value[:, -1] for name, value in whole.items()}


def test_fewer_actions_are_the_first_of_a_chunk(open_policy):
    """`--policy.n_action_steps=2`: a queue that is too short must not lose the actions that are due."""
    whole, fewer = open_policy(), open_policy(n_action_steps=2)
    obs, noise = moment(), torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = [whole.select_action(obs, noise=noise) for _ in range(4)]
    torch.manual_seed(1)
    found = [fewer.select_action(obs, noise=noise) for _ in range(2)]
    assert torch.equal(torch.stack(found), torch.stack(expected[:2]))
    assert not fewer._queues["action"]


@pytest.mark.parametrize("said", [{"n_action_steps": 0}, {"n_action_steps": 5}, {"n_obs_steps": 1}, {"horizon": 8}])
def test_settings_that_the_file_does_not_have_are_refused(open_policy, said):
    ((name, value),) = said.items()
    with pytest.raises(
        FileError, match=f"the config says {name}={value}, and .*policy.onnx takes .*leave out --policy"
    ):
        open_policy(**said)


def test_a_batch_that_does_not_fit_is_refused_in_a_sentence(open_policy):
    policy = open_policy()
    with pytest.raises(ObservationError, match=r"the observation has no 'observation\.\w+.*', got reward"):
        policy.predict_action_chunk({"reward": torch.zeros(1)})
    name = lerobot_directory.CAMERAS[0]
    with pytest.raises(ObservationError, match=r"images\.top' has shape .*, expected"):
        policy.predict_action_chunk(moment() | {name: torch.rand(2, 3, 30, 30)})
    assert policy.predict_action_chunk(moment()).shape == (2, 4, 4)


# -- refusals


def test_only_what_lerobot_wrote_is_taken(original, made, policy_directory, refused, tmp_path):
    assert "is made of one that LeRobot wrote, of type 'multi_task_dit'" in refused(
        "export", policy_directory, "--lerobot", tmp_path / "other"
    )
    assert "was made of a LeRobot policy for LeRobot's commands" in refused("export", made, "--lerobot", tmp_path / "b")
    assert "is there already" in refused("export", original, "--lerobot", made)
    assert "new does not exist; make it first" in refused("export", original, "--lerobot", tmp_path / "new/fast")
    assert not (tmp_path / "other").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("diffusion", "a U-Net"),
        ("act", "a transformer that gives its chunk at once"),
        ("tdmpc", "a world model"),
        ("pi0", "a vision-language model"),
        ("gaussian_actor", "an actor of small networks"),
    ],
)
def test_a_policy_of_another_kind_is_named(original, refused, tmp_path, kind, what):
    settings = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(settings | {"type": kind}))
    assert f"this is LeRobot's {kind!r} policy, {what}" in refused("export", original, "--lerobot", tmp_path / "fast")


def test_a_step_that_is_not_known_is_named(original, refused, tmp_path):
    path = original / "policy_preprocessor.json"
    whole = json.loads(path.read_text())
    whole["steps"].insert(0, {"registry_name": "my_crop_processor", "config": {"size": 5}})
    path.write_text(json.dumps(whole))
    assert "the step my_crop_processor with the settings" in refused("export", original, "--lerobot", tmp_path / "fast")
    assert not (tmp_path / "fast").exists()


def test_a_tokenizer_that_lies_beside_goes_along(original, blockcache, refused, tmp_path):
    """Newer versions of LeRobot save what a step needs as files of the directory."""
    path = original / "policy_preprocessor.json"
    whole = json.loads(path.read_text())
    step = {"registry_name": "tokenizer_processor", "config": {}, "artifacts": {"tokenizer_name": "tokenizer"}}
    whole["steps"].insert(0, step)
    path.write_text(json.dumps(whole))
    (original / "tokenizer").mkdir()
    (original / "tokenizer/vocab.json").write_text("{}")
    blockcache("export", original, "--lerobot", tmp_path / "fast")
    assert (tmp_path / "fast/tokenizer/vocab.json").read_text() == "{}"
    step["artifacts"]["tokenizer_name"] = "../elsewhere"
    path.write_text(json.dumps(whole))
    assert "which is not beside it" in refused("export", original, "--lerobot", tmp_path / "again")


@pytest.mark.parametrize(
    "step",
    [
        {"state_file": "../secret"},
        {"state_file": "config.json"},
        {"artifacts": {"a": "/etc/hostname"}},
        {"artifacts": {"a": "."}},
        {"artifacts": {"a": "nowhere"}},
        {"artifacts": {"a": 3}},
        {"artifacts": "tokenizer"},
    ],
    ids=str,
)
def test_what_a_processor_names_is_a_file_of_its_own(tmp_path, step):
    (tmp_path / "secret").write_text("read by nobody")
    directory = write(tmp_path / "original")
    path = directory / "policy_preprocessor.json"
    whole = json.loads(path.read_text())
    whole["steps"].append({"registry_name": "device_processor", "artifacts": None})
    path.write_text(json.dumps(whole))
    assert len(plugin_processors(directory, ["config.json"])) == 4
    whole["steps"].append({"registry_name": "device_processor", **step})
    path.write_text(json.dumps(whole))
    with pytest.raises(BlockcacheError, match=r"which is not beside it or has another use|it needs"):
        plugin_processors(directory, ["config.json"])


def test_options_that_do_not_go_together(original, command, tmp_path):
    apart = ["-o x.onnx", "--rtc", "--with-reference 3", "--guard count", "--card x", "--card x --manifest physicalai"]
    for words in map(str.split, apart):
        code, _, error = command("export", original, "--lerobot", tmp_path / "fast", *words)
        assert code == 2
        assert "--lerobot writes what LeRobot needs" in error


def without(monkeypatch, version):
    for name in [name for name in sys.modules if name == "lerobot" or name.startswith("lerobot.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(interface, "_installed", lambda: version)


def test_without_lerobot_it_says_so(monkeypatch):
    without(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(interface.LeRobotError, match="LeRobot is not installed; it was tested with 0") as caught:
        interface.part("PreTrainedConfig")
    assert isinstance(caught.value, ImportError)


def test_a_lerobot_with_another_interface_is_named(monkeypatch):
    without(monkeypatch, "9.1.0")
    package, configs, policies = (
        ModuleType(name) for name in ("lerobot", "lerobot.configs", "lerobot.configs.policies")
    )
    package.__path__ = configs.__path__ = []
    for module in (package, configs, policies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(interface.LeRobotError, match=r"LeRobot 9\.1\.0 has another .*no lerobot\.configs\.policies\.P"):
        interface.part("PreTrainedConfig")
    policies.PreTrainedConfig = SimpleNamespace(__abstractmethods__={"validate_features", "quantum_state"})
    with pytest.raises(interface.LeRobotError, match="asks for quantum_state, which this package does not have"):
        interface.part("PreTrainedConfig")
    policies.PreTrainedConfig = SimpleNamespace(__abstractmethods__={"validate_features"})
    assert interface.part("PreTrainedConfig") is policies.PreTrainedConfig

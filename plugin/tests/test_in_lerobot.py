"""The plugin in LeRobot itself, its own commands and loops. Skipped where LeRobot is not installed."""

import json
import os
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import blockcache as bc
from blockcache import cli
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, ChosenSampler, Euler

pytest.importorskip("lerobot", reason="needs LeRobot; docs/your-policy.md says in which environment it was run")

import lerobot_parts
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.factory import make_env
from lerobot.policies.factory import get_policy_class, make_policy, make_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from lerobot.scripts import lerobot_eval
from lerobot_parts import LENGTH, OWN, Reach, ToyEnv

from dit_policies import SEEN
from pages import fenced, lines, section

pytestmark = pytest.mark.usefixtures("exports_stay_here")
STEPS = 3
WIDTH = int(os.environ.get("BLOCKCACHE_LEROBOT_WIDTH", "0"))
SIZES = {"hidden_dim": WIDTH, "num_layers": 6, "num_heads": 8, "horizon": 16, "n_action_steps": 8}
SIZES |= dict.fromkeys(("num_train_timesteps", "num_inference_steps", "num_integration_steps"), 100)
"""LeRobot's own classes build any size: with BLOCKCACHE_LEROBOT_WIDTH=256 and -s, the page's test shows what that gains."""


@pytest.fixture(params=["diffusion", "flow_matching"])
def made(request, tmp_path):
    """LeRobot's directory, what was chosen for it, and the directory for LeRobot's commands."""
    directory = lerobot_parts.write_directory(tmp_path / "original", request.param)
    original = bc.load_policy(directory)
    port = port_of(original)
    fewer = {"num_inference_steps": STEPS}
    sampler = DDIM(num_train_timesteps=20, **fewer) if request.param == "diffusion" else Euler(**fewer)
    port = port.with_sampler(sampler)
    ChosenSampler(sampler, port_of(original).fingerprint, {}).save(tmp_path / "sampler.json")
    updates = {block.name: [0, 2] for block in port.adapter.blocks}
    bc.Schedule(STEPS, updates, port.fingerprint).save(tmp_path / "schedule.json")
    words = ["export", directory, tmp_path / "schedule.json", "--sampler-file", tmp_path / "sampler.json"]
    cli.main([*map(str, words), "--lerobot", str(tmp_path / "fast")])
    return tmp_path


def opened(directory):
    """As lerobot-eval has it: config, policy, processors, environments."""
    lerobot_eval.register_third_party_plugins()
    config = PreTrainedConfig.from_pretrained(directory)
    config.pretrained_path = directory
    env = ToyEnv()
    policy = make_policy(config, env_cfg=env)
    before, behind = make_pre_post_processors(
        config,
        pretrained_path=str(directory),
        preprocessor_overrides={
            "device_processor": {"device": "cpu"},
            "rename_observations_processor": {"rename_map": {}},
        },
    )
    return policy, before, behind, env


def rolled_out(directory):
    """Actions (envs, steps, A) of LeRobot's own rollout."""
    return timed_rollout(directory)[0]


def timed_rollout(directory, envs=2, seed=5):
    """Actions of LeRobot's own rollout, and how many of them a second."""
    policy, before, behind, env = opened(directory)
    ((_, (vector,)),) = ((name, tuple(group.values())) for name, group in make_env(env, n_envs=envs).items())
    plain = PolicyProcessorPipeline(steps=[])
    torch.manual_seed(seed)
    begun = time.perf_counter()
    found = lerobot_eval.rollout(vector, policy, plain, plain, before, behind, seeds=[*range(envs)])["action"]
    return found, envs * found.shape[1] / (time.perf_counter() - begun)


def by_the_library(fast, before, envs=2, seed=5):
    """The same by a policy of this package: its own history, noise from torch's generator, no processor but the words'."""
    places = [Reach() for _ in range(envs)]
    seen = [place.reset(seed=number)[0] for number, place in enumerate(places)]
    frames, done, chunk = [], [], []
    torch.manual_seed(seed)
    for _ in range(LENGTH):
        stacked = {
            "agent_pos": np.stack([one["agent_pos"] for one in seen]),
            "pixels": {name: np.stack([one["pixels"][name] for one in seen]) for name in seen[0]["pixels"]},
        }
        observation = lerobot_eval.preprocess_observation(stacked)
        tokens = before({**observation, "task": [lerobot_parts.TASK] * envs})
        words = {name: tokens[name] for name in tokens if "language" in name and torch.is_tensor(tokens[name])}
        frames = ([observation] * SEEN if not frames else [*frames, observation])[-SEEN:]
        if not chunk:
            chunk = list(fast.predict_action({**lerobot_parts.history(frames), **words})["action"].transpose(0, 1))
        action = chunk.pop(0)
        done.append(action)
        seen = [place.step(one.numpy())[0] for place, one in zip(places, action, strict=True)]
    return torch.stack(done, dim=1)


def test_actions_are_those_of_the_library(made):
    original = bc.load_policy(made / "original")
    sampler = ChosenSampler.load(made / "sampler.json").sampler
    port = port_of(original).with_sampler(sampler)
    _, before, *_ = opened(made / "fast")
    with bc.accelerate(port, bc.Schedule.load(made / "schedule.json"), "patched"), torch.no_grad():
        expected = by_the_library(port.policy, before)
    found = rolled_out(made / "fast")
    assert found.shape == (2, LENGTH, 4)
    assert found.std() > 0.05
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.skipif(not OWN, reason="this LeRobot has no multi_task_dit")
def test_in_full_precision_actions_are_those_of_lerobots_own_policy(made):
    """LeRobot's classes and processors against the plugin, each in LeRobot's own rollout, with the same noise."""
    cli.main(["export", str(made / "original"), "--lerobot", str(made / "full")])
    expected = rolled_out(made / "original")
    assert float((rolled_out(made / "full") - expected).abs().max()) < 1e-4
    assert float((rolled_out(made / "fast") - expected).abs().max()) > 1e-3


def test_the_processors_are_the_original_s(made):
    for name in ("policy_preprocessor", "policy_postprocessor"):
        steps = lerobot_parts.steps_of(made / "original", name)
        assert lerobot_parts.steps_of(made / "fast", name) == steps
        for path in (made / "original").glob(f"{name}*.safetensors"):
            kept = load_file(made / "fast" / path.name)
            assert {key: value.tolist() for key, value in load_file(path).items()} == {
                key: value.tolist() for key, value in kept.items()
            }
    _, before, behind, _ = opened(made / "fast")
    state = torch.full((1, 5), 7.0)
    assert torch.equal(before({"observation.state": state, "task": ["lift"]})["observation.state"], state)
    assert torch.equal(behind(torch.full((1, 4), 3.0)), torch.full((1, 4), 3.0))


def typed(module, words, place, brought="lerobot_parts"):
    """A command in a process of its own; what is toy comes in by LeRobot's own option for packages."""
    (place / "toys").mkdir(exist_ok=True)
    (place / "toys/__init__.py").write_text(f"import {brought}\n")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *filter(None, sys.path)])}
    code = f"import sys; from {module} import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    ran = subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def evaluated(words, place):
    """What `lerobot-eval` says."""
    toy = ["--env.type=toy", "--env.discover_packages_path=toys", "--eval.n_episodes=2", "--eval.batch_size=2"]
    typed("lerobot.scripts.lerobot_eval", [*words, *toy, "--output_dir=out", "--policy.device=cpu", "--seed=1"], place)
    return json.loads((place / "out/eval_info.json").read_text())["overall"]


@pytest.mark.skipif(not OWN, reason="this LeRobot has no lerobot-rollout")
@pytest.mark.parametrize("inference", ["sync", "rtc"])
def test_lerobot_rollout_runs_it(made, inference, tmp_path):
    toy = ["--robot.type=toy", "--robot.discover_packages_path=toys", f"--robot.calibration_dir={tmp_path}"]
    words = [f"--policy.path={made / 'fast'}", f"--inference.type={inference}", f"--task={lerobot_parts.TASK}"]
    more = ["--fps=20", "--duration=3", "--play_sounds=false", "--device=cpu", "--return_to_initial_position=false"]
    typed("lerobot.scripts.lerobot_rollout", [*words, *toy, *more], tmp_path, "toy_robot")
    actions = np.load(tmp_path / "actions.npy")
    assert len(actions) > 10
    assert np.isfinite(actions).all()
    assert actions.std() > 0.05


@pytest.mark.parametrize("objective", ["diffusion", "flow_matching"])
def test_the_page_works(objective, tmp_path, monkeypatch):
    """The way of docs/your-policy.md from LeRobot's dataset and directory to lerobot-eval, and what it gains (with -s)."""
    monkeypatch.chdir(tmp_path)
    lerobot_parts.write_directory(tmp_path / "my_dit", objective, **(SIZES if WIDTH else {}))
    lerobot_parts.write_dataset(tmp_path / "my_task")
    page = section("docs/your-policy.md", "## LeRobot's DiT")
    (dataset,) = (code for code in fenced(page, "python") if "from lerobot" in code)
    exec(compile(dataset, "page", "exec"), {})
    install, tune, export, run = lines("".join(fenced(page, "sh")))
    assert install.startswith("pip install")
    for command in (f"{tune} --minutes {3 if WIDTH else 2}", export):
        typed("blockcache.cli", shlex.split(command)[1:], tmp_path)
    found = evaluated([word for word in shlex.split(run)[1:] if not word.startswith("--env")], tmp_path)
    assert (found["n_episodes"], found["pc_success"]) == (2, 100.0)
    original = bc.load_policy("my_dit")
    _, before, *_ = opened(tmp_path / "fast_dir")
    with bc.accelerate(original, engine="patched", tuned="tuned") as fast, torch.no_grad():
        expected = by_the_library(fast, before)
    after, rate = timed_rollout(tmp_path / "fast_dir")
    scale = torch.as_tensor(port_of(original).action_scale)
    assert float(((after - expected) * scale).abs().max()) < 1e-5  # of actions from -1 to 1, in closed loop
    plain = f"{timed_rollout(tmp_path / 'my_dit')[1]:.1f}" if OWN else "not known here"
    made = json.loads((tmp_path / "fast_dir/config.json").read_text())["made_from"]
    print(f"{objective}: actions a second {rate:.1f}, LeRobot's own policy {plain}; {made}; lerobot-eval: {found}")


def observation(policy, batch=1):
    generator = torch.Generator().manual_seed(3)
    found = {name: torch.rand(batch, *shape[1:], generator=generator) for name, shape in policy.runner.inputs.items()}
    tokens = torch.tensor([[1, 2, 3, 4, 6, 6]]).repeat(batch, 1)
    return {**found, "observation.language.tokens": tokens, "observation.language.attention_mask": tokens < 6}


def chunk(policy, seed=2, **told):
    torch.manual_seed(seed)
    return policy.predict_action_chunk(observation(policy), **told)


def test_real_time_chunking_goes_on_from_what_is_left(made):
    policy, *_ = opened(made / "fast")
    assert policy.supports_rtc()
    before = chunk(policy)
    assert before.shape == (1, 4, 4)
    left = before[0, 1:]
    plain = chunk(policy, seed=9)
    told = chunk(policy, seed=9, inference_delay=2, prev_chunk_left_over=left)
    assert float((told[0, :2] - left[:2]).abs().max()) < 1e-5  # what is executed meanwhile
    assert float((plain[0, :2] - left[:2]).abs().max()) > 1e-2
    filled = torch.cat([left, torch.zeros(5, 4)])  # as newer loops fill up
    assert torch.equal(chunk(policy, seed=9, inference_delay=2, prev_chunk_left_over=filled), told)
    assert torch.equal(chunk(policy, seed=9, inference_delay=0, prev_chunk_left_over=None), plain)
    policy.config.rtc_config = type("Off", (), {"enabled": False, "execution_horizon": 3})()
    assert torch.equal(chunk(policy, seed=9, inference_delay=2, prev_chunk_left_over=left), plain)


def test_lerobot_s_action_queue_drives_it(made):
    """What LeRobot's asynchronous loop does with each chunk: consume, ask with what is left, merge after the delay."""
    from lerobot.policies.rtc.action_queue import ActionQueue
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    policy, _, behind, _ = opened(made / "fast")
    settings = RTCConfig(enabled=True, execution_horizon=3)
    policy.config.rtc_config = settings
    queue, delay = ActionQueue(settings), 1
    first = chunk(policy, seed=0)
    queue.merge(first[0], behind(first)[0], 0, 0)
    for seed in range(1, 6):
        queue.get()
        begun, left = queue.get_action_index(), queue.get_left_over()
        new = chunk(policy, seed=seed, inference_delay=delay, prev_chunk_left_over=left)
        meanwhile = queue.get()
        assert float((new[0, 0] - meanwhile).abs().max()) < 1e-5
        queue.merge(new[0], behind(new)[0], delay, begun)
        assert torch.equal(queue.get_left_over(), new[0, delay:])


@pytest.mark.skipif(not OWN, reason="this LeRobot has no lerobot-rollout")
def test_the_loop_of_lerobot_rollout_drives_it(made):
    """Its engine for real-time chunking, in a thread of its own, with its latencies; only the robot is made up."""
    from lerobot.policies.rtc.configuration_rtc import RTCConfig
    from lerobot.rollout.inference.rtc import RTCInferenceEngine, supports_rtc_inference

    policy, before, behind, _ = opened(made / "fast")
    assert supports_rtc_inference(policy)
    own, told = policy.predict_action_chunk, []
    policy.predict_action_chunk = lambda batch, **said: told.append((said, own(batch, **said))) or told[-1][1]
    joints = [f"{place}.pos" for place in range(5)]
    features = {"observation.state": {"dtype": "float32", "shape": (5,), "names": joints}}
    frame = {"dtype": "image", "shape": (lerobot_parts.FRAME, lerobot_parts.FRAME, 3), "names": None}
    features |= dict.fromkeys(lerobot_parts.CAMERAS, frame)
    robot = SimpleNamespace(robot_type="toy", action_features=[])
    rtc = RTCConfig(enabled=True, execution_horizon=4)
    engine = RTCInferenceEngine(policy, before, behind, robot, rtc, features, lerobot_parts.TASK, 20.0, "cpu")
    place = Reach()
    seen, _ = place.reset(seed=0)
    engine.start()
    engine.resume()
    done = 0
    for _ in range(200):
        state = {name: float(value) for name, value in zip(joints, seen["agent_pos"], strict=True)}
        engine.notify_observation({**state, **seen["pixels"]})
        if (action := engine.get_action(None)) is not None:
            seen, *_ = place.step(action.numpy())
            done += 1
        time.sleep(0.05)
        if done >= 20:
            break
    engine.stop()
    assert not engine.failed
    assert done >= 20
    later = [
        (said, new[0]) for said, new in told if said["prev_chunk_left_over"] is not None and said["inference_delay"]
    ]
    assert len(later) >= 5
    for said, new in later:
        left = said["prev_chunk_left_over"]
        kept = min(said["inference_delay"], int((left != 0).any(dim=1).sum()), len(new))  # it fills up with zeros
        assert float((new[:kept] - left[:kept]).abs().max() if kept else 0) < 1e-5
    assert sum(bool((said["prev_chunk_left_over"] != 0).any()) for said, _ in later) >= 3


def test_history_noise_and_reset(made):
    policy, *_ = opened(made / "fast")
    one = observation(policy, 2)
    noise = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    first = [policy.select_action(one, noise=noise) for _ in range(4)]
    again = [policy.select_action(one, noise=noise) for _ in range(4)]
    assert torch.equal(torch.stack(first), torch.stack(again))  # the same moment twice, as at the start
    moved = {name: value + 0.1 if name == "observation.state" else value for name, value in one.items()}
    mixed = policy.select_action(moved, noise=noise)  # the last moment and this one
    policy.reset()
    alone = policy.select_action(moved, noise=noise)
    assert not torch.equal(mixed, alone)
    assert torch.equal(policy.predict_action_chunk(moved, noise=noise)[:, 0], alone)
    moments = {name: torch.stack([one[name], moved[name]], dim=1) for name in policy.runner.inputs}
    assert torch.equal(policy.predict_action_chunk({**moved, **moments}, noise=noise)[:, 0], mixed)


def test_what_it_does_not_do_is_said(made, tmp_path):
    policy, *_ = opened(made / "fast")
    for call in (policy.get_optim_params, lambda: policy.forward({}), policy.config.get_optimizer_preset):
        with pytest.raises(bc.BlockcacheError, match="is not trained; train the policy that it was made from"):
            call()
    from lerobot_policy_blockcache.processor_blockcache import make_blockcache_pre_post_processors

    before, _ = make_blockcache_pre_post_processors(policy.config, dataset_stats=None)
    assert len(before.steps) == 5
    policy.config.pretrained_path = None
    with pytest.raises(bc.BlockcacheError, match="none is named"):
        make_blockcache_pre_post_processors(policy.config)
    with pytest.raises(bc.BlockcacheError, match=r"comes from a directory that 'blockcache export"):
        get_policy_class("blockcache")(policy.config)
    policy.save_pretrained(tmp_path / "copy")
    assert float((rolled_out(tmp_path / "copy") - rolled_out(made / "fast")).abs().max()) == 0.0


def test_a_repository_on_the_hub_is_downloaded_whole(made, monkeypatch):
    asked = []

    def download(name, **settings):
        asked.append((name, settings))
        return str(made / "fast")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    opened(made / "fast")
    policy = get_policy_class("blockcache").from_pretrained("someone/fast", revision="v1", strict=False)
    assert asked == [("someone/fast", {"revision": "v1"})]
    assert policy.config.horizon == 7

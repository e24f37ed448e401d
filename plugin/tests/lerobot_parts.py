"""What LeRobot itself brings to these tests: a policy directory of its own classes, and a toy environment."""

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    TokenizerProcessorStep,
    UnnormalizerProcessorStep,
)

import lerobot_directory
from dit_policies import ACTION, SEEN, STATE
from lerobot_directory import CAMERAS, FRAME, LONG

OWN = find_spec("lerobot.policies.multi_task_dit") is not None
TASK, LENGTH = "reach the dot", 11
VOCABULARY = ["?", "<s>", "reach", "the", "dot", "lift", "</s>"]


def write_tokenizer(directory):
    """A tokenizer of a few words that transformers loads from a directory; the end of the words has the largest id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    ids = {word: place for place, word in enumerate(VOCABULARY)}
    inner = Tokenizer(WordLevel(ids, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    ends = [("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", pad_token="</s>", eos_token="</s>")
    whole.save_pretrained(directory)


def statistics(reference):
    """As LeRobot's datasets have them: by input and kind."""
    found = {}
    for name, value in (*reference.pre.items(), *reference.post.items()):
        key, _, kind = name.rpartition(".")
        found.setdefault(key, {})[kind] = value
    return found


def write_processors(directory, settings, stats):
    """With LeRobot's own classes, the steps that its multi_task_dit has."""
    write_tokenizer(directory / "tokenizer")
    modes = {name: NormalizationMode(mode) for name, mode in settings["normalization_mapping"].items()}
    features = [
        {
            name: PolicyFeature(type=FeatureType(one["type"]), shape=tuple(one["shape"]))
            for name, one in settings[f"{which}_features"].items()
        }
        for which in ("input", "output")
    ]
    tokenizer = TokenizerProcessorStep(
        tokenizer_name=str(directory / "tokenizer"), max_length=LONG, padding="max_length", truncation=True
    )
    normalizer = NormalizerProcessorStep(features={**features[0], **features[1]}, norm_map=modes, stats=stats)
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        tokenizer,
        DeviceProcessorStep(device="cpu"),
        normalizer,
    ]
    behind = [
        UnnormalizerProcessorStep(features=features[1], norm_map=modes, stats=stats),
        DeviceProcessorStep(device="cpu"),
    ]
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", behind)):
        PolicyProcessorPipeline(steps=steps, name=name).save_pretrained(directory)


def tame_reference(objective, **changes):
    """Random weights whose actions stay near the range that actions have."""
    reference = lerobot_directory.Reference(lerobot_directory.config(objective=objective, **changes))
    with torch.no_grad():
        for parameter in reference.noise_predictor.parameters():
            parameter.mul_(0.5)
        reference.noise_predictor.output_proj.weight.mul_(0.2)
    return reference


def write_directory(directory, objective, **changes):
    """A policy with LeRobot's processors; its own classes write the weights and the config where this LeRobot has them."""
    reference = tame_reference(objective, **changes)
    if OWN:
        own_policy(reference.settings).save_pretrained(directory)
    else:
        reference.write(directory)
    for name in ("policy_preprocessor", "policy_postprocessor"):
        for path in directory.glob(f"{name}*"):
            path.unlink()
    write_processors(directory, reference.settings, statistics(reference))
    return directory


def own_policy(settings, seed=0):
    """LeRobot's own multi_task_dit with small CLIP encoders of random weights: nothing comes from a hub."""
    import transformers
    from lerobot.policies.multi_task_dit import modeling_multi_task_dit as modeling
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1}
    text = transformers.CLIPTextConfig(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=9,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=2,
        **sizes,
    )
    sight = transformers.CLIPVisionConfig(image_size=lerobot_directory.CROP, patch_size=8, **sizes)
    modeling.CLIPTextModel.from_pretrained = lambda name: transformers.CLIPTextModel(text)
    modeling.CLIPVisionModel.from_pretrained = lambda name: transformers.CLIPVisionModel(sight)
    features = [
        {
            name: PolicyFeature(type=FeatureType(one["type"]), shape=tuple(one["shape"]))
            for name, one in settings[f"{which}_features"].items()
        }
        for which in ("input", "output")
    ]
    left = ("type", "input_features", "output_features", "normalization_mapping", "optimizer_betas")
    others = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items() if name not in left}
    torch.manual_seed(seed)
    config = MultiTaskDiTConfig(input_features=features[0], output_features=features[1], **others)
    policy = modeling.MultiTaskDiTPolicy(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.noise_predictor.named_parameters():
            size = 0.02 if "output_proj" in name else 0.2
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return policy


class Reach(gymnasium.Env):
    """Two cameras and a state that follows the actions; what is done is recorded."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    task = task_description = TASK
    _max_episode_steps = LENGTH
    told: ClassVar = []  # actions of all episodes

    def __init__(self, **_):
        frame = gymnasium.spaces.Box(0, 255, (FRAME, FRAME, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            agent_pos=gymnasium.spaces.Box(-10, 10, (STATE,), np.float32),
            pixels=gymnasium.spaces.Dict({name.rpartition(".")[2]: frame for name in CAMERAS}),
        )
        self.action_space = gymnasium.spaces.Box(-10, 10, (ACTION,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.state = 0, self.np_random.standard_normal(STATE).astype(np.float32)
        return self.observe(), {"is_success": False}

    def observe(self):
        frames = {
            name.rpartition(".")[2]: self.np_random.integers(0, 256, (FRAME, FRAME, 3), dtype=np.uint8)
            for name in CAMERAS
        }
        return {"agent_pos": self.state.copy(), "pixels": frames}

    def step(self, action):
        Reach.told.append(np.array(action))
        self.count += 1
        self.state[:ACTION] += 0.1 * np.tanh(action)
        over = self.count >= LENGTH
        return self.observe(), float(-np.abs(self.state).sum()), over, False, {"is_success": over}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


def _features():
    cameras = {f"pixels/{name.rpartition('.')[2]}": name for name in CAMERAS}
    names = {"action": "action", "agent_pos": "observation.state", **cameras}
    shapes = {"action": ("ACTION", ACTION), "agent_pos": ("STATE", STATE)}
    shapes |= dict.fromkeys(cameras, ("VISUAL", FRAME, FRAME, 3))
    return names, {
        name: PolicyFeature(type=FeatureType(kind), shape=tuple(shape)) for name, (kind, *shape) in shapes.items()
    }


if "toy" not in EnvConfig.get_known_choices():
    gymnasium.register("gym_toy/Reach-v0", entry_point=Reach, order_enforce=False)  # wrappers would hide its task

    @EnvConfig.register_subclass("toy")
    @dataclass
    class ToyEnv(EnvConfig):
        task: str | None = "Reach-v0"
        fps: int = 10
        features: dict[str, PolicyFeature] = field(default_factory=lambda: _features()[1])
        features_map: dict[str, str] = field(default_factory=lambda: _features()[0])

        @property
        def gym_kwargs(self) -> dict:
            return {}


def write_dataset(directory, episodes=2, length=50):
    """A dataset of LeRobot's own, of the toy environment left alone."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        "observation.state": {"dtype": "float32", "shape": (STATE,), "names": None},
        "action": {"dtype": "float32", "shape": (ACTION,), "names": None},
    }
    frame = {"dtype": "image", "shape": (FRAME, FRAME, 3), "names": ["height", "width", "channels"]}
    features |= dict.fromkeys(CAMERAS, frame)
    dataset = LeRobotDataset.create("me/my_task", fps=10, features=features, root=directory, use_videos=False)
    still = np.zeros(ACTION, np.float32)
    for seed in range(episodes):
        place = Reach()
        seen, _ = place.reset(seed=seed)
        for _ in range(length):
            frames = {name: seen["pixels"][name.rpartition(".")[2]] for name in CAMERAS}
            dataset.add_frame({"observation.state": seen["agent_pos"], "action": still, "task": TASK, **frames})
            seen, *_ = place.step(still)
        dataset.save_episode()
    dataset.finalize()


def steps_of(directory, name):
    return [step["registry_name"] for step in json.loads((directory / f"{name}.json").read_text())["steps"]]


def history(frames):
    """The moments of an observation, from one of each moment in turn."""
    return {name: torch.stack([one[name] for one in frames[-SEEN:]], dim=1) for name in frames[-1]}

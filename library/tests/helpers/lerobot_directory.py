"""A policy directory as LeRobot writes it, with random weights, and what that policy answers: no code of ours."""

import json

import torch
from conftest import randomise
from diffusers import DDPMScheduler
from safetensors.torch import save_file
from torch import nn

import small_clip
from dit_policies import ACTION, EXECUTED, SEEN, STATE, STEPS, TOKENS, Flow, Predictor

CAMERAS, FRAME, CROP, WORDS, LONG, TEXT, SIGHT = (
    ("observation.images.top", "observation.images.wrist"),
    20,
    16,
    50,
    6,
    16,
    24,
)
FEATURES = SEEN * (STATE + 2 * SIGHT + 16)


def feature(kind, *shape):
    return {"type": kind, "shape": list(shape)}


def config(**changes):
    cameras = {name: feature("VISUAL", 3, FRAME, FRAME) for name in CAMERAS}
    settings = {
        "type": "multi_task_dit",
        "n_obs_steps": SEEN,
        "input_features": {"observation.state": feature("STATE", STATE), **cameras},
        "output_features": {"action": feature("ACTION", ACTION)},
        "device": "cpu",
        "use_amp": False,
        "horizon": TOKENS,
        "n_action_steps": EXECUTED,
        "objective": "diffusion",
        "noise_scheduler_type": "DDPM",
        "num_train_timesteps": 20,
        "num_inference_steps": STEPS,
        "num_integration_steps": STEPS,
        "hidden_dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout": 0.1,
        "timestep_embed_dim": 8,
        "image_crop_shape": [CROP, CROP],
        "tokenizer_max_length": LONG,
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        "optimizer_betas": [0.95, 0.999],
    }
    return settings | changes


class Reference(nn.Module):
    """LeRobot's policy and its processors: observations and actions in robot units."""

    def __init__(self, settings=None):
        super().__init__()
        self.settings = settings or config()
        self.observation_encoder = nn.Module()
        text = small_clip.Settings(
            vocab_size=WORDS,
            hidden_size=TEXT,
            intermediate_size=2 * TEXT,
            num_hidden_layers=2,
            num_attention_heads=1,
            max_position_embeddings=9,
        )
        sight = small_clip.Settings(
            hidden_size=SIGHT,
            intermediate_size=2 * SIGHT,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=CROP,
            patch_size=8,
        )
        self.observation_encoder.text_encoder = nn.Module()
        self.observation_encoder.text_encoder.text_encoder = small_clip.CLIPTextModel(text)
        self.observation_encoder.text_encoder.projection = nn.Linear(TEXT, 16)
        self.observation_encoder.vision_encoder = nn.Module()
        self.observation_encoder.vision_encoder.model = small_clip.CLIPVisionModel(sight)
        self.noise_predictor = Predictor(FEATURES)
        randomise(self)
        generator = torch.Generator().manual_seed(5)
        low = torch.randn(STATE, generator=generator)
        self.pre = {
            "observation.state.min": low,
            "observation.state.max": low + 1 + torch.rand(STATE, generator=generator),
        }
        for name in CAMERAS:
            self.pre[f"{name}.mean"] = torch.rand(3, 1, 1, generator=generator)
            self.pre[f"{name}.std"] = 0.2 + torch.rand(3, 1, 1, generator=generator)
        start = torch.randn(ACTION, generator=generator)
        self.post = {"action.min": start, "action.max": start + torch.tensor([1.0, 2.0, 0.0, 3.0])}  # one never changes
        self.eval()

    @torch.no_grad()
    def answer(self, obs):
        """Executed actions, with noise from torch's global generator."""
        low, high = self.pre["observation.state.min"], self.pre["observation.state.max"]
        state = 2 * (obs["observation.state"] - low) / (high - low) - 1
        side = (FRAME - CROP) // 2
        shown = []
        for name in CAMERAS:
            frames = (obs[name] - self.pre[f"{name}.mean"]) / (self.pre[f"{name}.std"] + 1e-8)
            frames = frames[..., side : side + CROP, side : side + CROP]
            seen = self.observation_encoder.vision_encoder.model(pixel_values=frames.flatten(0, 1)).last_hidden_state[
                :, 0
            ]
            shown.append(seen.unflatten(0, (-1, SEEN)))
        text = self.observation_encoder.text_encoder
        tokens, mask = (obs[f"observation.language.{name}"].long() for name in ("tokens", "attention_mask"))
        said = text.projection(text.text_encoder(input_ids=tokens, attention_mask=mask).pooler_output)
        vector = torch.cat([state, *shown, said[:, None].expand(-1, SEEN, -1)], dim=-1).flatten(1)
        if self.settings["objective"] == "flow_matching":
            sample = Flow("euler").conditional_sample(self.noise_predictor, len(vector), vector)
        else:
            scheduler = DDPMScheduler(20, beta_schedule="squaredcos_cap_v2")
            scheduler.set_timesteps(STEPS)
            sample = torch.randn(len(vector), TOKENS, ACTION)
            for t in scheduler.timesteps:
                out = self.noise_predictor(sample, torch.full((len(vector),), int(t)), vector)
                sample = scheduler.step(out, t, sample).prev_sample
        low, span = self.post["action.min"], self.post["action.max"] - self.post["action.min"]
        span = torch.where(span == 0, torch.tensor(1e-8), span)
        return ((sample + 1) / 2 * span + low)[:, SEEN - 1 : SEEN - 1 + EXECUTED]

    def write(self, directory, version=4):
        """As LeRobot does with this version of transformers, which decides the names of CLIP's tensors."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.settings, indent=4))
        tensors = {}
        for name, tensor in self.state_dict().items():
            if version < 5:
                name = name.replace(".text_encoder.text_encoder.", ".text_encoder.text_encoder.text_model.")
                name = name.replace(".vision_encoder.model.", ".vision_encoder.model.vision_model.")
            tensors[name] = tensor.contiguous()
        save_file(tensors, directory / "model.safetensors")
        features = {**self.settings["input_features"], **self.settings["output_features"]}
        for kind, step, statistics in (("pre", "normalizer", self.pre), ("post", "unnormalizer", self.post)):
            file = f"policy_{kind}processor_step_4_{step}_processor.safetensors"
            save_file(statistics, directory / file)
            settings = {"eps": 1e-8, "features": features, "norm_map": self.settings["normalization_mapping"]}
            steps = [
                {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
                {"registry_name": f"{step}_processor", "config": settings, "state_file": file},
            ]
            whole = {"name": f"policy_{kind}processor", "steps": steps}
            (directory / f"policy_{kind}processor.json").write_text(json.dumps(whole, indent=2))
        return directory


def observation(batch):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS - 1, (batch, LONG), generator=generator)
    tokens[:, 4:] = WORDS - 1  # the end of the words, and what fills the rest
    mask = torch.ones(batch, LONG, dtype=torch.int64)
    mask[:, 5:] = 0
    frames = {name: torch.rand(batch, SEEN, 3, FRAME, FRAME, generator=generator) for name in CAMERAS}
    state = torch.randn(batch, SEEN, STATE, generator=generator)
    language = {"observation.language.tokens": tokens, "observation.language.attention_mask": mask}
    return {"observation.state": state, **frames, **language}

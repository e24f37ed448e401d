"""The public Diffusion Policy code's low-dimensional transformer policy, once more, in plain torch and diffusers.

Written from a description of it (names, shapes, order of operations); shares nothing with blockcache. `write_checkpoint`
writes its file as the public code does: torch.save of a config of OmegaConf's classes, which are stood in for by classes of
the same names, of state dicts, and of pickled bytes.
"""

import contextlib
import copy
import math
import pickle
import sys
import types
import typing

import diffusers
import torch
from torch import nn

COSINE = {"num_train_timesteps": 100, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "squaredcos_cap_v2"}
DDPM = {
    "_target_": "diffusers.schedulers.scheduling_ddpm.DDPMScheduler",
    **COSINE,
    "variance_type": "fixed_small",
    "clip_sample": True,
    "prediction_type": "epsilon",
}
DDIM = {
    "_target_": "diffusers.schedulers.scheduling_ddim.DDIMScheduler",
    **COSINE,
    "clip_sample": True,
    "set_alpha_to_one": True,
    "steps_offset": 0,
    "prediction_type": "epsilon",
}
SOLVER = {
    "_target_": "diffusers.schedulers.scheduling_dpmsolver_multistep.DPMSolverMultistepScheduler",
    **COSINE,
    "prediction_type": "epsilon",
}


def config(scheduler=None, steps=100, resolved=False, **changes):
    """That of the Push-T run, in a small size; a name is changed where it stands, an unknown one is the policy's."""
    top = {
        "name": "train_diffusion_transformer_lowdim",
        "_target_": "diffusion_policy.workspace.train_diffusion_transformer_lowdim_workspace.TrainWorkspace",
        "obs_dim": "${task.obs_dim}",
        "action_dim": "${task.action_dim}",
        "task_name": "${task.name}",
        "horizon": 16,
        "n_obs_steps": 2,
        "n_action_steps": 8,
        "n_latency_steps": 0,
        "obs_as_cond": True,
        "pred_action_steps_only": False,
        "task": {
            "name": "pusht_lowdim",
            "obs_dim": 20,
            "action_dim": 2,
            "dataset": {"pad_before": "${eval:'${n_obs_steps}-1+${n_latency_steps}'}"},
        },
        "training": {"use_ema": True, "seed": 42, "device": "cuda:0"},
        "logging": {"name": "${now:%Y.%m.%d-%H.%M.%S}_${name}_${task_name}", "tags": ["${name}", "${task_name}"]},
    }
    model = {
        "_target_": "diffusion_policy.model.diffusion.transformer_for_diffusion.TransformerForDiffusion",
        "input_dim": "${eval:'${action_dim} if ${obs_as_cond} else ${obs_dim} + ${action_dim}'}",
        "output_dim": "${policy.model.input_dim}",
        "horizon": "${horizon}",
        "n_obs_steps": "${n_obs_steps}",
        "cond_dim": "${eval:'${obs_dim} if ${obs_as_cond} else 0'}",
        "n_layer": 2,
        "n_head": 4,
        "n_emb": 32,
        "p_drop_emb": 0.0,
        "p_drop_attn": 0.01,
        "causal_attn": True,
        "time_as_cond": True,
        "obs_as_cond": "${obs_as_cond}",
        "n_cond_layers": 0,
    }
    policy = {
        "_target_": "diffusion_policy.policy.diffusion_transformer_lowdim_policy.DiffusionTransformerLowdimPolicy",
        "model": model,
        "noise_scheduler": dict(scheduler or DDPM),
        "num_inference_steps": steps,
    }
    for name in (
        "horizon",
        "obs_dim",
        "action_dim",
        "n_action_steps",
        "n_obs_steps",
        "obs_as_cond",
        "pred_action_steps_only",
    ):
        policy[name] = f"${{{name}}}"
    for name, value in changes.items():
        inside = next((part for part in (top["task"], top, model) if name in part), policy)
        inside[name] = value
    if resolved:  # as the public training script saves it
        known = {**top, "obs_dim": top["task"]["obs_dim"], "action_dim": top["task"]["action_dim"]}
        for name in ("horizon", "obs_dim", "action_dim", "n_action_steps", "n_obs_steps", "obs_as_cond"):
            policy[name] = known[name]
        policy["pred_action_steps_only"] = False
        both = known["obs_dim"] + known["action_dim"]
        model["input_dim"] = model["output_dim"] = known["action_dim"] if known["obs_as_cond"] else both
        model["cond_dim"] = known["obs_dim"] if known["obs_as_cond"] else 0
        model |= {name: known[name] for name in ("horizon", "n_obs_steps", "obs_as_cond")}
    return {**top, "policy": policy}


def hybrid_config(own, steps=6, **changes):
    """That of a camera policy with the sizes of `own`, a config of ours."""
    observed = {
        item.name: {"shape": list(item.shape), "type": "rgb"} if item.is_camera else {"shape": list(item.shape)}
        for item in own.encoder.inputs
    }
    policy = {
        "_target_": "diffusion_policy.policy.diffusion_transformer_hybrid_image_policy."
        "DiffusionTransformerHybridImagePolicy",
        "shape_meta": "${shape_meta}",
        "noise_scheduler": dict(DDPM),
        "horizon": "${horizon}",
        "n_action_steps": "${eval:'${n_action_steps}+${n_latency_steps}'}",
        "n_obs_steps": "${n_obs_steps}",
        "num_inference_steps": steps,
        "crop_shape": None if own.encoder.crop is None else list(own.encoder.crop),
        "obs_encoder_group_norm": True,
        "eval_fixed_crop": True,
        **{name: getattr(own, name) for name in ("n_layer", "n_cond_layers", "n_head", "n_emb", "causal_attn")},
        "p_drop_emb": 0.0,
        "p_drop_attn": 0.3,
        "time_as_cond": True,
        "obs_as_cond": "${obs_as_cond}",
        **changes,
    }
    return {
        "name": "train_diffusion_transformer_hybrid",
        "task": {"name": "lift_image_abs", "shape_meta": {"obs": observed, "action": {"shape": [own.action_dim]}}},
        "shape_meta": "${task.shape_meta}",
        **{name: getattr(own, name) for name in ("horizon", "n_obs_steps", "n_action_steps")},
        "n_latency_steps": 0,
        "obs_as_cond": True,
        "training": {"use_ema": True},
        "policy": policy,
    }


class Time(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, t):
        rates = torch.exp(torch.arange(self.width // 2) * -(math.log(10000) / (self.width // 2 - 1)))
        angles = t[:, None] * rates[None]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Transformer(nn.Module):
    def __init__(self, tokens, inputs, seen, observed, width, heads, layers, causal, time_as_cond, cond_layers):
        super().__init__()
        self.apart, self.observed = time_as_cond, observed
        tokens += 0 if time_as_cond else 1
        conditions = (1 + (seen if observed else 0)) if time_as_cond else 0
        settings = {"dim_feedforward": 4 * width, "dropout": 0.01, "activation": "gelu"}
        settings |= {"batch_first": True, "norm_first": True}
        self.input_emb = nn.Linear(inputs, width)
        self.pos_emb = nn.Parameter(torch.zeros(1, tokens, width))
        self.time_emb = Time(width)
        if observed:
            self.cond_obs_emb = nn.Linear(observed, width)
        if conditions:
            self.cond_pos_emb = nn.Parameter(torch.zeros(1, conditions, width))
            self.encoder = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
            if cond_layers:
                self.encoder = nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(width, heads, **settings), cond_layers, enable_nested_tensor=False
                )
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, **settings), layers)
        else:
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(width, heads, **settings), layers, enable_nested_tensor=False
            )
        self.mask = self.memory_mask = None
        if causal:
            rows = torch.arange(tokens)[:, None]
            del self.mask, self.memory_mask
            self.register_buffer("mask", _hiding(torch.arange(tokens) > rows))
            self.memory_mask = None
            if observed:
                del self.memory_mask
                self.register_buffer("memory_mask", _hiding(torch.arange(conditions) - 1 > rows))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, inputs)
        self._dummy_variable = nn.Parameter()

    def forward(self, sample, timestep, cond=None):
        x, t = sample, timestep
        time = self.time_emb(t.expand(len(x))).unsqueeze(1)
        x = self.input_emb(x)
        if not self.apart:
            x = torch.cat((time, x), dim=1) + self.pos_emb
            x = self.encoder(x, mask=self.mask)[:, 1:]
        else:
            memory = torch.cat((time, self.cond_obs_emb(cond)), dim=1) if self.observed else time
            memory = self.encoder(memory + self.cond_pos_emb)
            x = self.decoder(x + self.pos_emb, memory, tgt_mask=self.mask, memory_mask=self.memory_mask)
        return self.head(self.ln_f(x))


def _hiding(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


class Policy(nn.Module):
    """Made by the same numbers that stand in the config; `obs` and `action` sizes of the normaliser may divide theirs."""

    def __init__(self, config, seed=0, normalised=None):
        super().__init__()
        policy = config["policy"]
        model = policy["model"]
        size = {**config["task"], **{name: value for name, value in policy.items() if type(value) in (int, bool)}}
        for name in ("horizon", "n_obs_steps", "n_action_steps", "obs_as_cond"):
            setattr(self, name, config[name])
        self.obs_dim, self.action_dim = size["obs_dim"], size["action_dim"]
        inputs = self.action_dim + (0 if self.obs_as_cond else self.obs_dim)
        names = ("n_emb", "n_head", "n_layer", "causal_attn", "time_as_cond", "n_cond_layers")
        self.model = Transformer(
            self.horizon,
            inputs,
            self.n_obs_steps,
            self.obs_dim if self.obs_as_cond else 0,
            *(model[name] for name in names),
        )
        self.normalizer = nn.Module()
        self.normalizer.params_dict = nn.ParameterDict()
        self.mask_generator = nn.Module()
        self._dummy_variable, self.mask_generator._dummy_variable = nn.Parameter(), nn.Parameter()
        settings = dict(policy["noise_scheduler"])
        self.noise_scheduler = getattr(diffusers, settings.pop("_target_").split(".")[-1])(**settings)
        self.num_inference_steps = policy["num_inference_steps"] or settings["num_train_timesteps"]
        self.kwargs = {"eta": policy["eta"]} if "eta" in policy else {}
        self._fill(torch.Generator().manual_seed(seed), normalised or (self.obs_dim, self.action_dim))
        self.eval()

    def _fill(self, generator, sizes):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                gain = parameter.ndim == 1 and name.endswith("weight")
                parameter.copy_(1 + 0.1 * noise if gain else noise * 0.3)
        for name, width in zip(("obs", "action"), sizes, strict=True):
            stats = {part: torch.randn(width, generator=generator) for part in ("min", "max", "mean", "std")}
            self.normalizer.params_dict[name] = nn.ParameterDict(
                {
                    "scale": 0.5 + torch.rand(width, generator=generator),
                    "offset": torch.randn(width, generator=generator),
                    "input_stats": nn.ParameterDict(stats),
                }
            )
        self.normalizer.requires_grad_(False)

    def _scaled(self, name, value, forward):
        field = self.normalizer.params_dict[name]
        rows = value.reshape(-1, len(field["scale"]))
        rows = rows * field["scale"] + field["offset"] if forward else (rows - field["offset"]) / field["scale"]
        return rows.reshape(value.shape)

    @torch.no_grad()
    def predict_action(self, obs_dict, generator=None):
        """Also of a bare tensor, and with a generator, which the public code does not take."""
        obs = obs_dict["obs"] if isinstance(obs_dict, dict) else obs_dict
        seen = self._scaled("obs", obs, True)
        cond = seen if self.obs_as_cond else None
        width = self.action_dim + (0 if self.obs_as_cond else self.obs_dim)
        x = torch.randn((len(obs), self.horizon, width), generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self._known(x, seen)
            out = self.model(x, t, cond)
            x = self.noise_scheduler.step(out, t, x, generator=generator, **self.kwargs).prev_sample
        x = self._known(x, seen)
        chunk = self._scaled("action", x[..., : self.action_dim].contiguous(), False)
        start = self.n_obs_steps - 1
        return {"action": chunk[:, start : start + self.n_action_steps], "action_pred": chunk}

    def _known(self, x, seen):
        if not self.obs_as_cond:
            x = x.clone()
            x[:, : self.n_obs_steps, self.action_dim :] = seen
        return x


# -- the file


def _stand_ins():
    """OmegaConf's classes by name; what they keep is what OmegaConf 2.1 keeps."""
    made = {}
    for module, names in {
        "omegaconf": [],
        "omegaconf.dictconfig": ["DictConfig"],
        "omegaconf.listconfig": ["ListConfig"],
        "omegaconf.nodes": ["AnyNode"],
        "omegaconf.base": ["ContainerMetadata", "Metadata"],
    }.items():
        made[module] = types.ModuleType(module)
        for name in names:
            setattr(made[module], name, type(name, (), {"__module__": module}))
    return made


def omegaconf(value, modules, parent=None):
    """A tree of plain values as OmegaConf's objects."""
    kind = {dict: ("dictconfig", "DictConfig"), list: ("listconfig", "ListConfig")}.get(
        type(value), ("nodes", "AnyNode")
    )
    node = getattr(modules[f"omegaconf.{kind[0]}"], kind[1])()
    metadata = getattr(modules["omegaconf.base"], "Metadata" if kind[1] == "AnyNode" else "ContainerMetadata")()
    vars(metadata).update(ref_type=typing.Any, object_type=dict, optional=True, key=None, flags={}, flags_root=False)
    vars(node).update(_metadata=metadata, _parent=parent, _flags_cache=None)
    if isinstance(value, dict):
        node._content = {key: omegaconf(item, modules, node) for key, item in value.items()}
    elif isinstance(value, list):
        node._content = [omegaconf(item, modules, node) for item in value]
    else:
        node._val = value
    return node


@contextlib.contextmanager
def omegaconf_there():
    modules = _stand_ins()
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules |= modules
    try:
        yield modules
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def payload(policy, config, modules, ema=True):
    """What the public code's workspace saves: in `model` are other weights than in `ema_model`."""
    current = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in current.model.parameters():
            parameter.add_(0.5)
    states = (
        {"model": current.state_dict(), "ema_model": policy.state_dict()} if ema else {"model": policy.state_dict()}
    )
    group = {"lr": 1e-4, "betas": [0.9, 0.95], "params": [0, 1]}
    moment = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, 3), "exp_avg_sq": torch.zeros(4, 3)}
    return {
        "cfg": omegaconf(config, modules),
        "state_dicts": {**states, "optimizer": {"state": {0: moment}, "param_groups": [group]}},
        "pickles": {"global_step": pickle.dumps(1000), "_output_dir": pickle.dumps("data/outputs")},
    }


def write_checkpoint(path, config, change=None, seed=0, normalised=None, ema=True, policy=None):
    """A checkpoint file of a policy (a random one if none is given), which is returned; `change` may edit what is saved."""
    policy = policy or Policy(config, seed, normalised)
    with omegaconf_there() as modules:
        saved = payload(policy, config, modules, ema)
        if change is not None:
            saved = change(saved) or saved
        torch.save(saved, path)
    return policy

"""A policy that shares nothing with ours but the public interface: written from scratch, other names, other sizes."""

import torch
from diffusers import DDPMScheduler
from torch import nn

from blockcache.models.sampling import generate

WIDTH, HIDDEN, TOKENS, ACTION, SEEN, OBS = 24, 40, 5, 2, 3, 4
STEPS = 8


class Denoiser(nn.Module):
    """Places are an nn.Embedding, time goes through a table, conditions are one Linear: not a name of DP-T's."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(ACTION, WIDTH)
        self.pos_emb = nn.Embedding(TOKENS, WIDTH)  # a name of DP-T's after all, but a module
        self.clock = nn.Linear(1, WIDTH)
        self.watch = nn.Linear(OBS, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 3, HIDDEN, 0.1, batch_first=True, norm_first=True)  # ReLU
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        self.leave = nn.Linear(WIDTH, ACTION)

    def forward(self, sample, timestep, cond=None, **kwargs):
        time = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1, 1, 1).expand(len(sample), 1, 1) / 100
        memory = torch.cat([self.clock(time), self.watch(cond)], dim=1)
        return self.leave(self.decoder(self.enter(sample) + self.pos_emb.weight, memory))


class ByName(Denoiser):
    """Runs its layers itself and hands them everything by name."""

    def forward(self, sample, timestep, cond=None, **kwargs):
        x = self.enter(sample) + self.pos_emb.weight
        for layer in self.decoder.layers:
            x = layer(tgt=x, memory=self.watch(cond))
        return self.leave(x)


class Policy(nn.Module):
    """The loop of the public interface: global noise, one scheduler for all calls, a dict in and a dict out."""

    def __init__(self, scheduler=None, model=None, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.model = model or Denoiser()
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.noise_scheduler = scheduler or DDPMScheduler(STEPS * 5, beta_schedule="squaredcos_cap_v2")
        self.num_inference_steps = STEPS
        self.kwargs = kwargs
        self.active = self.most_active = 0
        self.eval()

    def predict_action(self, obs_dict):
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            with torch.no_grad():
                x = self.sample(obs_dict["obs"], obs_dict.get("start"))
        finally:
            self.active -= 1
        return {"action": x[:, 1:4], "action_pred": x}

    def sample(self, cond, start):
        x = torch.randn(len(cond), TOKENS, ACTION) if start is None else start
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.denoise(x, t, cond), t, x, **self.kwargs).prev_sample
        return x

    def denoise(self, x, t, cond):
        return self.model(x, t, cond)


class Bare:
    """Not even a module: an object that holds one."""

    def __init__(self, inner):
        self.model, self.noise_scheduler = inner.model, inner.noise_scheduler
        self.num_inference_steps, self._inner = inner.num_inference_steps, inner

    def predict_action(self, obs_dict):
        return self._inner.predict_action(obs_dict)


def observe(batch=1, seed=0):
    return {"obs": torch.randn(batch, SEEN, OBS, generator=torch.Generator().manual_seed(seed))}


def act(policy, obs, seed=0):
    return generate(policy.predict_action, obs, seed)["action_pred"]

"""A foreign policy: a class with the public interface and tensor names that shares nothing with ours."""

import math

import torch
from diffusers import DDPMScheduler
from torch import nn

WIDTH, HEADS, DEPTH, TOKENS, SEEN, OBS, ACTION, EXECUTED, STEPS = 12, 3, 2, 7, 2, 4, 3, 3, 5
BLOCKS = [f"layers.{index}.{kind}" for index in range(DEPTH) for kind in ("SA", "CA", "FFN")]
COSINE = {"beta_schedule": "squaredcos_cap_v2"}


class Clock(nn.Module):
    def forward(self, t):
        frequencies = torch.exp(torch.linspace(0, -math.log(10000), WIDTH // 2))
        phase = t[:, None].float() * frequencies
        return torch.cat([phase.sin(), phase.cos()], dim=1)


class Denoiser(nn.Module):
    """`mask` and `memory_mask` may be kept in any way that torch's own layers understand."""

    def __init__(self, masks="buffers", activation="gelu"):
        super().__init__()
        self.input_emb = nn.Linear(ACTION, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(1, TOKENS, WIDTH))
        self.drop = nn.Dropout(0.1)
        self.time_emb = Clock()
        self.cond_obs_emb = nn.Linear(OBS, WIDTH)
        self.cond_pos_emb = nn.Parameter(torch.zeros(1, 1 + SEEN, WIDTH))
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Mish(), nn.Linear(4 * WIDTH, WIDTH))
        layer = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.2, activation=activation, batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, DEPTH)
        rows = torch.arange(TOKENS)[:, None]
        hidden = {"mask": torch.arange(TOKENS) > rows, "memory_mask": torch.arange(1 + SEEN) - 1 > rows}
        for name, mask in hidden.items():
            value = mask if masks == "booleans" else torch.zeros(mask.shape).masked_fill(mask, -math.inf)
            if masks == "attributes":
                setattr(self, name, value)
            else:
                self.register_buffer(name, None if masks == "none" else value, persistent=masks == "buffers")
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ACTION)
        self._dummy_variable = nn.Parameter()

    def forward(self, sample, timestep, cond=None, **kwargs):
        times = torch.as_tensor(timestep).expand(len(sample))
        seen = torch.cat([self.time_emb(times)[:, None], self.cond_obs_emb(cond)], dim=1)
        memory = self.encoder(self.drop(seen + self.cond_pos_emb))
        x = self.drop(self.input_emb(sample) + self.pos_emb)
        x = self.decoder(x, memory, tgt_mask=self.mask, memory_mask=self.memory_mask)
        return self.head(self.ln_f(x))


class Policy(nn.Module):
    """Global noise, one scheduler for all calls, a dict in and a dict out."""

    def __init__(self, scheduler=None, identity=False, denoiser=None, **kwargs):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = denoiser or Denoiser()
            for parameter in self.model.parameters():
                nn.init.normal_(parameter, 0.1, 0.3)
            self.normalizer = nn.Module()
            self.normalizer.params_dict = nn.ParameterDict()
            for name, size in (("obs", OBS), ("action", ACTION)):
                scale, offset = (
                    (torch.ones(1), torch.zeros(1)) if identity else (1 + torch.rand(size), torch.randn(size))
                )
                self.normalizer.params_dict[name] = nn.ParameterDict({"scale": scale, "offset": offset})
        self.normalizer.requires_grad_(False)
        self.noise_scheduler = scheduler or DDPMScheduler(20, **COSINE)
        self.num_inference_steps, self.kwargs = STEPS, kwargs
        self.horizon, self.n_obs_steps, self.n_action_steps = TOKENS, SEEN, EXECUTED
        self.obs_dim, self.action_dim = OBS, ACTION
        self.pred_action_steps_only = False
        self.eval()

    def scaled(self, name):
        field = self.normalizer.params_dict[name]
        return field["scale"], field["offset"]

    @torch.no_grad()
    def predict_action(self, obs_dict):
        scale, offset = self.scaled("obs")
        cond = (obs_dict["obs"] * scale + offset)[:, : self.n_obs_steps]
        x = torch.randn(len(cond), self.horizon, self.action_dim, dtype=cond.dtype)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.model(x, t, cond), t, x, **self.kwargs).prev_sample
        scale, offset = self.scaled("action")
        chunk = (x - offset) / scale
        start = self.n_obs_steps - 1
        return {"action": chunk[:, start : start + self.n_action_steps], "action_pred": chunk}


def act(policy, obs):
    """With the same noise each time."""
    torch.manual_seed(0)
    return policy.predict_action(obs)["action"]

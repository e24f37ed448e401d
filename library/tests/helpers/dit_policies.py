"""Small random DiT policies: ours, and a live one of LeRobot's shape that shares no code with ours."""

import math
from types import SimpleNamespace

import torch
from conftest import randomise
from diffusers import DDIMScheduler, DDPMScheduler
from torch import nn

from blockcache.models.dit.policy import DiTConfig, DiTPolicy
from blockcache.samplers import DDPM, Euler

SEEN, STATE, GOAL, ACTION, TOKENS, EXECUTED, STEPS = 2, 5, 3, 4, 7, 4, 5
SAMPLERS = {"ddpm": DDPM(num_inference_steps=STEPS), "euler": Euler(num_inference_steps=STEPS)}


def tiny_dit(seed=0, **changes):
    settings = {
        "state": {"state": STATE},
        "vectors": {"goal": GOAL},
        "action_dim": ACTION,
        "horizon": TOKENS,
        "n_obs_steps": SEEN,
        "n_action_steps": EXECUTED,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "timestep_embed_dim": 8,
        "sampler": SAMPLERS["ddpm"],
    }
    policy = randomise(DiTPolicy(DiTConfig(**settings | changes)), seed)
    generator = torch.Generator().manual_seed(seed)
    for field in policy.normalizer.inputs.children():
        field.shift.copy_(torch.randn(field.shift.shape, generator=generator))
        field.scale.copy_(0.5 + torch.rand(field.scale.shape, generator=generator))
        field.base.fill_(-0.5)
    return policy.eval()


def tiny_observation(batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "state": torch.randn(batch, SEEN, STATE, generator=generator),
        "goal": torch.randn(batch, GOAL, generator=generator),
    }


# -- a live policy of LeRobot's shape


class Angles(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, t):
        rates = torch.tensor([10000.0 ** (-i / (self.size // 2 - 1)) for i in range(self.size // 2)])
        return torch.hstack([(t[:, None] * rates).sin(), (t[:, None] * rates).cos()])


class Turn(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.rates = [10000.0 ** (-2 * i / size) for i in range(size // 2)]

    def forward(self, q, k):
        place = torch.arange(q.shape[-2], dtype=torch.float64)[:, None]
        angle = (place * torch.tensor(self.rates, dtype=torch.float64)).to(q.dtype)

        def turn(x):  # as complex numbers: the first half real, the second imaginary
            half = x.shape[-1] // 2
            turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * torch.polar(
                torch.ones_like(angle), angle
            )
            return torch.cat([turned.real, turned.imag], dim=-1)

        return turn(q), turn(k)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rope = Turn(self.head_dim)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, dim=-1)
        )
        q, k = self.rope(q, k)
        shares = (q @ k.mT / math.sqrt(self.head_dim)).softmax(-1)
        return self.out_proj((shares @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, features, rope):
        super().__init__()
        if rope:
            self.attn = Attention(width, heads)
        else:
            self.multihead_attn = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(features, 6 * width))

    def forward(self, x, features):
        a, b, c, d, e, f = self.adaLN_modulation(features)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + b) + a
        x = x + c * (self.attn(h) if hasattr(self, "attn") else self.multihead_attn(h, h, h)[0])
        return x + f * self.mlp(self.norm2(x) * (1 + e) + d)


class Predictor(nn.Module):
    def __init__(self, condition, width=16, heads=2, layers=2, rope=True, positions=False, block=Block):
        super().__init__()
        self.time_mlp = nn.Sequential(Angles(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU())
        self.input_proj, self.output_proj = nn.Linear(ACTION, width), nn.Linear(width, ACTION)
        self.pos_embedding = nn.Parameter(torch.zeros(1, TOKENS, width)) if positions else None
        self.transformer_blocks = nn.ModuleList(block(width, heads, 8 + condition, rope) for _ in range(layers))

    def forward(self, x, timestep, conditioning_vec):
        features = torch.cat([self.time_mlp(timestep), conditioning_vec], dim=-1)
        x = self.input_proj(x)
        x = x if self.pos_embedding is None else x + self.pos_embedding[:, : x.shape[1]]
        for block in self.transformer_blocks:
            x = block(x, features)
        return self.output_proj(x)


class Diffusion(nn.Module):
    def __init__(self, scheduler):
        super().__init__()
        self.noise_scheduler, self.num_inference_steps = scheduler, STEPS

    def conditional_sample(self, model, batch_size, conditioning_vec):
        x = torch.randn(batch_size, TOKENS, ACTION)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            out = model(x, torch.full((batch_size,), int(t)), conditioning_vec=conditioning_vec)
            x = self.noise_scheduler.step(out, t, x).prev_sample
        return x


class Flow(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.config = SimpleNamespace(num_integration_steps=STEPS, integration_method=method)

    def conditional_sample(self, model, batch_size, conditioning_vec):
        x, grid = torch.randn(batch_size, TOKENS, ACTION), torch.linspace(0, 1, STEPS + 1)

        def speed(x, t):
            return model(x, torch.full((batch_size,), t), conditioning_vec=conditioning_vec)

        for t, after in zip(grid.tolist(), grid[1:].tolist(), strict=False):
            dt = after - t
            first = speed(x, t)
            if self.config.integration_method == "euler":
                x = x + dt * first
                continue
            second = speed(x + dt / 2 * first, t + dt / 2)
            third = speed(x + dt / 2 * second, t + dt / 2)
            x = x + dt / 6 * (first + 2 * second + 2 * third + speed(x + dt * third, t + dt))
        return x


class Encoder(nn.Module):
    """Something that makes one vector of an observation; nothing of it is known to blockcache."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 3)
        self.text_encoder = nn.Linear(3, 3)

    def encode(self, batch):
        said = self.text_encoder(self.words(batch["observation.language.tokens"]).mean(1))
        moments = [batch["observation.state"].tanh(), said[:, None].expand(-1, SEEN, -1)]
        return torch.cat(moments, dim=-1).flatten(1)


class LivePolicy(nn.Module):
    """Global noise, queues that `select_action` fills, normalised actions as a tensor."""

    def __init__(self, objective="ddpm", **changes):
        super().__init__()
        self.config = SimpleNamespace(
            n_obs_steps=SEEN,
            n_action_steps=EXECUTED,
            horizon=TOKENS,
            tokenizer_max_length=6,
            robot_state_feature=SimpleNamespace(shape=(STATE,)),
            image_features={},
        )
        self._queues = {"observation.state": []}
        self.observation_encoder = Encoder()
        self.noise_predictor = Predictor(SEEN * (STATE + 3), **changes)
        schedulers = {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}
        self.objective = (
            Diffusion(schedulers[objective](20, beta_schedule="squaredcos_cap_v2"))
            if objective in schedulers
            else Flow(objective)
        )
        randomise(self)
        self.eval()

    def _generate_actions(self, batch):
        sample = self.objective.conditional_sample(
            self.noise_predictor, len(batch["observation.state"]), self.observation_encoder.encode(batch)
        )
        return sample[:, SEEN - 1 : SEEN - 1 + EXECUTED]

    @torch.no_grad()
    def predict_action_chunk(self, batch):
        self.eval()
        state = torch.stack(self._queues["observation.state"], dim=1)
        return self._generate_actions({**batch, "observation.state": state})


def live_observation(batch):
    generator = torch.Generator().manual_seed(1)
    return {
        "observation.state": torch.randn(batch, SEEN, STATE, generator=generator),
        "observation.language.tokens": torch.randint(1, 100, (batch, 6), generator=generator),
        "observation.language.attention_mask": torch.ones(batch, 6, dtype=torch.int64),
    }

"""CLIP's two encoders under the names of `transformers`, for machines without it: parameters and results are the same.

`stand_in()` is a module to put in the place of `transformers`; `test_lerobot.py` compares it with the real one, if any.
"""

import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class Settings(SimpleNamespace):
    """Any settings by name."""


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_attention_heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(c.hidden_size, c.hidden_size))

    def forward(self, x, mask):
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.hidden_size, c.intermediate_size)
        self.fc2 = nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h * torch.sigmoid(1.702 * h))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)

    def forward(self, x, mask):
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings, self.encoder = nn.Module(), nn.Module()
        self.encoder.layers = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_hidden_layers))

    def through(self, x, mask=None):
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return x


class CLIPTextModel(Tower):
    def __init__(self, c):
        super().__init__(c)
        self.embeddings.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embeddings.position_embedding = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.final_layer_norm = nn.LayerNorm(c.hidden_size)

    def forward(self, input_ids, attention_mask):
        count = input_ids.shape[1]
        x = self.embeddings.token_embedding(input_ids) + self.embeddings.position_embedding.weight[:count]
        seen = torch.ones(count, count, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None]
        x = self.final_layer_norm(self.through(x, seen))
        return SimpleNamespace(pooler_output=x[torch.arange(len(x)), input_ids.argmax(-1)])


class CLIPVisionModel(Tower):
    def __init__(self, c):
        super().__init__(c)
        places = (c.image_size // c.patch_size) ** 2 + 1
        self.embeddings.class_embedding = nn.Parameter(torch.randn(c.hidden_size))
        self.embeddings.patch_embedding = nn.Conv2d(3, c.hidden_size, c.patch_size, c.patch_size, bias=False)
        self.embeddings.position_embedding = nn.Embedding(places, c.hidden_size)
        self.pre_layrnorm, self.post_layernorm = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)

    def forward(self, pixel_values):
        patches = self.embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        first = self.embeddings.class_embedding.expand(len(patches), 1, -1)
        x = torch.cat([first, patches], dim=1) + self.embeddings.position_embedding.weight
        return SimpleNamespace(last_hidden_state=self.through(self.pre_layrnorm(x)))


def stand_in():
    module = types.ModuleType("transformers")
    module.__spec__ = ModuleSpec("transformers", None)
    module.CLIPTextConfig = module.CLIPVisionConfig = Settings
    module.CLIPTextModel, module.CLIPVisionModel = CLIPTextModel, CLIPVisionModel
    return module

"""How RDT is trained: on clean actions, in the numbers that the task gives. Nothing is normalised.

What begins as zero, and which positions tokens have at first, is as in the public code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockcache.models.rdt.denoiser import RDT
from blockcache.models.rdt.policy import RDTConfig, RDTPolicy, public_sampler
from blockcache_lab.training.data import Demonstrations, TrainingError
from blockcache_lab.training.recipes.base import Recipe, Windows, window_steps

if TYPE_CHECKING:
    from blockcache.tasks import TaskSpec
    from blockcache_lab.training.config import TrainConfig

STEPS = 20  # of DPM-Solver++ when the policy acts, as in the paper


class RDTRecipe(Recipe):
    horizon = 16
    n_obs_steps = 1

    def check(self, settings: TrainConfig) -> None:
        super().check(settings)
        if settings.n_obs_steps != 1:
            raise TrainingError(f"an rdt policy sees one moment: n_obs_steps must be 1, got {settings.n_obs_steps}")

    def check_task(self, spec: TaskSpec) -> None:
        expected = _inputs(spec)
        if dict(spec.shapes) != expected:
            raise TrainingError(
                f"an rdt policy needs observations {_listed(expected)}; task {spec.name!r} shows {_listed(spec.shapes)}"
            )

    def config(self, settings: TrainConfig, training: dict[str, Any] | None) -> RDTConfig:
        language, image = settings.spec.shapes["lang_tokens"], settings.spec.shapes["img_tokens"]
        return RDTConfig(
            action_dim=settings.spec.action_dim,
            horizon=settings.horizon,
            n_action_steps=settings.n_action_steps,
            hidden_size=settings.width,
            depth=settings.layers,
            num_heads=settings.heads,
            lang_token_dim=language[1],
            img_token_dim=image[1],
            max_lang_cond_len=language[0],
            img_cond_len=image[0],
            norm="rms",
            sampler=public_sampler(STEPS),
            task=settings.task,
            training=training,
        )

    def begin(self, config: RDTConfig, start: str = "public") -> RDTPolicy:
        policy = RDTPolicy(config)
        model = policy.denoiser.model
        assert isinstance(model, RDT)
        _initialize(model)
        return policy

    def denoiser(self, policy: RDTPolicy) -> nn.Module:
        return policy.denoiser

    def fit(self, policy: RDTPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]) -> None:
        """Nothing to fit."""

    def windows(self, policy: RDTPolicy, demos: Demonstrations, episodes: list[tuple[int, int]]) -> Windows:
        """A window begins at every step of an episode, also at its last: a robot that has arrived sees those most often."""
        horizon, seen = policy.config.horizon, self.observed(demos)
        steps = window_steps(episodes, horizon, 1, horizon)
        for name in ("state_tokens", "action_mask"):
            seen[name] = seen[name][:, None]  # (N, 1, A): one token
        for name in ("action_mask", "lang_attn_mask"):
            if bool(((seen[name] != 0) & (seen[name] != 1)).any()):
                raise TrainingError(f"the demonstrations' {name!r} is a mask: expected 1 or 0 everywhere")
        if bool((seen["lang_attn_mask"] == 0).all(dim=1).any()):
            raise TrainingError(
                "the demonstrations' 'lang_attn_mask' hides all language tokens of a step: there is nothing to attend to"
            )
        counted = seen["action_mask"][steps[:, 0]]
        if not bool(counted.any()):
            raise TrainingError("the demonstrations' 'action_mask' hides every number of the actions")
        action = torch.from_numpy(demos.action)[steps] * counted  # others are 0, as in a generation's result
        return Windows(action, steps[:, 0], seen, None if bool(counted.all()) else counted)

    def predict(self, policy: RDTPolicy, noisy: Tensor, t: Tensor, conditions: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = policy.denoiser(noisy, t, *conditions)
        return out


def _inputs(spec: TaskSpec) -> dict[str, tuple[int, ...]]:
    """What a task must show at one moment; numbers of tokens and their widths are the task's own choice."""
    language, image = (_matrix(spec, name) for name in ("lang_tokens", "img_tokens"))
    row = (spec.action_dim,)
    return {
        "state_tokens": row,
        "lang_tokens": language,
        "lang_attn_mask": language[:1],
        "img_tokens": image,
        "action_mask": row,
        "ctrl_freqs": (1,),
    }


def _matrix(spec: TaskSpec, name: str) -> tuple[int, ...]:
    shape = tuple(spec.shapes.get(name, ()))
    return shape if len(shape) == 2 else (1, 1)


def _listed(shapes: Any) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def _initialize(model: RDT) -> None:
    """As the public code begins: no output at all, and places that tell tokens apart from the first step on."""
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
    for embedder in (model.t_embedder, model.freq_embedder):
        for part in embedder.mlp:
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.02)
    last = model.final_layer.ffn_final.fc2
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        for places in (model.x_pos_embed, model.lang_cond_pos_embed, model.img_cond_pos_embed):
            places.copy_(_waves(places.shape[1], places.shape[2]))


def _waves(tokens: int, width: int) -> Tensor:
    """Sines and cosines of a token's place, (tokens, width)."""
    half = (width + 1) // 2
    rates = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(half) / half)
    angles = torch.outer(torch.arange(tokens), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :width]

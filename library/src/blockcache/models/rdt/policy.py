"""The RDT policy: observation with encoded language and frames in, a chunk of actions out.

The encoders are not part of it: language and image tokens come in as a T5 and a SigLIP made them. Knows nothing of caching
or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockcache.errors import ObservationError
from blockcache.models.noise import draw_all
from blockcache.models.rdt.config import RDTConfig
from blockcache.models.rdt.denoiser import RDTDenoiser
from blockcache.models.sampling import denoise
from blockcache.observations import one_moment
from blockcache.observations.tensors import as_tensor, check_tree
from blockcache.samplers import SamplerConfig, table

LANGUAGE, MASK = "lang_tokens", "lang_attn_mask"


class RDTPolicy(nn.Module):
    """Several threads may call it at once.

    config     sizes and sampler
    denoiser   the transformer with its adaptors; without it one with random weights
    """

    reentrant = True  # each generation has a scheduler of its own

    def __init__(self, config: RDTConfig, denoiser: RDTDenoiser | None = None) -> None:
        super().__init__()
        self.config = config
        self.denoiser = RDTDenoiser.of(config) if denoiser is None else denoiser

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def n_obs_steps(self) -> int:
        return 1

    @property
    def n_action_steps(self) -> int:
        return self.config.n_action_steps

    @property
    def action_dim(self) -> int:
        return self.config.action_dim

    @property
    def sampler(self) -> SamplerConfig:
        return self.config.sampler

    def with_sampler(self, sampler: SamplerConfig) -> RDTPolicy:
        """The same weights (shared, not copied) behind another sampler."""
        return self._sharing(sampler=sampler)

    def with_lang_len(self, lang_len: int) -> RDTPolicy:
        """The same weights for observations of so many language tokens: fewer cost less."""
        return self._sharing(lang_len=lang_len)

    def _sharing(self, **changed: Any) -> RDTPolicy:
        other = RDTPolicy(replace(self.config, **changed), self.denoiser)
        vars(other)["training"] = vars(self)["training"]  # its own flag only: the shared modules keep theirs
        return other

    @torch.no_grad()
    def predict_action(
        self, obs: Mapping[str, Any], *, generator: torch.Generator | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One generation: a mapping -> action (B, n_action_steps, A), action_pred (B, horizon, A).

        state_tokens    (B, 1, A) the robot's state, in the numbers that actions have
        lang_tokens     (B, L, lang_token_dim) the instruction, L up to `lang_len`
        lang_attn_mask  (B, L) which of its tokens are there, true or false (1 or 0)
        img_tokens      (B, img_cond_len, img_token_dim) what the cameras see
        action_mask     (B, 1, A) which numbers the robot has, 1 or 0; the others of an action come out as 0
        ctrl_freqs      (B,) or (B, 1) actions per second

        Each may have an axis of one step behind the batch, as the observations of a rollout do.

        Noise comes from `generator` (torch's global one without it) or, all of it, from `noise`; see `draw_noise`.
        """
        return self._act(self.check(obs), generator, noise)

    def _act(
        self, observed: Mapping[str, Tensor], generator: torch.Generator | None, noise: Tensor | None
    ) -> dict[str, Tensor]:
        state, mask = observed["state_tokens"], observed["action_mask"]
        given = self.encode(observed)
        chunk = (len(state), self.config.horizon, self.config.action_dim)
        sample = denoise(
            self.config.sampler,
            lambda x, t: self.denoiser(x, t, *given),
            chunk,
            state,
            generator=generator,
            noise=noise,
        )
        actions = sample * mask
        return {"action": actions[:, : self.config.n_action_steps], "action_pred": actions}

    def encode(self, observed: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the denoiser is given throughout a generation, in its order: a checked observation, adapted."""
        mask = observed["action_mask"]
        return (
            self.denoiser.state_adaptor(torch.cat([observed["state_tokens"], mask], dim=-1)),
            self.denoiser.lang_adaptor(observed[LANGUAGE]),
            observed[MASK] > 0,
            self.denoiser.img_adaptor(observed["img_tokens"]),
            mask,
            observed["ctrl_freqs"].flatten(),
        )

    def check(self, obs: Any) -> dict[str, Tensor]:
        """The observation by its inputs' names, language filled up, or a sentence saying what is wrong with it."""
        like = self.denoiser.model.x_pos_embed
        assert isinstance(like, Tensor)
        found = check_tree(self._filled(obs) if isinstance(obs, Mapping) else obs, self.config.inputs, (), like)
        for name in (MASK, "action_mask"):
            if bool(((found[name] != 0) & (found[name] != 1)).any()):
                raise ObservationError(f"the observation {name!r} is a mask: expected true or false, 1 or 0")
        if bool((found[MASK] == 0).all(dim=1).any()):
            raise ObservationError(
                f"the observation {MASK!r} hides all language tokens of a sample: there is nothing to attend to; give the "
                "tokens of an empty instruction"
            )
        return found

    def _filled(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Language of fewer tokens than `lang_len` gets more, which the mask hides; frequencies become a column. A rollout
        gives every input an axis of the observation's steps, of which there is one: that is taken away."""
        shapes = self.config.inputs
        found = {
            name: one_moment(value, shapes[name]) if name in shapes and hasattr(value, "ndim") else value
            for name, value in obs.items()
            if value is not None
        }
        if {LANGUAGE, MASK} <= found.keys():
            tokens, mask = (as_tensor(found[name], f"the observation {name!r}") for name in (LANGUAGE, MASK))
            if tokens.ndim != 3 or mask.ndim != 2 or mask.shape != tokens.shape[:2]:
                raise ObservationError(
                    f"the observation {MASK!r} has shape {tuple(mask.shape)}, expected one value for each of the language "
                    f"tokens, which have shape {tuple(tokens.shape)}"
                )
            missing = self.config.lang_len - tokens.shape[1]
            if missing < 0:
                raise ObservationError(
                    f"the observation {LANGUAGE!r} has {tokens.shape[1]} tokens, expected {self.config.lang_len} at most "
                    "(lang_len); cut the instruction short, or take policy.with_lang_len(...)"
                )
            found[LANGUAGE], found[MASK] = F.pad(tokens, (0, 0, 0, missing)), F.pad(mask, (0, missing))
        if "ctrl_freqs" in found:
            rates = as_tensor(found["ctrl_freqs"], "the observation 'ctrl_freqs'")
            found["ctrl_freqs"] = rates[:, None] if rates.ndim == 1 else rates
        return found

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """All the noise of one generation, (1 + draws, B, horizon, A), exactly as `generator` would give it."""
        chunk = (batch, self.config.horizon, self.config.action_dim)
        return draw_all(table(self.config.sampler), chunk, next(self.denoiser.parameters()), generator)

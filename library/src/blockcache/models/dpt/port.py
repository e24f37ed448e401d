"""Which policies are DP-T, and the port of our own. Foreign ones are known by their shape (see `public`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from blockcache.files import PathLike
from blockcache.models.dpt.adapter import find
from blockcache.models.dpt.checkpoint import save_policy
from blockcache.models.dpt.encoder_parts import parts_of
from blockcache.models.dpt.image_port import KnownCameraPort, OtherCameraPort
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.dpt.program_inputs import known_parts
from blockcache.models.port import Port, is_altered
from blockcache.models.public import PublicPort, denoiser_of
from blockcache.models.weight_checks import check_denoiser
from blockcache.observations.tensors import as_tensor
from blockcache.samplers import SamplerConfig, table


def claim(policy: Any) -> Port | str:
    """The port of a DP-T policy, or what it lacks to be one."""
    denoiser = denoiser_of(policy)
    if isinstance(denoiser, str):
        return denoiser
    adapter = find(denoiser)
    if isinstance(adapter, str):
        return f"the denoiser {type(denoiser).__name__} {adapter}"
    if isinstance(policy, DiffusionTransformerPolicy):
        return OwnPort(policy, adapter)
    encoder = getattr(policy, "obs_encoder", None)
    if encoder is None:
        return PublicPort(policy, adapter)
    return (OtherCameraPort if known_parts(encoder) is None else KnownCameraPort)(policy, adapter)


class OwnPort(PublicPort):
    """Our own policy has the public interface too; beyond that, everything is in its config, and each generation has a
    scheduler of its own."""

    reentrant = True
    takes_noise = True
    policy: DiffusionTransformerPolicy

    @cached_property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(table(self.policy.sampler).timesteps.tolist())

    @cached_property
    def _sampler(self) -> tuple[SamplerConfig | None, str]:
        return self.policy.sampler, ""

    def with_sampler(self, sampler: SamplerConfig) -> OwnPort:
        return self._sharing_weights(self.policy.with_sampler(sampler))

    def save(self, directory: PathLike) -> bool:
        save_policy(self.policy, directory)
        return True

    @property
    def sample_dim(self) -> int:
        return self.policy.config.sample_dim

    @property
    def task(self) -> str | None:
        return self.policy.config.task

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        return self.policy.config.inputs

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.policy.config.cameras

    @cached_property
    def encoder_flops(self) -> int:
        encoder = self.policy.obs_encoder
        return 0 if encoder is None else self.n_obs_steps * parts_of(encoder).flops

    def prepare_observation(self, obs: Any) -> Any:
        if self.cameras:
            return (
                super().prepare_observation(obs) if isinstance(obs, Mapping) else obs
            )  # what is none, `check` says in one sentence
        return as_tensor(obs["obs"] if isinstance(obs, Mapping) and "obs" in obs else obs)

    def read_observation(self, obs: Any, like: Tensor) -> dict[str, Tensor]:
        return self.policy.check(obs)

    def explain(self, error: Exception, obs: Any) -> None:
        return None  # it explains itself

    @property
    def trusted(self) -> bool:
        methods = [getattr(type(self.policy), name) for name in ("predict_action", "check", "encode", "_sample")]
        methods.append(type(self.adapter.denoiser).forward)
        encoder = self.policy.obs_encoder or nn.Identity()
        methods += [type(part).forward for part in encoder.modules() if not type(part).__module__.startswith("torch.")]
        ours = all(str(getattr(method, "__module__", "")).startswith("blockcache.") for method in methods)
        return ours and not is_altered(self.adapter.denoiser) and not is_altered(encoder)

    def check_weights(self) -> None:
        super().check_weights()
        if self.policy.obs_encoder is not None:
            check_denoiser(self.policy.obs_encoder)

    def settings(self) -> list[Any]:
        return [self.policy.config]

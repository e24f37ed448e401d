"""An opened export with a torch face: tensors in and out, noise drawn by torch. All else is `deploy`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockcache.errors import EngineError
from blockcache.files import PathLike
from blockcache.models.noise import draw
from blockcache.observations.tensors import Observation, as_tensor
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.fingerprint import Fingerprint

_SINGLE = torch.empty(0, dtype=torch.float32)


class OnnxRunner:
    """`runner.predict_action(obs)` -> actions in robot units. Several threads may call it at once.

    obs (B, n_obs, obs) in robot units, noise (1 + draws, B, horizon, D): `sizes` gives the sizes, B is "batch".
    """

    def __init__(self, path: PathLike, threads: int | None = None, data: bytes | None = None) -> None:
        """Open an export. The arguments of `deploy.ExportedPolicy`."""
        # frames are looked at in every call: who times calls, or compares engines, asks about the same ones
        self._export = ExportedPolicy(path, threads, data, remember=False)
        self.path, self.threads, self.sizes = self._export.path, self._export.threads, self._export.sizes
        self.header, self.fingerprint = self._export.header, self._export.fingerprint

    def __call__(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """One generation of float32 tensors that were checked already."""
        observed = {name: value.detach().numpy() for name, value in obs.items()}
        return _to_torch(self._export.run_checked(observed, noise.detach().numpy()))

    def predict_action(
        self, obs: Observation, *, generator: torch.Generator | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One generation, as the policy that was exported gives it for the same `generator` or `noise`."""
        observed = self._export.check_observation(_to_numpy(obs))
        if noise is None:
            noise = self.draw_noise(len(next(iter(observed.values()))), generator)
        return _to_torch(self._export.run(observed, _to_numpy(noise, "noise")))

    def look(self, obs: Observation) -> Any:
        """The encoder alone, of an export with cameras: (n_obs_steps, B, features)."""
        return self._export.features(self._export.check_observation(_to_numpy(obs)))

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """(1 + draws, B, horizon, D), tensor by tensor as the policy draws them; torch's global generator without one."""
        count, _, *chunk = self.sizes["noise"]
        return torch.stack([draw((batch, *chunk), _SINGLE, generator) for _ in range(count)])

    def check(self, actual: Fingerprint, executed: tuple[int, int]) -> None:
        """Refuse to stand for another policy than the file was made from."""
        differences = [*self.fingerprint.differences(actual)]
        start, stop = self._export.executed
        if (start, stop) != executed:
            differences.append(f"executed actions {executed[0]} to {executed[1] - 1} instead of {start} to {stop - 1}")
        if differences:
            raise EngineError(
                f"{self.path} was made for another policy, this one has {'; '.join(differences)}; export it again with "
                "'blockcache export'"
            )


def _to_torch(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _to_numpy(value: Any, what: str = "the observation") -> Any:
    """Tensors of any kind as float32 arrays on the CPU; what is none stays as it is."""
    if isinstance(value, Mapping):
        return {name: _to_numpy(item, what) for name, item in value.items()}
    return as_tensor(value, what).detach().to(_SINGLE).numpy() if isinstance(value, Tensor) else value

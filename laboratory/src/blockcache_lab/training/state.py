"""The state file of a training run: safetensors with a JSON header. Knows not what the tensors mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from blockcache.errors import FileError, short
from blockcache.files import Count, Format, Positive, TensorInfo
from blockcache_lab.training.data import TrainingError


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss` is a running mean; both losses are None until there is one."""

    step: Count = 0
    seconds: Positive = 0.0
    loss: float | None = None
    validation_loss: float | None = None


FORMAT = Format(
    "blockcache-training-state",
    "training state",
    {"run": dict, "progress": Progress},
    optional=("made_by",),
    again="remove it to start anew",
    entry="header",
)


def write_state(path: Path, identity: Mapping[str, Any], tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Write all of it at once; a kill in the middle leaves the state before."""
    FORMAT.save_tensors(path, {"run": dict(identity), "progress": asdict(progress)}, tensors, safetensors.torch.save)


def read_state(path: Path, identity: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
    """Copy a saved state into `tensors`; the state of another run is refused."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def check(infos: Mapping[str, TensorInfo]) -> None:
        if {name: info.shape for name, info in infos.items()} != shapes:
            raise FileError(f"the tensors in the training state {path} are not this run's; remove it to start anew")

    content, saved = FORMAT.load_tensors(path, safetensors.torch.load, check)
    progress: Progress = content["progress"]
    before = content["run"]
    other = [
        f"{name} {short(before.get(name))} (now {identity.get(name)!r})"
        for name in {**before, **identity}  # a setting that only one of them has tells runs apart too
        if before.get(name) != identity.get(name)
    ]
    if other:
        raise TrainingError(
            f"the training state {path} is of another run: {', '.join(other)}; "
            "use its settings, give another output directory, or start anew"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    return progress

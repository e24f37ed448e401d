"""The state file of a training run: safetensors with a JSON header. Knows not what the tensors mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockcache.errors import FileError
from blockcache.files import expect_format, parse_json, read_bytes, write_bytes
from blockcache.training.config import TrainingError

_FORMAT, _VERSION, _WHAT = "blockcache-training-state", 1, "training state"


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss` is a running mean; both losses are None until there is one."""

    step: int = 0
    seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None


def write_state(path: Path, identity: Mapping[str, Any], tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Write all of it at once; a kill in the middle leaves the state before."""
    header = {"format": _FORMAT, "version": _VERSION, "run": dict(identity), "progress": asdict(progress)}
    data = safetensors.torch.save(dict(tensors), metadata={"header": json.dumps(header)})
    write_bytes(path, data)


def read_state(path: Path, identity: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
    """Copy a saved state into `tensors`; the state of another run is refused."""
    read_bytes(path, _WHAT)  # for its errors: a file that is missing, empty or unreadable
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise FileError(f"the {_WHAT} {path} cannot be read ({error}); remove it to start anew") from error
    header = parse_json(metadata.get("header", "{}").encode(), _WHAT, path)
    expect_format(header, _FORMAT, _VERSION, _WHAT, path)
    other = [
        f"{name} {header['run'].get(name)!r} (now {value!r})"
        for name, value in identity.items()
        if header["run"].get(name) != value
    ]
    if other:
        raise TrainingError(
            f"the {_WHAT} {path} is of another run: {', '.join(other)}; "
            "use its settings, give another output directory, or start anew"
        )
    if {name: tensor.shape for name, tensor in saved.items()} != {n: t.shape for n, t in tensors.items()}:
        raise FileError(f"the tensors in the {_WHAT} {path} are not this run's; remove it to start anew")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    return Progress(**header["progress"])

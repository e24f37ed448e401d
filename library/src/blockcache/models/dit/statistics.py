"""The statistics in the files of LeRobot's processors, as a normaliser's tensors. Knows no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from blockcache.errors import FileError, PolicyError, short
from blockcache.files import Fields, Format, Name, dict_of, list_of, read, read_tensors
from blockcache.models.normalizer import field_name
from blockcache.models.weights import check_weight

ACTION = "action"
_FEATURE = Fields({"type": Name}, others=True)
_SETTINGS = Fields(
    {},
    {
        "eps": float,
        "features": dict_of(_FEATURE),
        "norm_map": dict[str, str],
        "normalize_observation_keys": list[str] | None,
    },
    others=True,
)
_STEP = Fields({}, {"registry_name": Name, "state_file": Name | None}, others=True)
PROCESSOR = Format(
    "lerobot.processor",
    "processor of LeRobot's",
    {"name": Name, "steps": list_of(_STEP)},
    optional=("format", "version", "made_by", "name"),
    others=True,
    again="save the policy again with LeRobot",
)
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
"""What -1 and 1 stand for."""
_KNOWN = ("IDENTITY", "MEAN_STD", *_RANGES)


def statistics_of(directory: Path, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors of a `Normalizer`, by name, for inputs (and "action") of these sizes.

    What the processors do not normalise, or hold no statistics of, stays as it is.
    """
    steps = {
        name: _step(directory / f"policy_{kind}processor.json", f"{step}normalizer_processor")
        for name in sizes
        for kind, step in [("post", "un") if name == ACTION else ("pre", "")]
    }
    found: dict[str, Tensor] = {}
    for name, size in sizes.items():
        settings, tensors = steps[name]
        shift, scale, base = _field(name, size, settings, tensors)
        place = f"normalizer.inputs.{field_name(name)}"
        found |= {f"{place}.shift": shift, f"{place}.scale": scale, f"{place}.base": base}
    return found


def _step(path: Path, wanted: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and statistics of the step that normalises."""
    with PROCESSOR.reading(path):
        steps = [step for step in PROCESSOR.load(path)["steps"] if step.get("registry_name") == wanted]
        if len(steps) != 1:
            raise FileError(f"the processor {path} has {len(steps)} steps of the kind {wanted}, expected one")
        settings: dict[str, Any] = read(_SETTINGS, steps[0].get("config", {}), "config")
    state = steps[0].get("state_file")
    if state is None:
        return settings, {}
    if Path(state).name != state:
        raise FileError(f"the processor {path} names {short(state)}, which is not a file beside it")
    _, tensors = read_tensors(path.parent / state, "statistics", PROCESSOR.again, safetensors.torch.load)
    return settings, tensors


def _field(
    name: str, size: int, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and base of an input, as LeRobot's own processor computes: a range of nothing has its epsilon."""
    identity = torch.zeros(size), torch.ones(size), torch.zeros(size)
    features, chosen = settings.get("features", {}), settings.get("normalize_observation_keys")
    if name not in features or (chosen is not None and name != ACTION and name not in chosen):
        return identity
    mode = settings.get("norm_map", {}).get(features[name]["type"], "IDENTITY")
    if mode not in _KNOWN:
        raise PolicyError(f"LeRobot's processor normalises {name!r} by {short(mode)}, known are {', '.join(_KNOWN)}")
    if mode == "IDENTITY" or not any(key.startswith(f"{name}.") for key in tensors):
        return identity
    eps = float(settings.get("eps", 1e-8))
    low, high = (_statistic(f"{name}.{key}", size, tensors) for key in _RANGES.get(mode, ("mean", "std")))
    if mode == "MEAN_STD":
        return low.float(), (1.0 / (high + eps)).float(), torch.zeros(size)
    span = torch.where(high == low, torch.full_like(high, eps), high - low)
    return low.float(), (2.0 / span).float(), torch.full((size,), -1.0)


def _statistic(name: str, size: int, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise PolicyError(f"LeRobot's processor needs the statistic {name}, which its file does not hold")
    check_weight(name, tensors[name])
    if tensors[name].numel() != size:
        raise PolicyError(f"the statistic {name} has {tensors[name].numel()} numbers, expected {size}")
    return tensors[name].flatten().double()

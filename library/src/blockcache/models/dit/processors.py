"""LeRobot's processors, in whose files the statistics are, as a normaliser's tensors. Knows no network.

A policy directory says what is done to observations and actions around the policy, step by step. What normalises becomes
part of the policy; a step that is not known to leave everything else as it is, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from blockcache.errors import FileError, PolicyError, short, shortened
from blockcache.files import Fields, Format, Name, dict_of, list_of, read, read_tensors
from blockcache.models.modules import check_weight
from blockcache.models.normalizer import field_name

ACTION = "action"
PROCESSORS = BEFORE, BEHIND = "policy_preprocessor.json", "policy_postprocessor.json"
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
_STEP = Fields(
    {},
    {
        "registry_name": Name,
        "class": Name,
        "state_file": Name | None,
        "artifacts": dict[str, Name] | None,
        "config": dict,
    },
    others=True,
)
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
_HARMLESS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "to_batch_processor": lambda config: True,
    "tokenizer_processor": lambda config: True,  # token ids are inputs here
    "device_processor": lambda config: config.get("float_dtype") in (None, "float32", "float"),
    "rename_observations_processor": lambda config: not config.get("rename_map"),
    "relative_actions_processor": lambda config: config.get("enabled", False) is False,
    "absolute_actions_processor": lambda config: config.get("enabled", False) is False,
}
"""Steps besides those that normalise, and whether one with these settings leaves all numbers and names as they are."""


def statistics_of(directory: Path, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors of a `ShiftedNormalizer`, by name, for inputs (and "action") of these sizes.

    What the processors do not normalise stays as it is.
    """
    before = _normalising_step(directory / BEFORE, "normalizer_processor")
    behind = _normalising_step(directory / BEHIND, "unnormalizer_processor")
    found: dict[str, Tensor] = {}
    for name, size in sizes.items():
        parts = _field(name, size, *(behind if name == ACTION else before))
        place = f"normalizer.inputs.{field_name(name)}"
        found |= {f"{place}.{part}": value for part, value in zip(("shift", "scale", "base"), parts, strict=True)}
    return found


def _normalising_step(path: Path, wanted: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and statistics of the one step that does something."""
    with PROCESSOR.reading(path):
        steps = PROCESSOR.load(path)["steps"]
        own = [step for step in steps if step.get("registry_name") == wanted]
        if len(own) != 1:
            raise FileError(f"the processor {path} has {len(own)} steps of the kind {wanted}, expected one")
        for step in steps:
            if step is not own[0]:
                _check_harmless(step)
        settings: dict[str, Any] = read(_SETTINGS, own[0].get("config", {}), "config")
    state = own[0].get("state_file")
    if state is None:
        return settings, {}
    if Path(state).name != state:
        raise FileError(f"the processor {path} names {short(state)}, which is not a file beside it")
    _, tensors = read_tensors(path.parent / state, "statistics", PROCESSOR.again, safetensors.torch.load)
    return settings, tensors


def _check_harmless(step: Mapping[str, Any]) -> None:
    name, config = step.get("registry_name", step.get("class", "a step without a name")), step.get("config", {})
    if name not in _HARMLESS or not _HARMLESS[name](config):
        raise PolicyError(
            f"the step {shortened(name, 80)} with the settings {shortened(str(config), 100)} may change what the policy "
            "sees or does, and is not known here; open the policy with LeRobot and accelerate the live object, whose "
            "processors stay around it"
        )


def _field(
    name: str, size: int, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and base of an input, as LeRobot's own processor computes: a range of nothing has its epsilon."""
    identity = torch.zeros(size), torch.ones(size), torch.zeros(size)
    features, chosen = settings.get("features", {}), settings.get("normalize_observation_keys")
    if name != ACTION and (name not in features or (chosen is not None and name not in chosen)):
        return identity
    kind = "ACTION" if name == ACTION else features[name]["type"]
    mode = settings.get("norm_map", {}).get(kind, "IDENTITY")
    if mode not in _KNOWN:
        raise PolicyError(f"LeRobot's processor normalises {name!r} by {short(mode)}, known are {', '.join(_KNOWN)}")
    if mode == "IDENTITY":
        return identity
    if not any(key.startswith(f"{name}.") for key in tensors):
        if name != ACTION:
            return identity  # as LeRobot has it
        raise PolicyError(
            f"LeRobot's postprocessor undoes {mode} for actions and holds no statistics of them, so that they would come "
            "out between -1 and 1 instead of in robot units; save the policy with the statistics of its dataset"
        )
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

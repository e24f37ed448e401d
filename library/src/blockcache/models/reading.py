"""A policy's directory as any family reads it: config and tensors, never of two different saves. Knows no family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from blockcache.files import PathLike, TensorInfo, no_writer, read_tensors
from blockcache.models.policy_files import CONFIG, FORMAT, WEIGHTS, config_file, policy_directory, shared_file

C = TypeVar("C")


def read_policy(
    source: PathLike, config_of: Callable[[Mapping[str, Any]], C], check: Callable[[C, int, int], None]
) -> tuple[C, dict[str, Tensor], Path]:
    """A policy's config, its tensors and the file that these came from.

    source     a shipped policy by name, or a directory
    config_of  makes the family's config of what `config.json` says
    check      is given the config, the number of tensors and of all their numbers before these are read, and raises if they
               cannot be that config's
    """
    directory = policy_directory(source)
    place = shared_file(directory, WEIGHTS)
    with no_writer(directory):
        with FORMAT.reading(directory / CONFIG):
            config = config_of(FORMAT.load(config_file(directory)))

        def check_infos(infos: Mapping[str, TensorInfo]) -> None:
            check(config, len(infos), sum(math.prod(info.shape) for info in infos.values()))

        again = "save the policy again"
        _, tensors = read_tensors(place, "policy weights", again, safetensors.torch.load, check_infos)
    return config, tensors, place

"""LeRobot's interface as this package needs it, or one sentence that says which version has another. Knows no policy."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blockcache_runtime.errors import BlockcacheError, in_one_line

_ADVICE = "it was tested with 0.4.4 and 0.6.1"
_PLACES = {
    "PreTrainedConfig": "lerobot.configs.policies",
    "PreTrainedPolicy": "lerobot.policies.pretrained",
    "make_pre_post_processors": "lerobot.policies.factory",
    "populate_queues": "lerobot.policies.utils",
}
_ABSTRACT = {
    "PreTrainedConfig": {
        "observation_delta_indices", "action_delta_indices", "reward_delta_indices", "get_optimizer_preset",
        "get_scheduler_preset", "validate_features",
    },
    "PreTrainedPolicy": {"get_optim_params", "reset", "forward", "predict_action_chunk", "select_action"},
}  # fmt: skip
"""What LeRobot asks of a config and of a policy; of more than this nobody here would know what it is for."""


class LeRobotError(BlockcacheError, ImportError):
    """LeRobot is not installed, or another one than this package knows."""


def part(name: str) -> Any:
    """A class or function of LeRobot's.

    Args:
        name: One of those that are known here.
    """
    try:
        found = getattr(importlib.import_module(_PLACES[name]), name)
    except (ImportError, AttributeError) as error:
        if _installed() is None:
            raise LeRobotError(
                f"lerobot_policy_blockcache runs policies in LeRobot's commands, and LeRobot is not installed; {_ADVICE}"
            ) from error
        raise LeRobotError(
            f"{_other()}: there is no {_PLACES[name]}.{name} ({in_one_line(error)}); {_ADVICE}"
        ) from error
    more: set[str] = set(getattr(found, "__abstractmethods__", ())) - _ABSTRACT.get(name, set())
    if more:
        asked = ", ".join(sorted(more))
        raise LeRobotError(f"{_other()}: its {name} asks for {asked}, which this package does not have; {_ADVICE}")
    return found


def _other() -> str:
    return f"LeRobot {_installed()} has another interface than lerobot_policy_blockcache knows"


def _installed() -> str | None:
    try:
        return version("lerobot")
    except PackageNotFoundError:
        return None

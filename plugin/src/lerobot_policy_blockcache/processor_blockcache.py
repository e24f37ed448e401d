"""Pre- and post-processors of the policy type `blockcache`: those that lie in its directory."""

from __future__ import annotations

from typing import Any

from blockcache_runtime.errors import FileError
from lerobot_policy_blockcache.configuration_blockcache import BlockcacheConfig
from lerobot_policy_blockcache.interface import part


def make_blockcache_pre_post_processors(config: BlockcacheConfig, **_: Any) -> tuple[Any, Any]:
    """The processors of the policy's directory, with the steps of the policy that it was made from.

    Args:
        config: Names the directory.
    """
    if config.pretrained_path is None:
        raise FileError(
            "the processors of a policy of type blockcache lie in its directory, and none is named; use --policy.path"
        )
    return part("make_pre_post_processors")(config, pretrained_path=str(config.pretrained_path))

"""LeRobot's commands run what `blockcache export --lerobot` wrote: `--policy.path=DIR`.

LeRobot imports this package when it starts, which registers the policy type `blockcache`. Without LeRobot the package can be
imported all the same, and registers nothing.
"""

from importlib.util import find_spec

from lerobot_policy_blockcache._version import __version__

if find_spec("lerobot") is not None:
    from lerobot_policy_blockcache.configuration_blockcache import BlockcacheConfig as BlockcacheConfig

__all__ = ["__version__"]

"""The config of the policy type `blockcache`, as LeRobot reads it from `config.json`."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from blockcache_runtime.errors import EngineError
from lerobot_policy_blockcache.interface import part

PreTrainedConfig = part("PreTrainedConfig")


@PreTrainedConfig.register_subclass("blockcache")
@dataclass
class BlockcacheConfig(PreTrainedConfig):  # type: ignore[misc, valid-type]
    """A policy that `blockcache export --lerobot` made of one of LeRobot's.

    Args:
        horizon: Actions of a whole chunk.
        n_action_steps: Those of them that are executed.
        threads: Cores of one generation; without it one and all of them are tried, and the faster is taken.
        execution_horizon: In real-time chunking, up to which action the old chunk pulls the new one, where LeRobot's loop
            does not say so (`rtc_config`).
        made_from: What the directory was made from, for people to read.
    """

    n_obs_steps: int = 2
    horizon: int = 32
    n_action_steps: int = 24
    threads: int | None = None
    execution_horizon: int = 10
    made_from: dict[str, str] = field(default_factory=dict)

    def validate_features(self) -> None:
        """The file itself says what it takes."""

    @property
    def observation_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> Any:
        refuse_training()

    def get_scheduler_preset(self) -> Any:
        refuse_training()


def refuse_training() -> NoReturn:
    raise EngineError(
        "a policy of type blockcache is not trained; train the policy that it was made from, and write the directory again "
        "with 'blockcache export ... --lerobot'"
    )

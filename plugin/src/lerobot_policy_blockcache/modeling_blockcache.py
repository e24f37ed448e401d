"""The policy type `blockcache` in LeRobot's shape: history, queue of actions, real-time chunking; a `Runner` inside."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockcache_runtime.errors import FileError
from lerobot_policy_blockcache.configuration_blockcache import BlockcacheConfig, refuse_training
from lerobot_policy_blockcache.interface import part
from lerobot_policy_blockcache.runner import LANGUAGE, Runner, left_over

PreTrainedPolicy, populate_queues = part("PreTrainedPolicy"), part("populate_queues")
ACTION = "action"


class BlockcachePolicy(PreTrainedPolicy):  # type: ignore[misc, valid-type]
    """Runs on the CPU, by ONNX Runtime; tensors may come from any device, and actions go back there."""

    config_class = BlockcacheConfig
    name = "blockcache"

    def __init__(self, config: BlockcacheConfig, directory: Path | None = None, **_: Any) -> None:
        """Open a directory.

        Args:
            config: As LeRobot read it.
            directory: Where the config and the rest lie; without it `config.pretrained_path`.
        """
        super().__init__(config)
        place = directory or config.pretrained_path
        if place is None:
            raise FileError(
                "a policy of type blockcache comes from a directory that 'blockcache export ... --lerobot' wrote; name it "
                "with --policy.path"
            )
        self.directory = Path(place)
        self.runner = Runner(self.directory, config.threads)
        self.runner.check_config(config)
        self.words = self.runner.words  # a module of this one, so that it is moved with it
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: BlockcacheConfig | None = None, **settings: Any
    ) -> BlockcachePolicy:
        """The policy of a directory, or of a repository on the hub.

        Args:
            pretrained_name_or_path: The directory, or the repository's name.
            config: Where LeRobot has read it already.
            settings: LeRobot's own, of which `revision`, `token`, `cache_dir` and `local_files_only` say what is downloaded.
        """
        place = Path(pretrained_name_or_path)
        if not place.is_dir():
            from huggingface_hub import snapshot_download

            names = ("revision", "token", "cache_dir", "local_files_only")
            wanted = {name: settings[name] for name in names if name in settings}
            place = Path(snapshot_download(str(pretrained_name_or_path), **wanted))
        policy = cls(config or part("PreTrainedConfig").from_pretrained(place), place)
        policy.to(policy.config.device)
        policy.eval()
        return policy

    def reset(self) -> None:
        """Another episode begins."""
        names = [*self.runner.inputs, *LANGUAGE]
        lengths = {name: 1 if name in LANGUAGE else self.config.n_obs_steps for name in names}
        self._queues = {name: deque[Tensor](maxlen=length) for name, length in lengths.items()}
        self._queues[ACTION] = deque(maxlen=self.config.n_action_steps)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], noise: Tensor | None = None, **_: Any) -> Tensor:
        """The next action, (B, A); a chunk is made when the last one is used up.

        Args:
            batch: One moment of every input, (B, ...), as the preprocessor leaves it.
            noise: The noise that a chunk begins with, (B, horizon, A).
        """
        seen = {name: value for name, value in batch.items() if name != ACTION}
        populate_queues(self._queues, seen)
        actions = self._queues[ACTION]
        if not actions:
            history = {name: torch.stack([*self._queues[name]], dim=1) for name in self.runner.inputs if name in seen}
            chunk = self._chunk({**seen, **history}, noise)
            actions.extend(chunk[:, : self.config.n_action_steps].transpose(0, 1))
        return actions.popleft()

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: dict[str, Tensor],
        noise: Tensor | None = None,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        execution_horizon: int | None = None,
        **_: Any,
    ) -> Tensor:
        """All actions of a chunk that the file executes, (B, n, A). The queues of `select_action` are left alone.

        Args:
            batch: One moment of every input, (B, ...), which stands for all moments that the policy looks at; or all of
                them, (B, moments, ...).
            noise: The noise to begin with, (B, horizon, A).
            inference_delay: How many actions of the old chunk will have been executed when this one arrives.
            prev_chunk_left_over: The old chunk from the action that is due, (n, A) or (B, n, A): the new one goes on.
            execution_horizon: Up to which action the old chunk pulls the new one.
        """
        moments = {}
        for name, shape in self.runner.inputs.items():
            if name in batch and batch[name].ndim == len(shape):  # no moments in it
                moments[name] = batch[name].unsqueeze(1).repeat_interleave(shape[0], dim=1)
        previous = None
        rtc = getattr(self.config, "rtc_config", None)
        if prev_chunk_left_over is not None and getattr(rtc, "enabled", True):
            told = getattr(rtc, "execution_horizon", self.config.execution_horizon)
            overlap = told if execution_horizon is None else execution_horizon
            previous = left_over(prev_chunk_left_over, inference_delay or 0, overlap)
        return self._chunk({**batch, **moments}, noise, previous)

    def _chunk(self, batch: dict[str, Any], noise: Tensor | None, previous: Any = None) -> Tensor:
        found = self.runner.chunk(batch, noise, previous)  # which refuses a batch without inputs
        return found.to(batch[next(iter(self.runner.inputs))].device)

    def supports_rtc(self) -> bool:
        """Real-time chunking is part of the file."""
        return True

    def get_optim_params(self) -> Any:
        refuse_training()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        refuse_training()

    def _save_pretrained(self, save_directory: Path, **_: Any) -> None:
        shutil.copytree(self.directory, save_directory, dirs_exist_ok=True)
        self.config._save_pretrained(Path(save_directory))

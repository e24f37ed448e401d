"""An export with what lies around it in its directory, asked with LeRobot's observations: torch tensors, words as token ids.

Knows nothing of LeRobot's classes, so that it runs without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockcache_runtime import open_export
from blockcache_runtime.chunks import Previous
from blockcache_runtime.errors import FileError, ObservationError, shortened
from blockcache_runtime.files import read_bytes

FILE, WORDS = "policy.onnx", "model.safetensors"
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
LANGUAGE = TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
FEATURE = "observation.language.feature"
AGAIN = "write the directory again with 'blockcache export ... --lerobot'"
REMEMBERED = 1000
"""Instructions whose features are kept."""


class Runner:
    """Observations and actions in robot units: what the processors of the directory leave as they are."""

    def __init__(self, directory: Path, threads: int | None = None) -> None:
        """Open a directory.

        Args:
            directory: That `blockcache export --lerobot` wrote.
            threads: Of one generation; without it one and all cores are tried, and the faster is taken.
        """
        check_processors(directory)
        self.policy = policy = open_export(directory / FILE, threads)
        self.words: nn.Module | None = None
        if FEATURE in policy.inputs:
            from blockcache.models.dit.plugin import load_words

            self.words = load_words(directory / WORDS)
        self._said: dict[bytes, Tensor] = {}

    def check_config(self, config: Any) -> None:
        """Refuse a config that asks for something else than the file gives: options such as `--policy.horizon` change it.

        Args:
            config: With `n_obs_steps`, `horizon` and `n_action_steps`.
        """
        for name in ("n_obs_steps", "horizon", "n_action_steps"):
            asked, own = getattr(config, name), getattr(self.policy, name)
            least = 1 if name == "n_action_steps" else own  # fewer actions of a chunk may be executed
            if not least <= asked <= own:
                expected = own if least == own else f"{least} to {own}"
                raise FileError(
                    f"the config says {name}={asked}, and {self.policy.path} takes {expected}; leave out --policy.{name}, "
                    "or export a policy that has it"
                )

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """What has moments in an observation: shapes by name, without the batch."""
        return {name: shape for name, shape in self.policy.inputs.items() if name != FEATURE}

    def chunk(self, batch: Mapping[str, Any], noise: Tensor | None = None, previous: Previous | None = None) -> Tensor:
        """The executed actions of one generation, (B, n_action_steps, A), on the CPU.

        Noise comes from torch's global generator in the order in which LeRobot's own policy draws it.

        Args:
            batch: State and frames (B, moments, ...), token ids and mask (B, tokens).
            noise: The noise to begin with, (B, horizon, A).
            previous: What is left of the chunk before.
        """
        given: dict[str, Any] = {name: _array(batch, name) for name in self.inputs}
        if self.words is not None:
            given[FEATURE] = self._feature(batch).numpy()
        else:
            self._check_words(batch)
        observed = self.policy.check_observation(given)
        count, _, horizon, size = self.policy.sizes["noise"]
        chunk = (len(next(iter(observed.values()))), horizon, size)
        drawn = [] if noise is None else [noise.detach().cpu().float()]
        drawn += [torch.randn(chunk) for _ in range(count - len(drawn))]
        if drawn[0].shape != chunk:
            raise ObservationError(f"noise has shape {tuple(drawn[0].shape)}, expected {chunk}")
        found = self.policy.run(observed, torch.stack(drawn).numpy(), previous)
        return torch.from_numpy(np.array(found["action"]))

    def _feature(self, batch: Mapping[str, Any]) -> Tensor:
        """What the text encoder makes of the words, (B, features): once for each instruction."""
        assert self.words is not None
        tokens, mask = (torch.from_numpy(_array(batch, name)) for name in LANGUAGE)
        rows = torch.cat([tokens.float(), mask.float()], dim=-1)
        keys = [row.numpy().tobytes() for row in rows]
        if len(self._said) > REMEMBERED:
            self._said.clear()
        for place, key in enumerate(keys):
            if key not in self._said:
                like = next(self.words.parameters())
                one = slice(place, place + 1)
                with torch.no_grad():
                    said = self.words.say(tokens[one].to(like), mask[one].to(like))  # type: ignore[operator]
                self._said[key] = said[0].cpu()
        return torch.stack([self._said[key] for key in keys])

    def _check_words(self, batch: Mapping[str, Any]) -> None:
        """A file that has one task in it is not asked for another one."""
        fixed = self.policy.header.get("fixed", {})
        for name in LANGUAGE:
            if name in fixed and name in batch and (_array(batch, name) != np.asarray(fixed[name])).any():
                raise ObservationError(
                    "the policy is told another task than the one that was made part of its file (--fixed); export it "
                    "without --fixed for any task"
                )


def check_processors(directory: Path) -> None:
    """Refuse processors that normalise: the file does that by itself, and twice is wrong."""
    for name in PROCESSORS:
        path = directory / name
        try:
            steps = json.loads(read_bytes(path, "processor"))["steps"]
            maps = [step.get("config", {}).get("norm_map", {}) for step in steps]
            modes = {str(mode).removeprefix("NormalizationMode.") for one in maps for mode in one.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is no processor of LeRobot's; {AGAIN}") from error
        if modes - {"IDENTITY"}:
            raise FileError(
                f"{path} normalises ({shortened(', '.join(sorted(modes)), 80)}), and so does the policy's file: actions "
                f"would be wrong; {AGAIN}"
            )


def left_over(actions: Tensor, delay: int, overlap: int) -> Previous | None:
    """What LeRobot's loop has left of the chunk before, (n, A) or (B, n, A); None where nothing is left.

    Newer loops fill up with rows of zeros what is shorter than they want it, which are no actions: they are left out.

    Args:
        actions: The first is due when the new chunk is asked for.
        delay: How many of them will have been executed when it arrives.
        overlap: Up to which of them the old chunk pulls the new one.
    """
    known = actions.detach().cpu().float()
    rows = (known != 0).any(dim=-1)  # (n,), or (B, n)
    real = torch.nonzero(rows if rows.ndim == 1 else rows.any(dim=0))
    count = int(real.max()) + 1 if len(real) else 0
    return Previous(known[..., :count, :].numpy(), delay, overlap) if count else None


def _array(batch: Mapping[str, Any], name: str) -> Any:
    if name not in batch:
        raise ObservationError(
            f"the observation has no {name!r}, got {shortened(', '.join(map(str, batch)), 200)}; the processors of the "
            "policy's own directory make it"
        )
    value = batch[name]
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)

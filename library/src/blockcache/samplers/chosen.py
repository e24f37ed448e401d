"""A sampler that was placed or fitted for one policy: the sampler, the policy, and the evidence. Values and a file only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockcache.errors import SamplerError
from blockcache.files import PathLike
from blockcache.samplers.base import FORMAT, SamplerConfig
from blockcache_runtime.fingerprint import Fingerprint


@dataclass(frozen=True)
class ChosenSampler:
    """What `place_steps` and `fit_sampler` give back: `policy.with_sampler(chosen.sampler)` uses it.

    sampler   like any other
    policy    whom it was chosen for, with the policy's own sampler in it; None for whoever it may concern
    evidence  how it was found and what it is worth, in JSON types
    """

    sampler: SamplerConfig
    policy: Fingerprint | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def check_fit(self, policy: Fingerprint) -> None:
        """Refuse a policy for which it was not chosen. The policy's sampler may be any: it is what gets replaced."""
        if self.policy is None:
            return
        found = self.policy.differences(policy, ignore=("sampler", "steps"))
        if found:
            raise SamplerError(
                f"this {self.sampler.type} sampler was chosen for another policy ({'; '.join(found)}); choose one for this "
                "policy with blockcache policy place or blockcache policy fit"
            )

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically; `SamplerConfig.load` reads the sampler of it."""
        bound = {} if self.policy is None else {"policy": self.policy.to_dict()}
        FORMAT.save(path, {"sampler": self.sampler.to_dict(), **bound, "evidence": dict(self.evidence)})

    @staticmethod
    def load(path: PathLike) -> ChosenSampler:
        """Read a JSON file, of a sampler alone too."""
        content = FORMAT.load(path)
        with FORMAT.reading(path):
            policy = Fingerprint.from_dict(content["policy"]) if "policy" in content else None
            return ChosenSampler(SamplerConfig.from_dict(content["sampler"]), policy, content.get("evidence", {}))

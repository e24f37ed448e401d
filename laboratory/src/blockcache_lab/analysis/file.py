"""The Analysis: every section that was found of one policy, by name, with what made it. A safetensors file.

Sections may be missing, and one that a policy cannot have says why in a sentence. The format is in docs/file-formats.md.
Knows nothing of torch and of how sections are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
import safetensors.numpy

from blockcache.block import Block
from blockcache.errors import short, shortened
from blockcache.files import Count, Fields, Format, Limit, PathLike, Positive, dict_of, expect_keys, read
from blockcache.fingerprint import Fingerprint
from blockcache.schedule.schedule import MOST_STEPS
from blockcache_lab.analysis.section import AnalysisError, AnalysisSection, arrays_of, plain_fields
from blockcache_lab.analysis.sections import SECTIONS

S = TypeVar("S", bound=AnalysisSection)
_PLAIN = {name: plain_fields(kind) for name, kind in SECTIONS.items()}
Sentence = Annotated[str, Limit(1, 1000)]

FORMAT = Format(
    "blockcache.analysis",
    "analysis",
    {
        "policy": Fields({"source": str, "fingerprint": Fingerprint}),
        "blocks": Annotated[list[Block], Limit(1, 10_000)],
        "setting": Fields(
            {
                "seed": Count,
                "generations": Count,
                "observations": Fields({"count": Count, "hash": str}),
                "command": str,
                "machine": dict,
            }
        ),
        "schedules": dict_of(Fields({"origin": dict})),
        "sections": dict[str, dict[str, Any]],
        "absent": dict[str, Sentence],
        "seconds": dict[str, Positive],
    },
    again="analyse again",
)


@dataclass(frozen=True, eq=False)
class Analysis:
    """What was found of one policy.

    Args:
        source: The policy as it was named.
        fingerprint: What the policy was.
        blocks: In execution order.
        setting: Seed, generations (calibrated on), observations (count and hash), command, machine.
        schedules: By name, how each schedule that sections speak of came to be.
        sections: By name, in the order of SECTIONS.
        absent: By name, why this policy has no such section.
        seconds: By name, how long each section took.
    """

    source: str
    fingerprint: Fingerprint
    blocks: tuple[Block, ...]
    setting: Mapping[str, Any]
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sections: Mapping[str, AnalysisSection] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = tuple(block.name for block in self.blocks)
        steps = self.fingerprint.steps
        if self.fingerprint.blocks != names or steps is None or len(set(names)) < len(names):
            raise AnalysisError("an analysis is bound to its policy: the blocks and steps must be the fingerprint's")
        if max(len(names), steps) > MOST_STEPS:
            raise AnalysisError(
                f"an analysis has {MOST_STEPS:,} blocks and steps at most, got {len(names)} and {steps}"
            )
        check_names((*self.sections, *self.absent, *self.seconds))
        if both := sorted(set(self.sections) & set(self.absent)):
            raise AnalysisError(f"the section {both[0]} is both there and missing")
        for name, section in self.sections.items():
            if type(section) is not SECTIONS[name]:
                raise AnalysisError(f"the section {name} holds a {type(section).__name__}")
            if not section.fits(len(names), steps):
                raise AnalysisError(
                    f"the section {name} is not of this policy, which has {len(names)} blocks and {steps} steps"
                )
        ordered = {name: self.sections[name] for name in SECTIONS if name in self.sections}
        object.__setattr__(self, "sections", ordered)

    @property
    def steps(self) -> int:
        assert self.fingerprint.steps is not None  # checked above
        return self.fingerprint.steps

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    def get(self, kind: type[S]) -> S | None:
        """The section of that kind, if it is there: `analysis.get(Similarity)`."""
        found = self.sections.get(kind.name)
        return found if isinstance(found, kind) else None

    def save(self, path: PathLike) -> None:
        """Write the safetensors file, atomically."""
        content = {
            "policy": {"source": self.source, "fingerprint": self.fingerprint.to_dict()},
            "blocks": [asdict(block) for block in self.blocks],
            "setting": dict(self.setting),
            "schedules": {name: {"origin": dict(value["origin"])} for name, value in self.schedules.items()},
            "sections": {name: section.plain() for name, section in self.sections.items()},
            "absent": dict(self.absent),
            "seconds": dict(self.seconds),
        }
        arrays = {
            f"{name}.{array}": np.ascontiguousarray(getattr(section, array))
            for name, section in self.sections.items()
            for array in arrays_of(type(section))
        }
        FORMAT.save_tensors(path, content, arrays, safetensors.numpy.save)

    @classmethod
    def load(cls, path: PathLike) -> Analysis:
        """Read a file that `save` wrote. Another version, and any key, section or array that is not known, is refused."""
        content, arrays = FORMAT.load_tensors(path, safetensors.numpy.load)
        with FORMAT.reading(path):
            check_names(content["sections"])
            expected = [f"{name}.{array}" for name in content["sections"] for array in arrays_of(SECTIONS[name])]
            expect_keys(arrays, expected)
            policy = content.pop("policy")
            sections = {name: _section(name, plain, arrays) for name, plain in content.pop("sections").items()}
            return cls(
                source=policy["source"],
                fingerprint=policy["fingerprint"],
                **{**content, "blocks": tuple(content["blocks"])},
                sections=sections,
            )


def check_names(names: Any) -> None:
    """Refuse what is no name of a section.

    Args:
        names: Anything that can be iterated over, from a file or the command line.
    """
    for name in names:
        if name not in SECTIONS:
            raise AnalysisError(f"no section {shortened(short(name), 60)}, known are {', '.join(SECTIONS)}")


def _section(name: str, plain: Mapping[str, Any], arrays: Mapping[str, Any]) -> AnalysisSection:
    kind = SECTIONS[name]
    found = {array: arrays[f"{name}.{array}"] for array in arrays_of(kind)}
    for array, (dtype, _) in arrays_of(kind).items():
        if found[array].dtype != dtype:
            raise AnalysisError(f"the {name}'s {array} holds {found[array].dtype}, expected {dtype}")
    return kind(**read(_PLAIN[name], dict(plain), f"sections.{name}"), **found)

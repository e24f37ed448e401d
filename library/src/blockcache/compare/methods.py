"""A method: a sampler, what is reused from step to step, how chunks are executed, or several of these. A frozen value whose
text is what a user writes.

`NAMES` lists the texts. Names of methods are strings on the command line and in files only. Knows nothing of policies or
of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache

from blockcache.compare.parts import SAMPLER_PARTS, Facts, Lender, Look, MethodError, Part, Resolved
from blockcache.compare.reuse_parts import REUSE_PARTS, Executed, PartWithSettings, UnknownPart
from blockcache.palette import Colour, Marker
from blockcache.samplers import sampler_names

NAMES = """\
  full                          everything computed; always among the methods
  uniform:S=10  unified:S=10    schedules, solved from a calibration on the policy's observations;
  blockwise:S=10  bac:S=10,n=5  also metric=cosine|mse|l1|wasserstein, objective=anchor|consecutive,
                                last=1 (all blocks at the last step too, as in BAC's released code)
  action:budget=0.15            where the executed action needs it, at that share of the FLOPs; or S=10 updates on average
  teacache:threshold=0.1        decides while it runs
  ddim-16  sde-dpmsolver++-8    fewer denoising steps instead, by any sampler's name
  ddpm-8:placed                 the same with its steps placed for the policy, on its observations
  fitted-5  fitted-5:spread=1   all constants of so many steps fitted to the policy; below 1 (0.7) its actions are sharper
  sampler:fitted.json           a sampler file, such as 'policy place' and 'policy fit' write
  tuned:DIR                     what 'tune' wrote into that directory for the policy
  ddim-40+bac:S=5,n=3           both, calibrated with that sampler; also ddpm-10+action:budget=0.6
  schedule.json                 a schedule file, also behind a sampler
  fitted-4+replan=4             last of all, how chunks are executed: replan=4 actions of each before the next is asked for,
  tuned:DIR+temperature=0.5     noise times temperature=0.5, the medoid of candidates=8 drawn at once; with commas between"""

_FULL = Facts("full precision", Look("ink", "star", 0))
_COMBINED = Facts("reuse on few steps", Look("ink", "diamond", 11))


@dataclass(frozen=True)
class Method:
    """`sampler` None is the policy's own; `reuse` None computes every block at every step; `executed` None is as trained."""

    sampler: Part | None = None
    reuse: Part | None = None
    executed: Executed | None = None

    @property
    def name(self) -> str:
        """The text that parses to this method."""
        return "+".join(map(str, self._parts)) or "full"

    def __str__(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        """For people: "BAC S=10 n=5", "DDIM-40 + BAC S=5 n=3"."""
        return " + ".join(part.facts.label for part in self._parts) or "full precision"

    @property
    def family(self) -> str:
        """What it is, without its settings: "BAC", "DDIM-N", "BAC on DDIM"."""
        if self.sampler is not None and self.reuse is not None and self.executed is None:
            return f"{self.reuse.facts.kind} on {self.sampler.facts.solver}"
        return self.facts.kind

    @property
    def kind(self) -> str:
        """What legends tell apart: the family, or that two families are combined."""
        return self._shown.kind

    @property
    def look(self) -> tuple[Colour, Marker]:
        """The colour and the shape of its kind in every picture."""
        return self._shown.look.colour, self._shown.look.marker

    @property
    def rank(self) -> int:
        """Its kind's place in legends."""
        return self._shown.look.rank

    @property
    def facts(self) -> Facts:
        """Of its last part: what sets it apart from others of its family."""
        return self._parts[-1].facts if self._parts else _FULL

    @property
    def _shown(self) -> Facts:
        return _COMBINED if self.executed is None and len(self._parts) > 1 else self.facts

    @property
    def off_the_shelf(self) -> bool:
        """Whether it needs neither a calibration nor a file: fewer steps, where the sampler puts them."""
        return bool(self._parts) and all(part.facts.off_the_shelf for part in self._parts)

    @property
    def by_another_metric(self) -> bool:
        """Whether its schedule is solved by another metric than the cosine."""
        return self.reuse is not None and bool(self.reuse.facts.metric)

    @property
    def tuned_in(self) -> str | None:
        """The directory of `blockcache tune` that it stands for, if it does."""
        return self._parts[0].facts.tuned_in if self._parts else None

    @property
    def portable_name(self) -> str:
        """Its name wherever files lie: what was tuned lies in another place on every machine."""
        return "+".join(part.facts.kind if part.facts.tuned_in else str(part) for part in self._parts) or "full"

    def resolve(self, lender: Lender) -> Resolved:
        """The sampler and the schedule or rule that it comes to for one policy."""
        found = Resolved()
        for part in self._parts:
            found = part.resolve(lender, found)
        return found

    def check_files(self) -> None:
        """Refuse files that cannot be read."""
        for part in self._parts:
            part.check_files()

    @property
    def _parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.sampler, self.reuse, self.executed) if part is not None)


FULL = Method()


def parse_method(text: str) -> Method:
    """The method of a text. Strict: anything that is not exactly a method is refused with one sentence.

    Args:
        text: As `NAMES` lists them.
    """
    if text == "full":
        return FULL
    try:
        if found := re.fullmatch(Executed.pattern, text):
            executed = Executed.parse(settings=found["settings"])
            assert isinstance(executed, Executed)
            before = FULL if found["before"] is None else parse_method(found["before"])
            if before.executed is not None:
                raise MethodError(
                    f"how chunks are executed is said once, such as replan=4,temperature=0.5; got {text!r}"
                )
            return replace(before, executed=executed)
        sampler, rest = _parse(SAMPLER_PARTS, text, r"(?:\+(?P<rest>.+))?")
        reuse, _ = (None, None) if sampler and rest is None else _parse(REUSE_PARTS, rest or text)
    except MethodError as error:
        raise MethodError(f"method {text!r}: {error}") from None
    if reuse is None and (sampler is None or rest is not None):
        words = [
            "full",
            *(part.word for part in REUSE_PARTS if issubclass(part, PartWithSettings)),
            *(f"{name}-N" for name in sorted(sampler_names())),
            "fitted-N",
        ]
        near = get_close_matches(re.sub(r"-\d+$", "-N", (rest or text).partition(":")[0]), words, n=1)
        raise MethodError(
            f"unknown method {text!r}; known are {', '.join(words)}, a schedule file (.json), and a sampler with one of "
            f"these such as ddim-40+bac:S=5,n=3{f'; did you mean {near[0]}?' if near else ''}"
        )
    return Method(sampler, reuse)


def _parse(kinds: Iterable[type[Part]], text: str, behind: str = "") -> tuple[Part | None, str | None]:
    """The part of one of these kinds that the text is, if it is one, and what stands behind it."""
    for kind in kinds:
        if found := re.fullmatch(kind.pattern + behind, text):
            groups = found.groupdict()
            rest = groups.pop("rest", None)
            return kind.parse(**groups), rest
    return None, None


@lru_cache(maxsize=10_000)
def method_named(name: str) -> Method:
    """The method that a file names. One that this version does not know can be shown all the same.

    Args:
        name: As it stands in the file.
    """
    try:
        return parse_method(name)
    except MethodError:
        return Method(reuse=UnknownPart(name))

"""What one random case showed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """A case by its number and what it was; `finding` says what was wrong, and `tag` what kind of case it was."""

    case: int
    about: str
    finding: str | None = None
    tag: str = ""

    def line(self, name: str) -> str:
        return f"{name} {self.case} ({self.about}): {self.finding}"

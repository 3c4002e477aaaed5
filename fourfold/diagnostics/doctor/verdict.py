"""What the doctor says, and how each thing that it can say is declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.diagnostics.doctor.records import Records

Severity = Literal["good", "note", "warning", "ill"]
Family = Literal["critic", "policy", "reward", "system"]
# Most serious first.
SEVERITIES: tuple[Severity, ...] = ("ill", "warning", "note", "good")
# A disease is named from this confidence on.
CONFIDENT = 0.9


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding: `evidence` are its numbers, `confidence` that its statistic is beyond its limit (docs/doctor.md).

    `remedy` is a line of the configuration to change, with the reason behind a '#', or "" for what is good and where no
    setting helps. `steps` are the first and the last PPO step that it was read from.
    """

    name: str
    severity: Severity
    evidence: str
    confidence: float
    remedy: str
    steps: tuple[int, int]


def by_severity(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The most serious first, and of those alike the surest."""
    return sorted(verdicts, key=lambda each: (SEVERITIES.index(each.severity), -each.confidence))


@dataclass(frozen=True, slots=True)
class Unjudged:
    """What a run's files do not tell, and what would be needed."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of what a diagnosis looks at, whether or not it is beyond the limit."""

    evidence: str
    confidence: float
    remedy: str
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A disease that the doctor knows; `judge` raises CannotJudge where the run has not left the data.

    `formula` says of which numbers the statistic is made, beyond which limit it is named and how its confidence comes
    about; the limits in it are the constants that the code compares with.
    """

    name: str
    family: Family
    severity: Severity
    meaning: str
    formula: str
    remedy: str
    judge: Callable[[Records], Finding]

    def verdict(self, found: Finding) -> Verdict | None:
        """The verdict on a finding, None where the disease is not there."""
        if found.confidence < CONFIDENT:
            return None
        return Verdict(self.name, self.severity, found.evidence, found.confidence, found.remedy, found.steps)

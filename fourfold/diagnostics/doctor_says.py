"""The doctor's verdicts as pages and terminals show them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ORDER = ("ill", "warning", "note", "good")


class Verdict(Protocol):
    """A verdict of fourfold.diagnostics.doctor."""

    @property
    def name(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def evidence(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def remedy(self) -> str: ...
    @property
    def steps(self) -> tuple[int, int]: ...


def by_severity(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The worst first, and of those alike the surest."""
    return sorted(verdicts, key=lambda each: (ORDER.index(each.severity), -each.confidence))


def verdicts_of(root: Path) -> Sequence[Verdict] | str:
    """What the doctor says of a run; a text says why it says nothing."""
    return "this version has no doctor"

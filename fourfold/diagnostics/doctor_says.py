"""The doctor's verdicts for pages and terminals that show more than these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.diagnostics.doctor import Verdict, diagnose


def verdicts_of(root: Path) -> Sequence[Verdict] | str:
    """What the doctor says of a run, the worst first; a text says why it says nothing."""
    try:
        return diagnose(root)
    except ValueError as error:
        return str(error)

"""What the doctor says, for pages and terminals that show more than that."""

from __future__ import annotations

from pathlib import Path

from fourfold.diagnostics.doctor import Examination, examine


def examination_of(root: Path) -> Examination | str:
    """What the doctor says of a run; a text says why that is nothing."""
    try:
        return examine(root)
    except ValueError as error:
        return str(error)

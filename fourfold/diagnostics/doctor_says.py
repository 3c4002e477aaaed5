"""What the doctor says, for pages and terminals that show more than that."""

from __future__ import annotations

from pathlib import Path

from fourfold.diagnostics.doctor import Examination, examine
from fourfold.diagnostics.run_record import RunRecord


def examination_of(run: Path | RunRecord) -> Examination | str:
    """What the doctor says of a run; a text says why that is nothing."""
    try:
        return examine(run)
    except ValueError as error:
        return str(error)

"""Rows of metrics as plain, finite numbers: what every tracker takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fourfold.errors import RunFailed

Row = Mapping[str, float]


def finite(row: Row) -> dict[str, float]:
    """The row as plain numbers; RunFailed names a metric that is no finite number, and its step."""
    assert "step" in row, "a row without its step cannot be placed"
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RunFailed(
                f"log: metric {name!r} of step {row['step']} is {value!r} ({type(value).__name__}); allowed: a finite "
                "int or float; the row was not written, the last good checkpoint is kept"
            )
        numbers[name] = int(value) if isinstance(value, int) else float(value)  # bool is an int too
    return numbers

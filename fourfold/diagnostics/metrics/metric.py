"""The type of an entry in the table of metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that a run logs: what it is, what it is divided by, what is healthy, what to do when it is not.

    A `promised` metric is in every row of its kind; the others where there was something to measure.
    """

    name: str
    unit: str
    formula: str
    denominator: str
    healthy: str
    remedy: str
    promised: bool = True

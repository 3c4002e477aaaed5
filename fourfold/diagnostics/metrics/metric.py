"""The type of an entry in the table of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """What is healthy, in numbers: from `low` to `high`, both included, either of them open where it is None.

    `of_start`: both are factors of the metric's first value in the run.
    """

    low: float | None = None
    high: float | None = None
    of_start: bool = False

    def seen_from(self, first: float) -> Band:
        """The band in the metric's own unit, for a run whose first value this is."""
        if not self.of_start:
            return self
        low, high = (None if bound is None else bound * first for bound in (self.low, self.high))
        return Band(low, high)

    def holds(self, value: float) -> bool:
        """Whether a value lies in it."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that a run logs: what it is, what it is divided by, what is healthy, what to do when it is not.

    A `promised` metric is in every row of its kind; the others where there was something to measure. `band` has the
    numbers of what `healthy` says in words, where those are numbers: one for all runs, or one for each of what it
    depends on (a type of `precision.compute`, a sampler that differs).
    """

    name: str
    unit: str
    formula: str
    denominator: str
    healthy: str
    remedy: str
    promised: bool = True
    band: Band | Mapping[str, Band] | None = None

    def band_where(self, circumstance: str) -> Band | None:
        """The band of a run that computes in this type, or samples so; None where there is none in numbers."""
        return self.band.get(circumstance) if isinstance(self.band, Mapping) else self.band

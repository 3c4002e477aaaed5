"""Statistics that a few odd numbers do not move, with their standard errors, and the confidence that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[numpy.float64]
Indices = NDArray[numpy.intp]
# Of normal numbers: standard deviation / median absolute deviation, / mean absolute deviation, error of median / mean.
MAD_TO_STD, MEAN_DEVIATION_TO_STD, MEDIAN_ERROR = 1.4826, math.sqrt(math.pi / 2), math.sqrt(math.pi / 2)
# More autocorrelation than this is not told from a trend by a few dozen numbers.
MOST_AUTOCORRELATION = 0.9
GROUPS = 10


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its standard error."""

    value: float
    error: float

    def above(self, limit: float) -> float:
        """Confidence that the true number is above `limit`: Phi((value - limit) / error)."""
        return phi(self.value - limit, self.error)

    def below(self, limit: float) -> float:
        """Confidence that it is below."""
        return phi(limit - self.value, self.error)

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        return Estimate(self.value - other.value, math.hypot(self.error, other.error))


def phi(distance: float, error: float) -> float:
    """Standard normal distribution function of distance / error; without an error 0, 1/2 or 1."""
    if error > 0:
        return 0.5 * (1.0 + math.erf(distance / error / math.sqrt(2.0)))
    return 0.5 if distance == 0 else float(distance > 0)


def spread(x: ArrayLike) -> float:
    """1.4826 x median |x - median(x)|; where more than half are equal, 1.2533 x mean |x - median(x)|."""
    numbers = numpy.asarray(x, dtype=numpy.float64)
    distances = numpy.abs(numbers - numpy.median(numbers))
    return float(MAD_TO_STD * numpy.median(distances)) or float(MEAN_DEVIATION_TO_STD * distances.mean())


def autocorrelation(x: ArrayLike) -> float:
    """Correlation of each number with the one before it, between 0 and 0.9."""
    numbers = numpy.asarray(x, dtype=numpy.float64)
    centred = numbers - numbers.mean()
    total = float(centred @ centred)
    found = float(centred[1:] @ centred[:-1]) / total if total > 0 else 0.0
    return min(max(found, 0.0), MOST_AUTOCORRELATION)


def level(x: ArrayLike) -> Estimate:
    """Median of a series; its error is 1.2533 x spread / sqrt(n (1 - r) / (1 + r)), r the autocorrelation."""
    numbers = numpy.asarray(x, dtype=numpy.float64)
    r = autocorrelation(numbers)
    independent = max(len(numbers) * (1 - r) / (1 + r), 1.0)
    return Estimate(float(numpy.median(numbers)), MEDIAN_ERROR * spread(numbers) / math.sqrt(independent))


def mean(x: ArrayLike) -> Estimate:
    """Mean of independent numbers, with its standard error."""
    numbers = numpy.asarray(x, dtype=numpy.float64)
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.inf
    return Estimate(float(numbers.mean()), error)


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    """sum x / sum n over B independent rows (Cochran 1977, 6.3).

    The error is sqrt(B / (B - 1) sum (x_i - ratio n_i)^2) / sum n.
    """
    x, n = (numpy.asarray(v, dtype=numpy.float64) for v in (numerators, denominators))
    found, rows = float(x.sum() / n.sum()), len(x)
    if rows < 2:
        return Estimate(found, math.inf)
    left = x - found * n
    return Estimate(found, math.sqrt(rows / (rows - 1) * float(left @ left)) / float(n.sum()))


def share(count: int, total: int) -> Estimate:
    """A share of `total` cases, with the error of (count + 1) / (total + 2) (Laplace), which is never 0."""
    p = (count + 1) / (total + 2)
    return Estimate(count / total, math.sqrt(p * (1 - p) / total))


def correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's; 0 where one of them is constant."""
    a, b = (numpy.asarray(v, dtype=numpy.float64) for v in (x, y))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else 0.0


def ranks(x: ArrayLike) -> Numbers:
    """1 for the smallest; equal numbers share the mean of their ranks."""
    _, place, counts = numpy.unique(numpy.asarray(x), return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[place.ravel()]


def partial_correlation(x: ArrayLike, y: ArrayLike, *given: ArrayLike) -> float:
    """Rank correlation of x and y with the ranks of each of `given` taken out (Kendall 1942).

    The correlation of what least squares on them leave of both ranks: of one z (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2)
    (1 - r_yz^2)) of Spearman's r. 0 where they say all of x or y.
    """
    columns, left = [ranks(each) for each in given], list[Numbers]()
    for own in (ranks(x), ranks(y)):
        rest = least_squares(own, columns)[1]
        if float(rest @ rest) <= 1e-12 * float(own @ own):
            return 0.0
        left.append(rest)
    return correlation(*left)


def fisher(r: float, n: int, controlled: int = 0) -> Estimate:
    """Fisher's z of a correlation of n pairs: atanh(r), error 1 / sqrt(n - 3 - controlled)."""
    bounded = min(max(r, -0.999999), 0.999999)
    free = n - 3 - controlled
    return Estimate(math.atanh(bounded), 1 / math.sqrt(free) if free > 0 else math.inf)


def jackknife(rows: int, statistic: Callable[[Indices], float], groups: int = GROUPS) -> Estimate:
    """A statistic of independent rows; its error by leaving out each of ten groups of rows (Shao and Tu 1995, 1.3).

    `statistic` takes the indices of the rows that stay.
    """
    everything = numpy.arange(rows)
    groups = min(groups, rows)
    if groups < 2:
        return Estimate(statistic(everything), math.inf)
    left = [statistic(everything[everything % groups != group]) for group in range(groups)]
    variance = (groups - 1) / groups * sum((value - sum(left) / groups) ** 2 for value in left)
    return Estimate(statistic(everything), math.sqrt(variance))


def least_squares(y: Numbers, columns: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """Coefficients of y on a constant and these columns, and what they leave of y."""
    design = numpy.stack([numpy.ones_like(y), *columns], axis=1)
    found = numpy.asarray(numpy.linalg.lstsq(design, y, rcond=None)[0], dtype=numpy.float64)
    return found, y - design @ found

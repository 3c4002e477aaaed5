"""The statistics of the doctor against closed forms, SciPy, and simulations with known answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, rankdata, spearmanr

from fourfold.diagnostics.doctor.fit import Fit, over_rows
from fourfold.diagnostics.doctor.records import CannotJudge
from fourfold.diagnostics.doctor.robust import (
    Estimate,
    autocorrelation,
    correlation,
    fisher,
    jackknife,
    least_squares,
    level,
    mean,
    partial_correlation,
    phi,
    ranks,
    ratio_of_sums,
    share,
    spread,
)

RANDOM = numpy.random.default_rng(0)
NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=40)


@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_confidence_is_the_normal_distribution_function(distance: float, error: float) -> None:
    assert phi(distance, error) == pytest.approx(norm.cdf(distance / error), abs=1e-12)
    assert Estimate(distance, error).above(0.0) + Estimate(distance, error).below(0.0) == pytest.approx(1.0)


def test_without_an_error_there_is_no_doubt() -> None:
    assert [Estimate(x, 0.0).above(1.0) for x in (0.0, 1.0, 2.0)] == [0.0, 0.5, 1.0]
    assert Estimate(5.0, math.inf).above(1.0) == 0.5


def test_the_spread_of_normal_numbers_is_their_deviation() -> None:
    x = RANDOM.normal(3, 2, 40_000)
    assert spread(x) == pytest.approx(2.0, rel=0.03)
    assert spread([*x, 1e9, -1e9]) == pytest.approx(2.0, rel=0.03), "two outliers do not move it"


def test_the_spread_of_numbers_of_which_most_are_equal_is_not_0() -> None:
    assert spread([1.0] * 9 + [2.0]) == pytest.approx(math.sqrt(math.pi / 2) * 0.1)
    assert spread([1.0] * 5) == 0.0


@pytest.mark.parametrize("r", [0.0, 0.6])
def test_the_error_of_a_level_is_that_of_repeated_series(r: float) -> None:
    """Of 2,000 series with that autocorrelation: medians deviate by what the error says, within a third."""
    noise = RANDOM.normal(size=(2_000, 60))
    series = noise.copy()
    for t in range(1, 60):
        series[:, t] = r * series[:, t - 1] + math.sqrt(1 - r**2) * noise[:, t]
    found = [level(row) for row in series]
    real = numpy.std([each.value for each in found])
    assert numpy.median([each.error for each in found]) == pytest.approx(real, rel=0.34)


@given(NUMBERS)
def test_autocorrelation_is_a_share(x: list[float]) -> None:
    assert 0.0 <= autocorrelation(x) <= 0.9
    assert autocorrelation([3.0] * len(x)) == 0.0


@given(NUMBERS)
def test_ranks_are_those_of_scipy(x: list[float]) -> None:
    assert ranks(x).tolist() == rankdata(x).tolist()


def test_a_correlation_is_that_of_numpy() -> None:
    x, y = RANDOM.normal(size=(2, 30))
    assert correlation(x, y) == pytest.approx(float(numpy.corrcoef(numpy.stack([x, y])).item(1)))
    assert correlation(x, numpy.ones(30)) == 0.0


def test_a_partial_correlation_is_that_of_what_the_third_leaves() -> None:
    """Residuals of ranks regressed on ranks, correlated: the definition, computed another way."""
    z = RANDOM.normal(size=200)
    x, y = z + RANDOM.normal(size=200), -z + RANDOM.normal(size=200)
    left = [rankdata(v) - numpy.polyval(numpy.polyfit(rankdata(z), rankdata(v), 1), rankdata(z)) for v in (x, y)]
    assert partial_correlation(x, y, z) == pytest.approx(correlation(*left), abs=1e-9)
    assert abs(partial_correlation(x, y, z)) < 0.2 < -float(numpy.asarray(spearmanr(x, y))[0])
    assert partial_correlation(x, y, x) == 0.0, "x says all of itself"
    rx, ry, rz = rankdata(x), rankdata(y), rankdata(z)
    xy, xz, yz = (correlation(*pair) for pair in ((rx, ry), (rx, rz), (ry, rz)))
    closed = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    assert partial_correlation(x, y, z) == pytest.approx(closed, abs=1e-9)


def test_a_partial_correlation_takes_out_several() -> None:
    """x and y have nothing in common but the sum of two others, neither of which explains it alone."""
    one, other = RANDOM.normal(size=(2, 400))
    x, y = (one + other + RANDOM.normal(size=400) for _ in range(2))
    assert partial_correlation(x, y, one) > 0.3 and partial_correlation(x, y, other) > 0.3
    assert abs(partial_correlation(x, y, one, other)) < 0.2


def test_fisher_covers() -> None:
    """The true z lies within 1.96 errors in 95 % of the samples, a controlled variable included."""
    inside, true = 0, math.atanh(0.5)
    for _ in range(1_000):
        pairs = RANDOM.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=40)
        found = fisher(correlation(*pairs.T), 40)
        inside += abs(found.value - true) < 1.96 * found.error
    assert inside / 1_000 == pytest.approx(0.95, abs=0.02)
    assert fisher(0.5, 40, 1).error == pytest.approx(1 / 6)
    assert math.isinf(fisher(1.0, 3).error) and math.isfinite(fisher(1.0, 9).value)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    """Exactly, with as many groups as rows."""
    x = RANDOM.normal(size=12)
    found = jackknife(12, lambda rows: float(x[rows].mean()), groups=12)
    assert found.error == pytest.approx(mean(x).error) and found.value == pytest.approx(x.mean())
    assert math.isinf(jackknife(1, lambda rows: 1.0).error)


def test_a_ratio_of_sums_with_equal_parts_is_a_mean() -> None:
    x = RANDOM.normal(size=20)
    found, expected = ratio_of_sums(x, numpy.ones(20)), mean(x)
    assert (found.value, found.error) == pytest.approx((expected.value, expected.error))
    assert math.isinf(ratio_of_sums([1.0], [2.0]).error)


def test_a_share_is_never_sure_of_itself() -> None:
    assert share(10, 10).value == 1.0 and 0.05 < share(10, 10).error < 0.15
    assert share(5, 10).error == pytest.approx(math.sqrt(0.25 / 10))


def test_least_squares_finds_a_line_again() -> None:
    x, z = RANDOM.normal(size=(2, 30))
    found, left = least_squares(2 + 3 * x - z, [x, z])
    assert found == pytest.approx([2, 3, -1]) and numpy.abs(left).max() < 1e-9


def test_returns_that_differ_in_one_response_alone_are_no_measure_of_a_critic() -> None:
    """Leaving it out, as the error of the estimate does, leaves no variance to explain."""
    numbers = numpy.arange(20.0)
    returns = numpy.where(numbers == 3, 1.0, 0.0)
    fit = Fit(values=numbers, returns=returns, so_far=numpy.zeros(20), row=numpy.arange(20), rows=20)
    for name in ("explained", "systematic"):
        with pytest.raises(CannotJudge, match="all but a few returns of the kept rollout are alike"):
            over_rows(fit, name)
    assert over_rows(replace(fit, returns=numbers % 3), "explained").error > 0

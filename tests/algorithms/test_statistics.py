"""Statistics against scipy and hand counts."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from fourfold.algorithms.statistics import (
    correlations,
    distinct_n,
    explained_variance,
    moments,
    opposed_shares,
    spearman,
)

NAN = float("nan")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20))
def test_spearman_equals_scipy_with_and_without_ties(pairs: list[tuple[int, int]]) -> None:
    x, y = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
    assume(len(x.unique()) > 1 and len(y.unique()) > 1)
    assert spearman(x, y) == pytest.approx(spearmanr(x.numpy(), y.numpy())[0], abs=1e-12)


def test_spearman_of_a_constant_is_zero() -> None:
    assert spearman(torch.ones(4), torch.arange(4.0)) == 0.0
    assert spearman(torch.arange(4.0), torch.ones(4)) == 0.0
    assert spearman(torch.ones(1), torch.ones(1)) == 0.0


def test_explained_variance() -> None:
    returns = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, NAN]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 7.0, returns, mask) == 1.0  # a constant offset has no variance
    assert explained_variance(torch.zeros(2, 3), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)  # residual 2R: variance 4 times as large
    assert explained_variance(returns, torch.ones(2, 3), mask) == 0.0


def test_distinct_n_counts_over_all_texts() -> None:
    texts = [[1, 2, 3], [1, 2, 4], [5]]
    assert distinct_n(texts, 1) == 5 / 7
    assert distinct_n(texts, 2) == 3 / 4  # (1 2) twice, (2 3), (2 4); none across texts
    assert distinct_n(texts, 3) == 1.0
    assert distinct_n(texts, 4) == 0.0
    assert distinct_n([], 2) == 0.0
    with pytest.raises(ValueError, match="n = 0"):
        distinct_n(texts, 0)


def test_moments() -> None:
    x, mask = torch.tensor([[2.0, NAN], [4.0, 9.0]]), torch.tensor([[True, False], [True, True]])
    mean, std = moments(x, mask)
    assert mean == pytest.approx(5.0)
    assert std == pytest.approx(13**0.5)
    assert moments(torch.tensor([3.0]), torch.tensor([True])) == (3.0, 0.0)


@given(st.integers(0, 100), st.integers(2, 20), st.integers(2, 4))
def test_correlations_equal_numpy(seed: int, rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    expected = torch.from_numpy(numpy.corrcoef(x.double().numpy(), rowvar=False))
    torch.testing.assert_close(correlations(x), expected, atol=1e-9, rtol=0)


def test_a_constant_correlates_with_nothing_but_itself() -> None:
    x = torch.stack([torch.full((7,), 0.1), torch.arange(7.0)], dim=1)
    assert correlations(x).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert correlations(x[:1]).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_opposed_shares_by_count() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0], [2.0, -0.5, 3.0], [-1.0, -2.0, 1.0], [1.0, 1.0, 1.0]])
    assert opposed_shares(x).tolist() == [[0.0, 0.5, 0.25], [0.5, 0.0, 0.5], [0.25, 0.5, 0.0]]

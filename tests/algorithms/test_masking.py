"""Masked reductions against plain arithmetic on the elements that count."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.masking import (
    last_index,
    masked_mean,
    masked_sum,
    masked_variance,
    position_ids,
    whiten,
)

ROWS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12)


def with_nan_padding(numbers: list[float], gaps: list[bool]) -> tuple[Tensor, Tensor]:
    """The numbers with a NaN, masked out, after each one whose gap is True."""
    cells: list[float] = []
    mask: list[bool] = []
    for number, gap in zip(numbers, gaps, strict=False):
        cells += [number, float("nan")] if gap else [number]
        mask += [True, False] if gap else [True]
    return torch.tensor(cells), torch.tensor(mask)


@given(ROWS, st.lists(st.booleans(), min_size=12, max_size=12))
def test_reductions_equal_those_of_the_counted_numbers(numbers: list[float], gaps: list[bool]) -> None:
    x, mask = with_nan_padding(numbers, gaps)
    assert masked_sum(x, mask).item() == pytest.approx(sum(numbers), abs=1e-3)
    assert masked_mean(x, mask).item() == pytest.approx(statistics.fmean(numbers), abs=1e-4)
    assert masked_variance(x, mask).item() == pytest.approx(statistics.variance(numbers), rel=1e-4, abs=1e-4)
    biased = masked_variance(x, mask, unbiased=False).item()
    assert biased == pytest.approx(statistics.pvariance(numbers), rel=1e-4, abs=1e-4)


@given(st.permutations(range(8)), st.lists(st.booleans(), min_size=8, max_size=8))
def test_whitened_numbers_have_mean_0_and_deviation_1(numbers: list[int], gaps: list[bool]) -> None:
    x, mask = with_nan_padding([float(n) for n in numbers], gaps)
    white = whiten(x, mask)
    assert white[mask].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[mask].std().item() == pytest.approx(1.0, abs=1e-6)
    assert (white[~mask] == 0).all()
    kept = whiten(x, mask, shift_mean=False)
    assert kept[mask].mean().item() == pytest.approx(3.5, abs=1e-5)
    assert kept[mask].std().item() == pytest.approx(1.0, abs=1e-6)
    assert (kept[~mask] == 0).all()


def test_whitening_uses_the_moments_of_the_whole_batch() -> None:
    """FAULTS F6: the rows are not whitened one by one."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    white = whiten(x, torch.ones(2, 2, dtype=torch.bool))
    deviation = statistics.stdev([1, 2, 3, 4])
    assert white.flatten().tolist() == pytest.approx([(v - 2.5) / deviation for v in (1, 2, 3, 4)])


def test_a_single_element_has_no_spread() -> None:
    x, mask = torch.tensor([[5.0, float("nan")]]), torch.tensor([[True, False]])
    assert masked_variance(x, mask).item() == 0.0
    assert whiten(x, mask).tolist() == [[0.0, 0.0]]
    assert whiten(x, mask, shift_mean=False).tolist() == [[5.0, 0.0]]


def test_gradients_of_padding_are_zero_even_where_it_is_nan() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    masked_mean(x, mask).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


def test_reductions_run_in_float32() -> None:
    # 1000 ones and a half: bfloat16 holds 8 bits and would give 1000.
    x = torch.cat([torch.ones(1000), torch.tensor([0.5])]).bfloat16()
    total = masked_sum(x, torch.ones(1001, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total.item() == 1000.5


@pytest.mark.parametrize("reduce", [masked_mean, masked_variance, whiten])
def test_an_empty_mask_is_refused(reduce) -> None:
    with pytest.raises(ValueError, match="none of the 3 elements"):
        reduce(torch.ones(3), torch.zeros(3, dtype=torch.bool))


def test_a_sum_over_nothing_is_zero() -> None:
    assert masked_sum(torch.full((3,), float("nan")), torch.zeros(3, dtype=torch.bool)).item() == 0.0


def test_last_index_is_the_last_true_wherever_the_others_are() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert last_index(mask).tolist() == [0, 3, 2, 3]
    assert last_index(mask).dtype == torch.int64


def test_last_index_names_the_empty_row() -> None:
    with pytest.raises(ValueError, match="row 1 has no True"):
        last_index(torch.tensor([[True, False], [False, False]]))


def test_positions_do_not_depend_on_left_padding() -> None:
    """FAULTS A3, A6, A14: the same tokens have the same positions whatever is padded on their left."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0]], dtype=torch.bool)
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 2, 2]]
    assert position_ids(mask).dtype == torch.int64

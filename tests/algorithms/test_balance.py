"""Factors of several value losses, against the equations of the papers solved by descent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.algorithms.balance import LARGEST, gradient_norm_weights, uncertainty_weights

NEAR = st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5)


@given(NEAR)
def test_uncertainty_weights_are_where_the_loss_of_kendall_et_al_comes_to_rest(errors: list[float]) -> None:
    """d/ds of E exp(-s) / 2 + s / 2 (equation 7 with s = log sigma^2), by Newton's method in float64."""
    squared = torch.tensor(errors, dtype=torch.float64)
    s = torch.zeros_like(squared, requires_grad=True)
    for _ in range(50):
        loss = (squared * torch.exp(-s) / 2 + s / 2).sum()
        [slope] = torch.autograd.grad(loss, s)
        with torch.no_grad():
            s -= (slope / (squared * torch.exp(-s) / 2)).clamp(-0.5, 0.5)
    expected = torch.exp(-s).detach()
    torch.testing.assert_close(
        uncertainty_weights(squared.float()), (expected / expected.mean()).float(), rtol=1e-4, atol=0
    )


@given(NEAR)
def test_gradient_norm_weights_make_the_norms_alike(norms: list[float]) -> None:
    found = gradient_norm_weights(torch.tensor(norms)) * torch.tensor(norms)
    assert found.tolist() == pytest.approx([found[0].item()] * len(norms), rel=1e-4)


@given(st.lists(st.floats(0.0, 1e30), min_size=1, max_size=5))
def test_factors_keep_the_scale_of_the_loss_and_are_bounded(numbers: list[float]) -> None:
    for weights in (uncertainty_weights(torch.tensor(numbers)), gradient_norm_weights(torch.tensor(numbers))):
        assert weights.mean().item() == pytest.approx(1.0, rel=1e-5)
        assert weights.min().item() > 0
        assert weights.max().item() / weights.min().item() <= LARGEST**2 * (1 + 1e-4)


def test_one_dimension_and_none_that_is_known_count_as_they_are() -> None:
    assert uncertainty_weights(torch.tensor([3.0])).tolist() == [1.0]
    assert gradient_norm_weights(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_a_gradient_of_0_or_nan_is_not_divided_by() -> None:
    """A new head of zeros sends nothing down; it weighs as the dimension with the largest norm."""
    weights = gradient_norm_weights(torch.tensor([0.0, 2.0, 1.0, float("nan")]))
    assert weights[0] == weights[1] == weights[3] == weights[2] / 2

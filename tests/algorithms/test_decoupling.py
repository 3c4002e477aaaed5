"""Agreement of two gradients, their balance, and the penalty on features that point the same way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.algorithms.decoupling import Agreement, agreement, balanced_scale, squared_cosine_sum

ANGLES = st.floats(0.0, 2 * math.pi)
SIZES = st.floats(1e-3, 1e3)


@given(angle=ANGLES, a=SIZES, c=SIZES)
def test_cosine_and_norms_of_two_arrows(angle: float, a: float, c: float) -> None:
    """Spread over two tensors, as the weights of a trunk are: it is one vector."""
    actor = [torch.tensor([a, 0.0]), torch.zeros(1, 2)]
    critic = [torch.tensor([c * math.cos(angle), 0.0]), torch.tensor([[0.0, c * math.sin(angle)]])]
    found = agreement(actor, critic)
    assert found == pytest.approx((a, c, math.cos(angle)), rel=1e-4, abs=1e-6)


def test_without_a_gradient_there_is_no_angle() -> None:
    assert agreement([torch.ones(3)], [torch.zeros(3)]) == (pytest.approx(math.sqrt(3)), 0.0, 0.0)


@given(ratio=st.floats(0.0, 10.0), a=SIZES, c=SIZES)
def test_a_balanced_gradient_has_the_norm_that_is_wanted(ratio: float, a: float, c: float) -> None:
    assert balanced_scale(ratio, Agreement(a, c, 0.3)) * c == pytest.approx(ratio * a)
    assert balanced_scale(ratio, Agreement(a, 0.0, 0.0)) == 0.0


@given(angle=ANGLES, a=SIZES, c=SIZES)
def test_the_penalty_is_the_squared_cosine_whatever_the_lengths(angle: float, a: float, c: float) -> None:
    """Two tokens: one at the angle, one at a right angle, which adds nothing."""
    x = torch.tensor([[a, 0.0], [a, 0.0]])
    y = torch.tensor([[c * math.cos(angle), c * math.sin(angle)], [0.0, c]])
    assert float(squared_cosine_sum(x, y)) == pytest.approx(math.cos(angle) ** 2, abs=1e-5)


def test_the_penalty_is_a_sum_over_tokens() -> None:
    x, y = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    parts = squared_cosine_sum(x[:3], y[:3]) + squared_cosine_sum(x[3:], y[3:])
    torch.testing.assert_close(squared_cosine_sum(x, y), parts)


def test_the_gradient_of_the_penalty_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2))
    squared_cosine_sum(x, y).backward()
    assert x.grad is not None and y.grad is not None
    a, b = x.detach(), y.detach()
    for i in range(x.numel()):
        step = torch.zeros(x.numel()).index_fill(0, torch.tensor(i), 1e-2).view_as(x)
        by_x = (squared_cosine_sum(a + step, b) - squared_cosine_sum(a - step, b)) / 2e-2
        by_y = (squared_cosine_sum(a, b + step) - squared_cosine_sum(a, b - step)) / 2e-2
        assert float(x.grad.flatten()[i]) == pytest.approx(float(by_x), abs=2e-3)
        assert float(y.grad.flatten()[i]) == pytest.approx(float(by_y), abs=2e-3)

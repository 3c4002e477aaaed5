"""GAE of several rewards at once: against a run of each by itself, and against one run of their weighted sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.advantages import gae, whiten_dimensions
from fourfold.algorithms.masking import whiten

NAN = float("nan")
UNIT = st.floats(0, 1)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)


def random_parts(seed: int, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values [rows, time, dimensions] with NaN under the False elements, and bootstrap values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*MASK.shape, dimensions)
    rewards, values = (torch.where(MASK[..., None], torch.randn(shape, generator=generator), NAN) for _ in range(2))
    return rewards, values, torch.randn(len(MASK), dimensions, generator=generator)


@given(st.integers(0, 100), st.integers(1, 4), UNIT, UNIT)
def test_each_dimension_is_a_run_of_its_own(seed: int, dimensions: int, gamma: float, lam: float) -> None:
    """Bit for bit: what one reward gets does not depend on the others."""
    rewards, values, bootstrap = random_parts(seed, dimensions)
    settings = {"gamma": gamma, "gae_lambda": lam}
    together = gae(rewards, values, MASK, bootstrap_values=bootstrap, **settings)
    for k in range(dimensions):
        alone = gae(rewards[..., k], values[..., k], MASK, bootstrap_values=bootstrap[:, k], **settings)
        for found, expected in zip(together, alone, strict=True):
            assert torch.equal(found[..., k], expected)


@given(st.integers(0, 100), st.integers(1, 4), UNIT, UNIT)
def test_the_weighted_sum_is_the_run_of_the_weighted_rewards(
    seed: int, dimensions: int, gamma: float, lam: float
) -> None:
    """GAE is linear, also where every row has weights of its own."""
    rewards, values, bootstrap = random_parts(seed, dimensions)
    weights = torch.randn(len(MASK), dimensions, generator=torch.Generator().manual_seed(seed + 1))
    settings = {"gamma": gamma, "gae_lambda": lam}
    parts = gae(rewards, values, MASK, bootstrap_values=bootstrap, **settings)
    total = gae(
        torch.einsum("btk,bk->bt", rewards, weights),
        torch.einsum("btk,bk->bt", values, weights),
        MASK,
        bootstrap_values=torch.einsum("bk,bk->b", bootstrap, weights),
        **settings,
    )
    for found, expected in zip(parts, total, strict=True):
        torch.testing.assert_close(torch.einsum("btk,bk->bt", found, weights), expected, atol=1e-5, rtol=1e-5)


def test_whitening_leaves_the_units_of_each_dimension_behind_but_not_the_penalties() -> None:
    """A dimension in other units (times 1000, plus 5) counts the same; kl_coef still scales the last one."""
    parts = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    white = whiten_dimensions(parts, MASK)
    for k in range(2):
        assert torch.equal(white[..., k], whiten(parts[..., k], MASK))
        assert white[..., k][MASK].mean().item() == pytest.approx(0.0, abs=1e-6)
        assert white[..., k][MASK].std().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(white[..., 2], parts[..., 2])
    other = parts * torch.tensor([1000.0, 0.01, 1.0]) + torch.tensor([5.0, 0.0, 0.0])
    torch.testing.assert_close(whiten_dimensions(other, MASK), white, atol=1e-3, rtol=1e-3)


def test_a_dimension_that_says_the_same_everywhere_counts_nothing() -> None:
    parts = torch.stack([torch.full((3, 5), 7.0), torch.randn(3, 5), torch.zeros(3, 5)], dim=-1)
    assert whiten_dimensions(parts, MASK)[..., 0].abs().max().item() == 0.0

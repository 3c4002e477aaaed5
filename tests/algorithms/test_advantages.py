"""GAE against its definition as a sum over all later tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.advantages import gae

NAN = float("nan")
UNIT = st.floats(0, 1)


def random_batch(seed: int, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values with NaN under the False elements, and bootstrap values."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.where(mask, torch.randn(mask.shape, generator=generator), NAN) for _ in range(2))
    return rewards, values, torch.randn(len(mask), generator=generator)


def direct_sum(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, for a row without padding."""
    after = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(rewards))]


@given(
    st.integers(0, 100), st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), UNIT, UNIT
)
def test_advantages_equal_the_double_sum_over_the_tokens_that_count(
    seed: int, rows: list[list[bool]], gamma: float, lam: float
) -> None:
    """FAULTS B6: for any mask, as if the masked tokens were not there; NaN under the mask is never read."""
    mask = torch.tensor(rows)
    rewards, values, bootstrap = random_batch(seed, mask)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam, bootstrap_values=bootstrap)
    for row, counts in enumerate(mask):
        r, v = rewards[row][counts].tolist(), values[row][counts].tolist()
        expected = direct_sum(r, v, bootstrap[row].item(), gamma, lam)
        assert advantages[row][counts].tolist() == pytest.approx(expected, abs=1e-4)
        assert returns[row][counts].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=True)], abs=1e-4
        )
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()
    assert advantages.dtype == returns.dtype == torch.float32


def test_three_tokens_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5, bootstrap_values=torch.zeros(1))
    # deltas: 0.125 - 0.5 = -0.375; 0.375 - 0.25 = 0.125; 1 - 0.75 = 0.25; factor 0.25
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.1875, 0.125 + 0.25 * 0.25, 0.25]]
    assert returns.tolist() == [[0.171875, 0.4375, 1.0]]


def test_lambda_1_gives_monte_carlo_returns() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    rewards, values, bootstrap = random_batch(0, mask)
    _, returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=1.0, bootstrap_values=bootstrap)
    for row, length in enumerate((4, 2)):
        for t in range(length):
            rest = [0.9**k * rewards[row, t + k].item() for k in range(length - t)]
            expected = sum(rest) + 0.9 ** (length - t) * bootstrap[row].item()
            assert returns[row, t].item() == pytest.approx(expected, abs=1e-5)


def test_lambda_0_gives_one_step_errors() -> None:
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.0, bootstrap_values=torch.tensor([5.0]))
    assert advantages.tolist() == [[11.0, -13.0]]
    assert returns.tolist() == [[21.0, 7.0]]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_there_are_as_many_advantages_as_response_tokens(length: int) -> None:
    """FAULTS B5: rows of one, two and all tokens; what a critic says after the end does not count."""
    mask = torch.arange(5)[None] < length
    advantages, returns = gae(
        torch.full((1, 5), 1.0),
        torch.full((1, 5), 0.25),
        mask,
        gamma=1.0,
        gae_lambda=0.95,
        bootstrap_values=torch.zeros(1),
    )
    assert (advantages != 0).tolist() == mask.tolist()
    assert (returns != 0).tolist() == mask.tolist()


def test_a_masked_span_is_stepped_over() -> None:
    """FAULTS B6: the case of the report."""
    mask = torch.tensor([[True, True, False, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 9.0, 9.0, 1.0]])
    values = torch.tensor([[0.1, 0.2, 7.0, 7.0, 0.3]])
    spanned, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.9, bootstrap_values=torch.zeros(1))
    short, _ = gae(
        rewards[mask][None],
        values[mask][None],
        mask[mask][None],
        gamma=0.9,
        gae_lambda=0.9,
        bootstrap_values=torch.zeros(1),
    )
    assert torch.equal(spanned[mask], short[0])


def test_a_perfect_critic_of_a_truncated_row_has_no_advantage() -> None:
    """The value of the last state stands for the rest of a response that was cut by length."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    values = torch.full((2, 3), 2.0)
    advantages, returns = gae(
        torch.zeros(2, 3), values, mask, gamma=1.0, gae_lambda=0.9, bootstrap_values=torch.tensor([2.0, 0.0])
    )
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert returns[0].tolist() == [2.0, 2.0, 2.0]
    assert advantages[1].tolist() == pytest.approx([-2 * 0.81, -2 * 0.9, -2.0])


@given(st.integers(0, 3), st.permutations(range(3)))
def test_padding_and_row_order_change_nothing(padding: int, order: list[int]) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    rewards, values, bootstrap = random_batch(1, mask)
    settings = {"gamma": 0.99, "gae_lambda": 0.9}
    plain = gae(rewards, values, mask, bootstrap_values=bootstrap, **settings)

    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, padding), value=fill)[order]

    padded = gae(pad(rewards, NAN), pad(values, NAN), pad(mask, False), bootstrap_values=bootstrap[order], **settings)
    for a, b in zip(plain, padded, strict=True):
        assert torch.equal(b[:, :4], a[order])
        assert (b[:, 4:] == 0).all()


def test_no_gradient_reaches_the_critic() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    advantages, returns = gae(
        torch.ones(1, 2), values, mask, gamma=1.0, gae_lambda=1.0, bootstrap_values=torch.zeros(1)
    )
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize("wrong", [{"gamma": 1.1, "gae_lambda": 1.0}, {"gamma": 1.0, "gae_lambda": -0.1}])
def test_factors_outside_the_unit_interval_are_refused(wrong: dict[str, float]) -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"both must lie in \[0, 1\]"):
        gae(x, x, x == 0, bootstrap_values=torch.zeros(1), **wrong)

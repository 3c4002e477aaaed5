"""KL estimators against sums over an enumerable vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.kl import adapt_kl_coef, kl_estimate, kl_loss

LOGITS = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4)


def log_softmax(logits: list[float] | Tensor) -> Tensor:
    return torch.log_softmax(torch.as_tensor(logits, dtype=torch.float32), dim=-1)


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def mean_gradient_of_loss(logits_p: Tensor, log_q: Tensor, estimator: str) -> Tensor:
    """Average over tokens drawn from p of the gradient of one token's loss: the weights p are not differentiated."""
    logits = logits_p.clone().requires_grad_()
    log_p = log_softmax(logits)
    losses = kl_loss(log_p, log_q, estimator)
    return torch.autograd.grad((log_p.detach().exp() * losses).sum(), logits)[0]


@given(LOGITS, LOGITS)
def test_k1_and_k3_average_to_the_exact_kl(p: list[float], q: list[float]) -> None:
    """FAULTS C1: k3 and exact KL are never negative, k1 may be; all have the right mean but k2."""
    log_p, log_q = log_softmax(p), log_softmax(q)
    exact = exact_kl(log_p, log_q).item()
    assert exact >= -1e-6
    for estimator in ("k1", "k3"):
        mean = (log_p.exp() * kl_estimate(log_p, log_q, estimator)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-4)
    for estimator in ("k2", "k3", "abs"):
        assert (kl_estimate(log_p, log_q, estimator) >= 0).all()


def test_estimators_by_hand() -> None:
    log_p, log_q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5 and -1
    assert kl_estimate(log_p, log_q, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(log_p, log_q, "k2").tolist() == [0.125, 0.5]
    assert kl_estimate(log_p, log_q, "abs").tolist() == [0.5, 1.0]
    assert kl_estimate(log_p, log_q, "k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2], rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_identical_policies_have_kl_of_exactly_zero(estimator: str) -> None:
    """FAULTS C1."""
    log_p = log_softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)))
    assert (kl_estimate(log_p, log_p.clone(), estimator) == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_token_that_one_model_rules_out_stays_finite(estimator: str) -> None:
    far = torch.tensor([-1000.0, 0.0], requires_grad=True)
    kl = kl_estimate(far, torch.tensor([0.0, -1000.0]), estimator)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert far.grad is not None
    assert torch.isfinite(far.grad).all()


def test_half_precision_log_probs_are_subtracted_in_float32() -> None:
    kl = kl_estimate(torch.tensor([-1.0]).bfloat16(), torch.tensor([-3.0]).bfloat16(), "k3")
    assert kl.dtype == torch.float32
    assert kl.item() == pytest.approx(math.exp(-2) + 1, rel=1e-6)


@given(LOGITS, LOGITS)
def test_the_gradient_of_k2_is_that_of_the_exact_kl(p: list[float], q: list[float]) -> None:
    """FAULTS C7."""
    logits, log_q = torch.tensor(p).requires_grad_(), log_softmax(q)
    (truth,) = torch.autograd.grad(exact_kl(log_softmax(logits), log_q), logits)
    torch.testing.assert_close(mean_gradient_of_loss(logits.detach(), log_q, "k2"), truth, atol=1e-5, rtol=1e-4)


def test_the_gradient_of_k3_is_that_of_the_reverse_kl() -> None:
    """FAULTS C7: the documented mismatch, on a two-token softmax."""
    logits, log_q = torch.tensor([2.0, 0.0]).requires_grad_(), log_softmax([0.0, 0.0])
    (forward,) = torch.autograd.grad(exact_kl(log_softmax(logits), log_q), logits)
    (reverse,) = torch.autograd.grad(exact_kl(log_q, log_softmax(logits)), logits)
    k3 = mean_gradient_of_loss(logits.detach(), log_q, "k3")
    torch.testing.assert_close(k3, reverse, atol=1e-6, rtol=1e-5)
    assert (k3 - forward).abs().max().item() > 0.1


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_descending_the_kl_loss_brings_the_policy_to_the_reference(estimator: str) -> None:
    """FAULTS C6: 20 steps of gradient descent make KL smaller at every step."""
    log_q = log_softmax([0.0, 0.5, -0.5, 1.0])
    logits = torch.tensor([0.5, 0.0, 0.0, 0.5])
    history = [exact_kl(log_softmax(logits), log_q).item()]
    for _ in range(20):
        logits = logits - 0.5 * mean_gradient_of_loss(logits, log_q, estimator)
        history.append(exact_kl(log_softmax(logits), log_q).item())
    assert history == sorted(history, reverse=True)
    assert history[-1] < 0.2 * history[0]


def test_the_reference_gets_no_gradient() -> None:
    log_p, log_q = (torch.tensor([value], requires_grad=True) for value in (-1.0, -2.0))
    kl_loss(log_p, log_q, "k2").sum().backward()
    assert log_p.grad is not None
    assert log_p.grad.item() == 1.0  # d = 1
    assert log_q.grad is None


def test_unknown_estimators_are_refused_with_the_allowed_ones() -> None:
    x = torch.zeros(1)
    for estimator in ("full", "k4"):
        with pytest.raises(ValueError, match="'k1', 'k2', 'k3', 'abs'"):
            kl_estimate(x, x, estimator)
    for estimator in ("k1", "abs", "full"):
        with pytest.raises(ValueError, match="'k2' and 'k3'"):
            kl_loss(x, x, estimator)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.1 * (1 + 0.1 * 0.032)),
        (60.0, 0.1 * (1 + 0.2 * 0.032)),
        (0.0, 0.1 * (1 - 0.2 * 0.032)),
        (-3.0, 0.1 * (1 - 0.2 * 0.032)),
    ],
)
def test_the_controller_moves_the_coefficient_towards_the_target(kl: float, expected: float) -> None:
    actual = adapt_kl_coef(0.1, kl, target=6.0, horizon=10_000, num_sequences=320)
    assert actual == pytest.approx(expected, rel=1e-12)


def test_the_controller_needs_a_target() -> None:
    with pytest.raises(ValueError, match="target = 0"):
        adapt_kl_coef(0.1, 1.0, target=0.0, horizon=10, num_sequences=1)
    with pytest.raises(ValueError, match="horizon = 0"):
        adapt_kl_coef(0.1, 1.0, target=1.0, horizon=0, num_sequences=1)

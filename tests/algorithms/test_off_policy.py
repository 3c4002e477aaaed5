"""Importance weights by their closed form, and by every response of a tiny vocabulary."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.losses import policy_loss
from fourfold.algorithms.off_policy import Importance, capped_share, effective_sample_share, importance_weights

LEVELS: tuple[Importance, ...] = ("token", "sequence")
LOG_PROBS = st.floats(-8, 0, width=32)
ROWS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=5)
# Every response of TIME tokens over a vocabulary of VOCABULARY.
VOCABULARY, TIME = 3, 2
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=TIME)))
WHOLE = torch.ones(RESPONSES.shape, dtype=torch.bool)


def row(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """log p, log q and mask of one response."""
    p, q = (torch.tensor([numbers]) for numbers in zip(*pairs, strict=True))
    return p, q, torch.ones(p.shape, dtype=torch.bool)


@given(ROWS, st.sampled_from(LEVELS), st.floats(1, 10))
def test_equal_distributions_weigh_exactly_1(pairs: list[tuple[float, float]], level: Importance, cap: float) -> None:
    p, _, mask = row(pairs)
    weights = importance_weights(p, p.clone(), mask, level, cap=cap)
    assert weights.tolist() == [[1.0] * len(pairs)]
    assert effective_sample_share(weights, mask) == 1.0


@given(ROWS, st.floats(0.5, 10))
def test_weights_are_ratios_of_probabilities_up_to_the_cap(pairs: list[tuple[float, float]], cap: float) -> None:
    p, q, mask = row(pairs)
    ratios = [math.exp(a) / math.exp(b) for a, b in pairs]
    expected = {"token": [min(r, cap) for r in ratios], "sequence": [min(math.prod(ratios), cap)] * len(pairs)}
    for level in LEVELS:
        found = importance_weights(p, q, mask, level, cap=cap)[0].tolist()
        assert found == pytest.approx(expected[level], rel=1e-4)
        assert max(found) <= cap * (1 + 1e-6)


def test_a_gap_of_ln_10_is_cut_at_2() -> None:
    """FAULTS H10."""
    p, q, mask = torch.zeros(1, 1), torch.full((1, 1), -math.log(10)), torch.tensor([[True]])
    assert importance_weights(p, q, mask, "token", cap=2.0).item() == 2.0
    assert importance_weights(p, q, mask, "token", cap=math.inf).item() == pytest.approx(10, rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_padding_neither_weighs_nor_is_weighed(level: Importance) -> None:
    nan = float("nan")
    p, q = torch.tensor([[-1.0, nan], [-2.0, -1.0]]), torch.tensor([[-1.2, nan], [-2.0, -1.5]])
    mask = torch.tensor([[True, False], [True, True]])
    found = importance_weights(p, q, mask, level, cap=9.0)
    alone = importance_weights(p[:1, :1], q[:1, :1], mask[:1, :1], level, cap=9.0)
    assert found[0].tolist() == [*alone[0].tolist(), 0.0] and bool(torch.isfinite(found).all())


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_distributions_with_nothing_in_common_stay_finite(gap: float) -> None:
    weights = importance_weights(
        torch.tensor([[gap]]), torch.zeros(1, 1), torch.tensor([[True]]), "token", cap=math.inf
    )
    assert 0 <= weights.item() < 1e9


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_none_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="above 0; try 2"):
        importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([[True]]), "token", cap=cap)


def test_shares_by_hand() -> None:
    """FAULTS H10: the fraction that is truncated is known."""
    weights = torch.tensor([[2.0, 1.0, 9.0], [2.0, 0.5, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert capped_share(weights, mask, 2.0) == 0.5 and capped_share(weights, mask, math.inf) == 0.0
    assert effective_sample_share(weights, mask) == pytest.approx(5.5**2 / (4 * 9.25))
    assert effective_sample_share(torch.zeros(1, 2), torch.tensor([[True, True]])) == 0.0
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert effective_sample_share(one, torch.ones(1, 4, dtype=torch.bool)) == 0.25


# --- a policy over every response -------------------------------------------------------------------------------------


def random_logits(seed: int) -> Tensor:
    """Of the first token, and of the second after each first one: [1 + VOCABULARY, VOCABULARY]."""
    return torch.randn((1 + VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs_of(logits: Tensor) -> Tensor:
    """Of the tokens of all responses: [responses, TIME]."""
    every = logits.log_softmax(dim=-1)
    first, second = RESPONSES.T
    return torch.stack([every[0, first], every[1 + first, second]], dim=1)


def gradient(p: Tensor, drawn_from: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Of the mean over the responses that `drawn_from` gives of PPO's loss in the logits of p, at ratio 1."""
    logits = p.clone().requires_grad_()
    log_probs = log_probs_of(logits)
    chances = log_probs_of(drawn_from).sum(dim=1).exp()
    slopes = torch.zeros_like(logits)
    for i, chance in enumerate(chances):
        loss = policy_loss(
            log_probs[i : i + 1],
            log_probs[i : i + 1].detach(),
            weights[i : i + 1] * advantages[i : i + 1],
            WHOLE[i : i + 1],
            clip_eps_low=0.2,
            clip_eps_high=0.2,
        )
        slopes += chance * torch.autograd.grad(loss.loss_sum, logits, retain_graph=True)[0]
    return slopes


def weights_of(p: Tensor, q: Tensor, level: Importance, cap: float = math.inf) -> Tensor:
    return importance_weights(log_probs_of(p), log_probs_of(q), WHOLE, level, cap=cap)


@pytest.mark.parametrize("seed", range(3))
def test_weighted_by_response_the_mean_gradient_is_that_of_the_trained_policy(seed: int) -> None:
    """Whatever the advantages are, those of what came before included; without weights it is another one."""
    p, q = random_logits(seed), random_logits(seed + 100)
    advantages = torch.randn(RESPONSES.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    truth = gradient(p, p, advantages, torch.ones_like(advantages))
    weighted = gradient(p, q, advantages, weights_of(p, q, "sequence"))
    torch.testing.assert_close(weighted, truth, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradient(p, q, advantages, torch.ones_like(advantages)), truth, atol=0.05)
    assert not torch.allclose(gradient(p, q, advantages, weights_of(p, q, "sequence", cap=0.5)), truth, atol=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_weighted_by_token_it_is_so_in_the_states_that_the_sampler_reaches(seed: int) -> None:
    """An advantage that depends on state and token only; the first token is q's in every state of the second."""
    p, q = random_logits(seed), random_logits(seed + 100)
    by_state = torch.randn((1 + VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed)).double()
    first, second = RESPONSES.T
    advantages = torch.stack([by_state[0, first], by_state[1 + first, second]], dim=1)
    mixed = torch.cat([q[:1], p[1:]])  # who reaches the second state as q does, and chooses there as p does
    truth = torch.cat(
        [
            gradient(p, torch.cat([p[:1], q[1:]]), advantages, torch.ones_like(advantages))[:1],
            gradient(p, mixed, advantages, torch.ones_like(advantages))[1:],
        ]
    )
    found = gradient(p, q, advantages, weights_of(p, q, "token"))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_a_token_is_its_weight_times_the_policy_gradient(level: Importance) -> None:
    """The weight itself is no part of the derivative."""
    p, q = random_logits(0), random_logits(1)
    log_probs = log_probs_of(p).float().requires_grad_()
    sampler = log_probs_of(q).float().requires_grad_()
    advantages = torch.randn(RESPONSES.shape, generator=torch.Generator().manual_seed(2))
    weights = importance_weights(log_probs, sampler, WHOLE, level, cap=1.5)
    assert not weights.requires_grad
    clipping = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": 3.0}
    loss = policy_loss(log_probs, log_probs.detach(), weights * advantages, WHOLE, **clipping)
    [slope] = torch.autograd.grad(loss.loss_sum, log_probs)
    torch.testing.assert_close(slope, -weights * advantages)


@given(st.floats(0.125, 4, width=32), st.floats(-3, 3, width=32, allow_subnormal=False), st.floats(0, 2, width=32))
def test_weighting_advantages_is_weighting_the_loss(ratio: float, advantage: float, weight: float) -> None:
    """max(-A r, -A clip(r)) and the dual clip's -c A are proportional to A for every weight that is not negative."""

    def loss(given: float) -> float:
        one = torch.tensor([[math.log(ratio)]])
        mask = torch.tensor([[True]])
        numbers = (one, torch.zeros(1, 1), torch.tensor([[given]]), mask)
        return policy_loss(*numbers, clip_eps_low=0.2, clip_eps_high=0.3, dual_clip=3.0).loss_sum.item()

    assert loss(weight * advantage) == pytest.approx(weight * loss(advantage), rel=1e-5, abs=1e-6)

"""PPO's losses by hand-computed numbers and by what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithms.losses import PolicyLoss, entropy_sum, policy_loss, value_loss

NAN = float("nan")
ONE = torch.tensor([[True]])


def one_token(ratio: float, advantage: float, **settings: float) -> tuple[PolicyLoss, float]:
    """The loss of a single token with this ratio, and its gradient with respect to the token's log-prob."""
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    clipping = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, **settings}
    loss = policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), ONE, **clipping)
    return loss, torch.autograd.grad(loss.loss_sum, log_probs)[0].item()


# (ratio, advantage, loss, gradient, clipped), clip range 0.2 on both sides.
POLICY_CASES = [
    (1.1, 2.0, -2.2, -2.2, 0),  # inside: -A r
    (1.5, 2.0, -2.4, 0.0, 1),  # risen enough: -A (1 + eps)
    (0.5, 2.0, -1.0, -1.0, 0),  # fell though good: pushed back in full
    (0.5, -2.0, 1.6, 0.0, 1),  # fallen enough: -A (1 - eps)
    (1.5, -2.0, 3.0, 3.0, 0),  # rose though bad: pushed back in full
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), POLICY_CASES)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    actual, slope = one_token(ratio, advantage)
    assert actual.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    assert slope == pytest.approx(gradient, rel=1e-6)
    assert actual.clipped_sum.item() == clipped
    assert actual.dual_clipped_sum.item() == 0
    assert actual.ratio_sum.item() == pytest.approx(ratio)
    assert actual.ratio_max.item() == pytest.approx(ratio)
    assert actual.approx_kl_sum.item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)


def test_the_two_sides_of_the_clip_range_are_separate() -> None:
    assert one_token(1.25, 1.0, clip_eps_high=0.28)[0].loss_sum.item() == pytest.approx(-1.25)
    assert one_token(1.5, 1.0, clip_eps_high=0.28)[0].loss_sum.item() == pytest.approx(-1.28)
    assert one_token(0.5, -1.0, clip_eps_low=0.3)[0].loss_sum.item() == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "dual_clipped"),
    [(5.0, -2.0, 6.0, 0.0, 1), (2.5, -2.0, 5.0, 5.0, 0), (0.5, -2.0, 1.6, 0.0, 0), (5.0, 2.0, -2.4, 0.0, 0)],
)
def test_dual_clip_limits_the_loss_of_bad_tokens_only(
    ratio: float, advantage: float, loss: float, gradient: float, dual_clipped: int
) -> None:
    actual, slope = one_token(ratio, advantage, dual_clip=3.0)
    assert actual.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    assert slope == pytest.approx(gradient, rel=1e-6)
    assert actual.dual_clipped_sum.item() == dual_clipped


@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=6), st.floats(-5, 5, width=32, allow_subnormal=False))
def test_an_unchanged_policy_has_ratio_1_clip_0_and_kl_0_exactly(tokens: list[float], advantage: float) -> None:
    log_probs = torch.tensor([tokens], requires_grad=True)
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    loss = policy_loss(
        log_probs,
        log_probs.detach().clone(),
        torch.full_like(log_probs, advantage).detach(),
        mask,
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        dual_clip=3.0,
    )
    assert loss.ratio_sum.item() == len(tokens)
    assert loss.ratio_max.item() == 1.0
    assert loss.clipped_sum.item() == loss.dual_clipped_sum.item() == 0
    assert loss.approx_kl_sum.item() == 0.0
    # The gradient is the policy gradient of REINFORCE, -A.
    assert torch.autograd.grad(loss.loss_sum, log_probs)[0].tolist() == [[-advantage] * len(tokens)]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_an_enormous_move_stays_finite(gap: float, advantage: float) -> None:
    log_probs = torch.tensor([[gap]], requires_grad=True)
    loss = policy_loss(
        log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), ONE, clip_eps_low=0.2, clip_eps_high=0.2
    )
    loss.loss_sum.backward()
    assert log_probs.grad is not None
    for number in (loss.loss_sum, loss.approx_kl_sum, loss.ratio_sum, log_probs.grad):
        assert torch.isfinite(number).all()
    assert loss.ratio_max.item() == pytest.approx(math.exp(math.copysign(20, gap)), rel=1e-5)


# (value, old, return, loss, gradient, clipped), clip range 0.2.
VALUE_CASES = [
    (0.1, 0.0, 1.0, 0.405, -0.9, 0),  # inside: (V - R)^2 / 2
    (0.5, 0.0, 1.0, 0.32, 0.0, 1),  # moved enough towards the return
    (0.5, 0.0, -1.0, 1.125, 1.5, 0),  # moved away from it: pulled back in full
    (2.0, 0.0, 1.0, 0.5, 1.0, 0),  # overshot to the same distance and more than clipped would be
    (-0.5, 0.0, -1.0, 0.32, 0.0, 1),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "gradient", "clipped"), VALUE_CASES)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: int
) -> None:
    """FAULTS E9: the clip limits the move; the gradient is zero where the clipped branch is the larger one."""
    values = torch.tensor([[value]], requires_grad=True)
    actual = value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), ONE, clip_eps=0.2)
    assert actual.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    assert actual.clipped_sum.item() == clipped
    assert torch.autograd.grad(actual.loss_sum, values)[0].item() == pytest.approx(gradient, rel=1e-6)


def test_a_value_clip_of_zero_is_no_clip() -> None:
    values = torch.tensor([[5.0]], requires_grad=True)
    loss = value_loss(values, torch.zeros(1, 1), torch.ones(1, 1), ONE, clip_eps=0.0)
    assert loss.loss_sum.item() == 8.0
    assert loss.clipped_sum.item() == 0
    assert torch.autograd.grad(loss.loss_sum, values)[0].item() == 4.0


def test_an_unchanged_critic_is_not_clipped() -> None:
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 5, dtype=torch.bool)
    loss = value_loss(values, values.clone(), torch.zeros(4, 5), mask, clip_eps=0.2)
    assert loss.clipped_sum.item() == 0
    assert loss.loss_sum.item() == pytest.approx(0.5 * values.square().sum().item(), rel=1e-6)


LENGTHS = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def batch(lengths: list[int], padding: int = 0) -> tuple[list[Tensor], Tensor]:
    """Three [batch, time] tensors with NaN padding, and the mask."""
    mask = torch.arange(5 + padding) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(sum(lengths))
    tensors = [0.4 * torch.randn(len(lengths), 5, generator=generator) for _ in range(3)]
    padded = [torch.nn.functional.pad(x, (0, padding)) for x in tensors]
    return [torch.where(mask, x, NAN) for x in padded], mask


def policy(x: Tensor, y: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    return policy_loss(x, y, z, mask, clip_eps_low=0.1, clip_eps_high=0.2, dual_clip=1.5).loss_sum


def value(x: Tensor, y: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    return value_loss(x, y, z, mask, clip_eps=0.2).loss_sum


def entropy(x: Tensor, y: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    return entropy_sum(x, mask)


@pytest.mark.parametrize("loss", [policy, value, entropy])
@given(lengths=LENGTHS, padding=st.integers(0, 3), micro=st.integers(1, 5), seed=st.integers(0, 9))
def test_micro_batches_row_order_and_padding_change_neither_loss_nor_gradient(
    loss: Callable[..., Tensor], lengths: list[int], padding: int, micro: int, seed: int
) -> None:
    """FAULTS F2, F16: sums, divided once by the tokens of the whole, for the critic's loss as for the actor's."""
    whole, mask = batch(lengths)
    x = whole[0].requires_grad_()
    total = loss(x, *whole[1:], mask) / mask.sum()
    (gradient,) = torch.autograd.grad(total, x)
    parts, padded_mask = batch(lengths, padding)
    leaf = parts[0].requires_grad_()
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    summed = 0.0
    for rows in order.split(micro):
        part = loss(leaf[rows], *(p[rows] for p in parts[1:]), padded_mask[rows]) / padded_mask.sum()
        part.backward()
        summed += part.item()
    assert summed == pytest.approx(total.item(), rel=1e-5, abs=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[:, :5], gradient, atol=1e-6, rtol=1e-5)
    # NaN padding is harmless in the gradient too.
    assert (leaf.grad[~padded_mask] == 0).all()


def test_diagnostics_ignore_padding() -> None:
    tensors, mask = batch([2, 5, 1], padding=2)
    loss = policy_loss(tensors[0], tensors[1], tensors[2], mask, clip_eps_low=0.1, clip_eps_high=0.1)
    log_ratio = (tensors[0] - tensors[1])[mask]
    assert loss.ratio_sum.item() == pytest.approx(log_ratio.exp().sum().item(), rel=1e-6)
    assert loss.ratio_max.item() == pytest.approx(log_ratio.exp().max().item(), rel=1e-6)
    assert loss.approx_kl_sum.item() == pytest.approx((log_ratio.exp() - 1 - log_ratio).sum().item(), rel=1e-4)
    for number in (loss.clipped_sum, loss.approx_kl_sum, loss.ratio_sum, loss.ratio_max):
        assert not number.requires_grad


def test_half_precision_inputs_are_reduced_in_float32() -> None:
    half = torch.full((1, 300), -1.0).bfloat16()
    mask = torch.ones(1, 300, dtype=torch.bool)
    loss = policy_loss(half, half, torch.full((1, 300), 1.01), mask, clip_eps_low=0.2, clip_eps_high=0.2)
    assert loss.loss_sum.dtype == torch.float32
    assert loss.loss_sum.item() == pytest.approx(-303.0, rel=1e-6)
    assert entropy_sum(-half, mask).item() == 300.0


@pytest.mark.parametrize(
    "wrong",
    [{"clip_eps_low": 0.0}, {"clip_eps_low": 1.5}, {"clip_eps_high": 0.0}, {"dual_clip": 1.0}, {"dual_clip": -1.0}],
)
def test_clip_ranges_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="allowed are"):
        policy_loss(x, x, x, ONE, **{"clip_eps_low": 0.2, "clip_eps_high": 0.2, **wrong})
    with pytest.raises(ValueError, match=r"clip_eps = -0\.2"):
        value_loss(x, x, x, ONE, clip_eps=-0.2)


@given(st.integers(0, 50), st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_each_dimension_has_a_value_loss_and_a_clip_range_of_its_own(seed: int, first: float, second: float) -> None:
    """As often as there are dimensions the loss of one, with its own `clip_eps`, gradient included."""
    generator = torch.Generator().manual_seed(seed)
    values, old, target = (torch.randn(2, 3, 2, generator=generator) for _ in range(3))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values[~mask], target[~mask] = NAN, NAN
    values.requires_grad_(True)
    both = value_loss(values, old, target, mask, clip_eps=torch.tensor([first, second]))
    slopes = torch.autograd.grad(both.loss_sum.sum(), values)[0]
    for k, eps in enumerate((first, second)):
        alone = values[..., k].detach().requires_grad_(True)
        loss = value_loss(alone, old[..., k], target[..., k], mask, clip_eps=eps)
        assert both.loss_sum[k].item() == pytest.approx(loss.loss_sum.item(), rel=1e-6)
        assert both.clipped_sum[k].item() == loss.clipped_sum.item()
        torch.testing.assert_close(slopes[..., k], torch.autograd.grad(loss.loss_sum, alone)[0])

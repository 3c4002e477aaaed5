"""The clipped losses of PPO (Schulman et al. 2017) as sums over tokens.

A caller divides once by the tokens of the whole mini-batch: a mean of means would weigh a token by its micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from fourfold.algorithms.masking import over_dimensions

# A log-ratio of 20 is a ratio of 5e8: clipping has long decided the loss, and exp stays finite.
_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss_sum` carries the gradient; the rest are diagnostics over the same tokens.

    `clipped_sum` counts tokens whose clipped branch decides, so that their gradient is 0; `dual_clipped_sum` those
    that the dual clip decides; `approx_kl_sum` is k3 of KL(old, new); `ratio_max` is 0 where no token counts.
    """

    loss_sum: Float32[Tensor, ""]
    clipped_sum: Int64[Tensor, ""]
    dual_clipped_sum: Int64[Tensor, ""]
    approx_kl_sum: Float32[Tensor, ""]
    ratio_sum: Float32[Tensor, ""]
    ratio_max: Float32[Tensor, ""]


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """`loss_sum` carries the gradient; `clipped_sum` counts tokens whose clipped branch decides; each a dimension."""

    loss_sum: Float32[Tensor, "*dimensions"]
    clipped_sum: Int64[Tensor, "*dimensions"]


def policy_loss(
    log_probs: Float[Tensor, "batch time"],
    old_log_probs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """sum_t max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(log pi - log pi_old).

    Schulman et al. 2017, equation 7; unequal sides: Yu et al. 2025 (DAPO). With `dual_clip` c > 1 the loss of a token
    with A < 0 is at most -c A (Ye et al. 2020, equation 5): one that became far more likely cannot rule a batch.

    >>> one, mask = torch.ones(1, 1), torch.tensor([[True]])
    >>> loss = policy_loss(one * 0.5, one * 0.0, one, mask, clip_eps_low=0.2, clip_eps_high=0.2)
    >>> round(loss.loss_sum.item(), 4), loss.clipped_sum.item(), round(loss.ratio_max.item(), 4)
    (-1.2, 1, 1.6487)
    """
    _check_clipping(clip_eps_low, clip_eps_high, dual_clip)
    # What is padding is taken out before exp: a NaN that only the forward hides would come back in the gradient.
    log_ratio = torch.where(mask, log_probs.float() - old_log_probs.float(), 0.0)
    log_ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    advantage = torch.where(mask, advantages.float(), 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    loss = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(mask)
    if dual_clip:
        dual_clipped = (advantage < 0) & (loss > -dual_clip * advantage)
        loss = torch.where(dual_clipped, -dual_clip * advantage, loss)
    with torch.no_grad():
        approx_kl = (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0)
        counted_ratio = torch.where(mask, ratio, 0.0)
    return PolicyLoss(
        loss_sum=loss.sum(),
        clipped_sum=(clipped > unclipped).sum(),
        dual_clipped_sum=dual_clipped.sum(),
        approx_kl_sum=approx_kl.sum(),
        ratio_sum=counted_ratio.sum(),
        ratio_max=counted_ratio.max(),
    )


def value_loss(
    values: Float[Tensor, "batch time *dimensions"],
    old_values: Float[Tensor, "batch time *dimensions"],
    returns: Float[Tensor, "batch time *dimensions"],
    mask: Bool[Tensor, "batch time"],
    *,
    clip_eps: float | Float[Tensor, "*dimensions"],
) -> ValueLoss:
    """sum_t 0.5 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2); without the second where `clip_eps` is 0.

    Of several dimensions each has a sum of its own, and may have its own `clip_eps`.

    Clipping limits the *move* of a value in one update, not the size of the loss. Where the clipped branch is the
    larger one, the value has moved enough towards its return and the token's gradient is 0; a value that moved away
    is pulled back in full:

    >>> value, mask = torch.tensor([[0.5]], requires_grad=True), torch.tensor([[True]])
    >>> old = torch.zeros(1, 1)
    >>> towards = value_loss(value, old, torch.tensor([[1.0]]), mask, clip_eps=0.2)
    >>> round(towards.loss_sum.item(), 4), towards.clipped_sum.item()  # (0.2 - 1)^2 / 2 beats (0.5 - 1)^2 / 2
    (0.32, 1)
    >>> torch.autograd.grad(towards.loss_sum, value)[0].item()
    0.0
    >>> away = value_loss(value, old, torch.tensor([[-1.0]]), mask, clip_eps=0.2)
    >>> away.loss_sum.item(), away.clipped_sum.item(), torch.autograd.grad(away.loss_sum, value)[0].item()
    (1.125, 0, 1.5)
    """
    ranges = torch.as_tensor(clip_eps, dtype=torch.float32, device=values.device)
    if bool((ranges < 0).any()):
        raise ValueError(f"clip_eps = {clip_eps}: it must be above 0, or 0 for no clipping; try 0.2")
    counted, over = over_dimensions(mask, values), (0, 1)
    value = torch.where(counted, values.float(), 0.0)
    old = torch.where(counted, old_values.float(), 0.0)
    target = torch.where(counted, returns.float(), 0.0)
    unclipped = (value - target).square()
    clipped = (old + (value - old).clamp(-ranges, ranges) - target).square()
    # Inside the range both branches are the same number but for rounding, which must not count as clipped.
    outside = ((value - old).abs() > ranges) & (ranges > 0)
    return ValueLoss(
        loss_sum=0.5 * torch.where(outside, torch.maximum(unclipped, clipped), unclipped).sum(dim=over),
        clipped_sum=(outside & (clipped > unclipped)).sum(dim=over),
    )


def entropy_sum(entropy: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float32[Tensor, ""]:
    """Sum of the policy's entropy over the response tokens: the bonus is `entropy_coef` times this."""
    return torch.where(mask, entropy.float(), 0.0).sum()


def _check_clipping(clip_eps_low: float, clip_eps_high: float, dual_clip: float) -> None:
    if not (0 < clip_eps_low <= 1 and clip_eps_high > 0 and (dual_clip == 0 or dual_clip > 1)):
        raise ValueError(
            f"clip_eps_low = {clip_eps_low}, clip_eps_high = {clip_eps_high}, dual_clip = {dual_clip}: allowed are "
            "0 < clip_eps_low <= 1, clip_eps_high > 0 and dual_clip > 1 (0: off); try 0.2, 0.2 and 0 or 3"
        )

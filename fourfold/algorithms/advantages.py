"""Generalised advantage estimation over the response tokens of a padded batch, of one reward or of several at once."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from fourfold.algorithms.masking import over_dimensions, whiten


@torch.no_grad()
def gae(
    rewards: Float32[Tensor, "batch time *dimensions"],
    values: Float32[Tensor, "batch time *dimensions"],
    mask: Bool[Tensor, "batch time"],
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Float32[Tensor, "batch *dimensions"],
) -> tuple[Float32[Tensor, "batch time *dimensions"], Float32[Tensor, "batch time *dimensions"]]:
    """Advantages and returns; both 0 where `mask` is False.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  R_t = A_t + V_t
    (Schulman et al. 2016, equation 16). t+1 is the next token under the mask: what lies between, such as the output
    of a tool, is stepped over without decay. After the last one, V is `bootstrap_values`: 0 for a response that ended,
    the value of its last state for one that was cut by length. Each dimension is a run of its own; A is linear in
    rewards and values, so the weighted sum of all advantages is that of the weighted rewards and values.
    """
    if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
        raise ValueError(f"gamma = {gamma}, gae_lambda = {gae_lambda}: both must lie in [0, 1]; try 1.0 and 0.95")
    advantages = torch.zeros_like(values)
    next_value = bootstrap_values
    next_advantage = torch.zeros_like(bootstrap_values)
    counted = over_dimensions(mask, values)
    for t in reversed(range(values.shape[1])):
        counts = counted[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, next_advantage, 0.0)
    return advantages, torch.where(counted, advantages + values, 0.0)


def whiten_dimensions(
    advantages: Float32[Tensor, "batch time dimensions"], mask: Bool[Tensor, "batch time"]
) -> Float32[Tensor, "batch time dimensions"]:
    """Each dimension whitened by itself but the last one, the penalties', which is kept as it is.

    So a weight says how much a standard deviation of a dimension counts, whatever units its scores have. The
    penalties are not whitened: kl_coef, which is a weight already, would cancel.
    """
    parts = [whiten(advantages[..., k], mask) for k in range(advantages.shape[-1] - 1)]
    return torch.stack([*parts, advantages[..., -1]], dim=-1)

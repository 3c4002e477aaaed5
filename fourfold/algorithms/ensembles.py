"""Values of several heads: the loss of each, on responses of its own drawing, and how far they differ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from fourfold.algorithms.masking import masked_sum


class EnsembleLoss(NamedTuple):
    """`loss_sum` carries the gradient; `spread_sum` is the sum over tokens of the standard deviation over heads."""

    loss_sum: Float32[Tensor, ""]
    spread_sum: Float32[Tensor, ""]


def ensemble_value_loss(
    values: Float[Tensor, "batch time heads"],
    returns: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    weights: Float32[Tensor, "batch heads"],
) -> EnsembleLoss:
    """sum_t mean_k 0.5 w_k (V_k - R)^2, each head with weights of its own for the responses.

    Weights drawn from Poisson(1) are what a bootstrap sample of the responses tends to (Oza and Russell 2001, "Online
    Bagging and Boosting"): their mean is 1, so the expected loss is that of one head.

    >>> values, one = torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 1)
    >>> loss = ensemble_value_loss(values, 0.0 * one, one > 0, torch.tensor([[1.0, 2.0]]))
    >>> loss.loss_sum.item(), loss.spread_sum.item()  # (0.5 * 1 * 1 + 0.5 * 2 * 9) / 2; |3 - 1| / 2
    (4.75, 1.0)
    """
    kept = torch.where(mask[..., None], values.float(), 0.0)
    target = torch.where(mask, returns.float(), 0.0)
    squared = (weights[:, None, :] * (kept - target[..., None]).square()).mean(dim=-1)
    spread = kept.detach().std(dim=-1, unbiased=False)
    return EnsembleLoss(loss_sum=0.5 * squared.sum(), spread_sum=masked_sum(spread, mask))

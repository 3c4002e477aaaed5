"""Reductions over the True elements of a mask, in float32.

`torch.where` and never `x * mask`: what lies under False may be NaN, and NaN * 0 is NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float32[Tensor, ""]:
    """Sum of the elements where `mask` is True."""
    return torch.where(mask, x.float(), 0.0).sum()


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float32[Tensor, ""]:
    """Mean over all elements where `mask` is True, whichever row they are in."""
    return masked_sum(x, mask) / _count(mask)


def masked_variance(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], unbiased: bool = True
) -> Float32[Tensor, ""]:
    """Variance over the elements where `mask` is True: sum (x - mean)^2 / (n - 1), or / n when not `unbiased`.

    One element has variance 0, not 0 / 0.
    """
    count = _count(mask)
    centred = torch.where(mask, x.float() - masked_mean(x, mask), 0.0)
    return centred.square().sum() / max(count - int(unbiased), 1)


def whiten(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], shift_mean: bool = True, eps: float = 1e-8
) -> Float32[Tensor, "*shape"]:
    """(x - mean) / sqrt(variance + eps) over the True elements, 0 elsewhere; the mean is kept unless `shift_mean`."""
    mean, variance = masked_mean(x, mask), masked_variance(x, mask)
    white = (x.float() - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def over_dimensions(mask: Bool[Tensor, "batch time"], like: Float[Tensor, "batch time *dimensions"]) -> Tensor:
    """The mask with an axis of size 1 for each further axis of `like`."""
    return mask.view(*mask.shape, *[1] * (like.ndim - mask.ndim))


def last_index(mask: Bool[Tensor, "batch time"]) -> Int64[Tensor, "batch"]:
    """Column of the last True of each row; the True elements need not be a prefix."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(dim=1)
    if bool((last < 0).any()):
        raise ValueError(
            f"mask: row {int((last < 0).int().argmax())} has no True; every row needs one; try dropping the empty rows"
        )
    return last


def position_ids(attention_mask: Bool[Tensor, "batch time"]) -> Int64[Tensor, "batch time"]:
    """Positions that count real tokens only, so that left padding does not shift them; 0 on the padding."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)


def _count(mask: Tensor) -> int:
    count = int(mask.sum())
    if count == 0:
        raise ValueError(
            f"mask: none of the {mask.numel()} elements is True, so there is nothing to average; "
            "at least one is needed; try dropping empty batches before"
        )
    return count

"""Several value losses over one body: what each of them counts, so that none rules what the body learns.

Factors of the losses, not of the rewards: whatever they are, each head's optimum is the mean return of its dimension.
They have mean 1, so that the sum of the losses keeps its scale, and none is more than 10 times, or less than a tenth
of, their geometric mean: a dimension that is known almost exactly, as the penalties are at the start, would otherwise
have all the gradient for its last digits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

# How far a factor may be from the geometric mean of all.
LARGEST = 10.0


def uncertainty_weights(squared_error: Float[Tensor, "dimensions"]) -> Float32[Tensor, "dimensions"]:
    """Factors 1 / sigma_k^2 with sigma_k^2 the mean squared error of dimension k, limited and scaled to mean 1.

    Kendall, Gal and Cipolla 2018, "Multi-Task Learning Using Uncertainty to Weigh Losses", equation 7: the loss
    sum over k of E_k / (2 sigma_k^2) + log sigma_k is smallest at sigma_k^2 = E_k. They descend to it; it is known,
    so nothing is learned and no state is kept.

    >>> uncertainty_weights(torch.tensor([1.0, 4.0]))
    tensor([1.6000, 0.4000])
    """
    return _balanced(squared_error)


def gradient_norm_weights(norms: Float[Tensor, "dimensions"]) -> Float32[Tensor, "dimensions"]:
    """Factors 1 / |g_k| with g_k the gradient of loss k in what all dimensions share, limited and scaled to mean 1.

    The fixed point of GradNorm (Chen et al. 2018) with its alpha = 0: the norms of all weighted gradients are alike.

    >>> gradient_norm_weights(torch.tensor([1.0, 3.0])) * torch.tensor([1.0, 3.0])
    tensor([1.5000, 1.5000])
    """
    return _balanced(norms)


def _balanced(sizes: Tensor) -> Tensor:
    """Factors 1 / size; a 0 or a NaN counts as the largest: a loss without a gradient needs no weight."""
    known = torch.isfinite(sizes) & (sizes > 0)
    if not bool(known.any()):
        return torch.ones_like(sizes, dtype=torch.float32)
    logs = torch.where(known, sizes, sizes[known].max()).double().log()
    limited = (logs.mean() - logs).exp().clamp(1.0 / LARGEST, LARGEST)
    return (limited / limited.mean()).float()

"""Numbers that tell whether learning works: for logs and diagnoses, never for a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from fourfold.algorithms.masking import masked_mean, masked_variance


def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for constant returns."""
    total = masked_variance(returns, mask).item()
    # Subtracted before it is masked; what lies under False may be NaN and stays under False.
    return 1.0 - masked_variance(returns - values, mask).item() / total if total > 0 else 0.0


def spearman(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> float:
    """Spearman's rank correlation, ties ranked by their average; 0 where x or y is constant.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 1000.0, 100.0]))
    0.5
    """
    a, b = (ranks - ranks.mean() for ranks in (_average_ranks(x), _average_ranks(y)))
    spread = (a.square().sum() * b.square().sum()).sqrt().item()
    return (a @ b).item() / spread if spread > 0 else 0.0


def correlations(x: Float[Tensor, "n dimensions"]) -> Float64[Tensor, "dimensions dimensions"]:
    """Pearson's correlation of every two columns; 0 with a constant one, and 1 of each with itself.

    >>> correlations(torch.tensor([[1.0, -2.0, 5.0], [2.0, -4.0, 5.0]]))[0]
    tensor([ 1., -1.,  0.], dtype=torch.float64)
    """
    centred = x.double() - x.double().mean(dim=0)
    norms = centred.square().sum(dim=0).sqrt()
    # Rounding of the mean leaves a constant column with a norm that is not quite 0.
    constant = (x == x[:1]).all(dim=0)
    unit = torch.where(constant, 0.0, centred / torch.where(constant, 1.0, norms))
    return (unit.T @ unit).clamp(-1.0, 1.0).fill_diagonal_(1.0)


def opposed_shares(x: Float[Tensor, "n dimensions"]) -> Float64[Tensor, "dimensions dimensions"]:
    """Share of the rows in which two columns have opposite signs: where one gains, the other loses.

    >>> opposed_shares(torch.tensor([[1.0, -2.0], [1.0, 2.0], [0.0, 1.0], [-1.0, -1.0]]))[0].tolist()
    [0.0, 0.25]
    """
    signs = x.double().sign()
    return (signs[:, :, None] * signs[:, None, :] < 0).double().mean(dim=0)


def distinct_n(token_lists: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams / all n-grams over all texts together (Li et al. 2016); 0 where no text has n tokens.

    >>> distinct_n([[1, 2, 1, 2], [1, 2]], 2)
    0.5
    """
    if n < 1:
        raise ValueError(f"n = {n}: an n-gram has at least 1 token; try 2")
    grams = [tuple(tokens[i : i + n]) for tokens in token_lists for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def moments(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> tuple[float, float]:
    """Mean and Bessel-corrected standard deviation over the True elements."""
    return masked_mean(x, mask).item(), masked_variance(x, mask).sqrt().item()


def _average_ranks(x: Tensor) -> Tensor:
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last_ranks = counts.cumsum(0).double()
    return (last_ranks - (counts - 1) / 2)[place]

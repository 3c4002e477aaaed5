"""Importance weights for responses that were drawn from another distribution than the one that is trained.

A sampler in few bits, or of another engine, draws from q, where the training engine has p with the same weights. PPO's
ratio starts at p, so what it averages over samples is that of q: a bias that does not shrink with more samples. With

    d_t = log p(token t) - log q(token t)

the weight exp(d_t) of a token ("token") makes the choice of each token that of p, in the states that q leads to; the
weight exp(sum_t d_t) of a response ("sequence") makes whole responses those of p, with a variance that grows with their
length. Both are cut at a cap, which trades the rest of the bias for variance (Espeholt et al. 2018, "IMPALA",
equation 1; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from fourfold.algorithms.masking import masked_sum

Importance = Literal["token", "sequence"]
# exp(20) is 5e8: without a cap, weights stay finite.
_LOG_WEIGHT_LIMIT = 20.0


@torch.no_grad()
def importance_weights(
    log_probs: Float[Tensor, "batch time"],
    sampler_log_probs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    level: Importance,
    *,
    cap: float,
) -> Float32[Tensor, "batch time"]:
    """min(exp(d), cap) for each token drawn from q, d of the token or of its whole row; 0 where `mask` is False.

    They carry no gradient. A loss that is proportional to the advantages is weighted by weighting these.

    >>> p, q = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.25]])
    >>> mask = torch.tensor([[True, True]])
    >>> importance_weights(p, q, mask, "token", cap=1.5)
    tensor([[1.5000, 1.2840]])
    >>> importance_weights(p, q, mask, "sequence", cap=9.0)
    tensor([[2.1170, 2.1170]])
    """
    if not cap > 0:
        raise ValueError(f"cap = {cap}: it must be above 0; try 2.0, or math.inf for none")
    d = torch.where(mask, log_probs.float() - sampler_log_probs.float(), 0.0)
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    weights = d.clamp(max=_LOG_WEIGHT_LIMIT).exp().clamp(max=cap)
    return torch.where(mask, weights, 0.0)


def capped_share(weights: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], cap: float) -> float:
    """Tokens whose weight is the cap / all tokens."""
    return float((mask & (weights >= cap)).sum() / mask.sum()) if math.isfinite(cap) else 0.0


def effective_sample_share(weights: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> float:
    """(sum w)^2 / (n sum w^2) over the n tokens: 1 where all weigh alike, 1 / n where one has all the weight.

    Kong 1992: the effective sample size in parts of the sample; 0 where nothing weighs anything.
    """
    total, squares = masked_sum(weights, mask), masked_sum(weights.square(), mask)
    return float(total.square() / (mask.sum() * squares)) if squares > 0 else 0.0

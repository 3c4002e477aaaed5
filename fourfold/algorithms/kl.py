"""Per-token estimates of KL(actor, reference) from sampled tokens, the KL loss, and the adaptive KL coefficient.

With d = log p(token) - log q(token) for a token sampled from p (Schulman 2020, "Approximating KL Divergence"):

    k1 = d                     unbiased, may be negative
    k2 = d^2 / 2               biased, never negative, low variance
    k3 = exp(-d) - 1 + d       unbiased, never negative
    abs = |d|                  a distance, not an estimate of KL
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

# exp(20) is 5e8: beyond it a single token would be all of a batch's sum, and float32 gradients would overflow.
_LOG_RATIO_LIMIT = 20.0


def kl_estimate(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"], estimator: str
) -> Float32[Tensor, "*shape"]:
    """KL(p || q) estimated at each token by "k1", "k2", "k3" or "abs", for tokens sampled from p.

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2").item()
    0.125
    """
    log_ratio = log_probs.float() - ref_log_probs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        limited = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        # Rounding alone can make the difference of two equal numbers negative.
        return (torch.expm1(-limited) + limited).clamp_min(0.0)
    if estimator == "abs":
        return log_ratio.abs()
    raise ValueError(
        f"KL estimator {estimator!r}: allowed are 'k1', 'k2', 'k3', 'abs' (log-probs of the sampled token are enough "
        "for them); 'full' needs the whole vocabulary: try log_probs.fused_full_kl"
    )


def kl_loss(
    log_probs: Float[Tensor, "*shape"], ref_log_probs: Float[Tensor, "*shape"], estimator: str
) -> Float32[Tensor, "*shape"]:
    """Per-token loss whose minimisation pulls p to q; sampled tokens, gradient through `log_probs` only.

    On average over tokens sampled from p, the gradient of "k2" is E[d grad log p], which is that of KL(p || q).
    The gradient of "k3" is E[(1 - exp(-d)) grad log p], which is that of the reverse KL(q || p): the minimum is the
    same, and so is the size near it, but farther away it is another loss. "k1" is refused: its gradient averages to 0.
    """
    if estimator not in ("k2", "k3"):
        raise ValueError(
            f"KL loss {estimator!r}: allowed are 'k2' and 'k3'; the gradient of 'k1' averages to zero and 'abs' has "
            "only a sign; try 'k2', whose gradient is that of KL(actor, reference)"
        )
    return kl_estimate(log_probs, ref_log_probs.detach(), estimator)


def adapt_kl_coef(
    kl_coef: float, kl_per_sequence: float, *, target: float, horizon: float, num_sequences: int
) -> float:
    """kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon).

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2 (there with a gain of 0.1 a
    step; `horizon` counts the sequences over which an error of 1 would double the coefficient).

    >>> adapt_kl_coef(0.1, 12.0, target=6.0, horizon=100, num_sequences=50)
    0.11000000000000001
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(
            f"target = {target}, horizon = {horizon}: both must be above 0; try target 6.0 and horizon 10000"
        )
    error = min(max(kl_per_sequence / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_sequences / horizon)

"""From raw scores, one a sequence, to shaped rewards, one a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from fourfold.algorithms.masking import last_index


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all values seen (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, values: Float[Tensor, "batch"]) -> Self:
        """The moments of the values seen so far and these: m2 = m2_a + m2_b + delta^2 n_a n_b / n, in float64."""
        if values.numel() == 0:
            return self
        new = values.detach().double()
        if not bool(torch.isfinite(new).all()):
            raise ValueError(
                f"scores: {int((~torch.isfinite(new)).sum())} of {new.numel()} are NaN or infinite and would spoil the "
                "statistics for good; only finite ones are allowed; try dropping the rows whose scorer failed"
            )
        new_count, new_mean = new.numel(), float(new.mean())
        new_m2 = float((new - new_mean).square().sum())
        count, delta = self.count + new_count, new_mean - self.mean
        mean = self.mean + delta * new_count / count
        m2 = self.m2 + new_m2 + delta**2 * self.count * new_count / count
        return type(self)(count, mean, m2)

    @property
    def std(self) -> float:
        """Bessel-corrected standard deviation; 1 (no scaling) before two values are known."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 1.0

    def to_dict(self) -> dict[str, float]:
        """For JSON, which keeps float64 exactly."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_dict(cls, state: Mapping[str, float]) -> Self:
        """The inverse of `to_dict`."""
        return cls(int(state["count"]), float(state["mean"]), float(state["m2"]))


def combine_scores(
    parts: Float32[Tensor, "batch dimensions"], weights: Float32[Tensor, "batch dimensions"]
) -> Float32[Tensor, "batch"]:
    """sum_d weights_d parts_d: one score a sequence out of the raw scores of several rewards, by each row's weights."""
    return (parts * weights).sum(dim=1)


def clip_scores(scores: Float32[Tensor, "batch"], bound: float) -> Float32[Tensor, "batch"]:
    """Scores limited to [-bound, bound]."""
    if bound <= 0:
        raise ValueError(f"bound = {bound}: it must be above 0, or every score becomes the same; try 5.0")
    return scores.clamp(-bound, bound)


def normalise_by_batch(scores: Float32[Tensor, "batch"], eps: float = 1e-8) -> Float32[Tensor, "batch"]:
    """(score - mean) / (std + eps) with the moments of this batch; a batch of equal scores becomes zeros."""
    std = scores.std() if scores.numel() > 1 else torch.zeros_like(scores.sum())
    return (scores - scores.mean()) / (std + eps)


def normalise_by_moments(
    scores: Float32[Tensor, "batch"], moments: RunningMoments, eps: float = 1e-8
) -> Float32[Tensor, "batch"]:
    """(score - mean) / (std + eps) with the moments of all scores seen so far."""
    return (scores - moments.mean) / (moments.std + eps)


def subtract_missing_eos(
    scores: Float32[Tensor, "batch"], truncated: Bool[Tensor, "batch"], penalty: float
) -> Float32[Tensor, "batch"]:
    """A fixed penalty for a response that did not end by itself, so that not ending never pays."""
    return torch.where(truncated, scores - penalty, scores)


def subtract_length_penalty(
    scores: Float32[Tensor, "batch"], lengths: Int64[Tensor, "batch"], penalty: float, shortest: int, longest: int
) -> Float32[Tensor, "batch"]:
    """`penalty` for every token under `shortest` or over `longest`; a limit of 0 is no limit."""
    if longest and shortest > longest:
        raise ValueError(
            f"shortest = {shortest} is above longest = {longest}: no length would be free; try swapping them"
        )
    outside = (shortest - lengths).clamp_min(0)
    if longest:
        outside = outside + (lengths - longest).clamp_min(0)
    return scores - penalty * outside


def per_token_rewards(
    scores: Float32[Tensor, "batch"],
    kl: Float32[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    kl_coef: float,
) -> Float32[Tensor, "batch time"]:
    """r_t = -kl_coef * kl_t + [t is the last response token] * score; 0 outside the mask.

    Ziegler et al. 2019, equation 2. A row whose score shall not count is passed with score 0.
    """
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    is_last = columns == last_index(response_mask)[:, None]
    rewards = torch.where(response_mask, -kl_coef * kl, 0.0)
    return torch.where(is_last, rewards + scores[:, None], rewards)

"""From opinions to a learning signal: shaped rewards, advantages and returns.

With a scalar critic there is one reward, the weighted total. With a critic of several dimensions each part of the
reward is one, and the last one holds the penalties (KL, length, missing EOS): d parts make d + 1 dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fourfold.algorithms.advantages import gae, whiten_dimensions
from fourfold.algorithms.masking import whiten
from fourfold.algorithms.rewards import (
    RunningMoments,
    clip_scores,
    normalise_by_batch,
    normalise_by_moments,
    per_token_rewards,
    subtract_length_penalty,
    subtract_missing_eos,
)
from fourfold.batch import Experience, ScoredRollout
from fourfold.config.schema import PpoSection


@dataclass(frozen=True)
class Shaping:
    """What reward shaping carries from step to step: the moments of all total scores, and of those of each part."""

    kl_coef: float
    moments: RunningMoments
    part_moments: tuple[RunningMoments, ...] = ()


def shape_scores(scored: ScoredRollout, settings: PpoSection, shaping: Shaping) -> Tensor:
    """Scores after normalisation, clipping and penalties, in this order: float32 [batch], or [batch, d + 1].

    Of several dimensions each part is normalised and clipped by itself; the last one has the penalties alone. A
    response that was cut by length keeps no score under truncation = "bootstrap": the value of its last state stands
    for everything after it.
    """
    if scored.by_dimension:
        pairs = zip(scored.score_parts.unbind(dim=1), shaping.part_moments, strict=True)
        parts = [_comparable(scores, settings, moments) for scores, moments in pairs]
        scores = torch.stack([*parts, _penalised(torch.zeros_like(scored.scores), scored, settings)], dim=1)
    else:
        scores = _penalised(_comparable(scored.scores, settings, shaping.moments), scored, settings)
    if settings.truncation != "bootstrap":
        return scores
    return torch.where(scored.truncated if scores.ndim == 1 else scored.truncated[:, None], 0.0, scores)


def _comparable(scores: Tensor, settings: PpoSection, moments: RunningMoments) -> Tensor:
    """Normalised, then clipped."""
    if settings.reward_normalization == "batch":
        scores = normalise_by_batch(scores)
    elif settings.reward_normalization == "running":
        scores = normalise_by_moments(scores, moments)
    return clip_scores(scores, settings.score_clip) if settings.score_clip else scores


def _penalised(scores: Tensor, scored: ScoredRollout, settings: PpoSection) -> Tensor:
    """Less the penalties for a missing EOS and for lengths outside the range."""
    scores = subtract_missing_eos(scores, scored.truncated, settings.missing_eos_penalty)
    shortest, longest = settings.length_range
    return subtract_length_penalty(scores, scored.lengths, settings.length_penalty, shortest, longest)


def estimate_advantages(scored: ScoredRollout, settings: PpoSection, shaping: Shaping) -> Experience:
    """Per-token rewards (KL on every token, score on the last), GAE, then whitened advantages.

    Returns are formed before whitening, so the critic learns unscaled values. Of several dimensions the advantages are
    the weighted sum, which without `whiten_dimensions` is what a scalar critic with the weighted values would give.
    """
    mask, shaped = scored.response_mask, shape_scores(scored, settings, shaping)
    if scored.by_dimension:
        parts = [per_token_rewards(scores, scored.kl, mask, 0.0) for scores in shaped[:, :-1].unbind(dim=1)]
        penalties = per_token_rewards(shaped[:, -1], scored.kl, mask, shaping.kl_coef)
        rewards = torch.stack([*parts, penalties], dim=2)
    else:
        rewards = per_token_rewards(shaped, scored.kl, mask, shaping.kl_coef)
    goes_on = scored.truncated if settings.truncation == "bootstrap" else torch.zeros_like(scored.truncated)
    last = scored.last_values
    advantages, returns = gae(
        rewards,
        scored.values,
        mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        bootstrap_values=torch.where(goes_on if last.ndim == 1 else goes_on[:, None], last, 0.0),
    )
    if settings.whiten_dimensions and scored.by_dimension:
        advantages = whiten_dimensions(advantages, mask)
    advantages = scored.total(advantages)
    if settings.whiten_advantages:
        advantages = whiten(advantages, mask)
    carried = {f.name: getattr(scored, f.name) for f in fields(ScoredRollout)}
    return Experience(**carried, rewards=rewards, advantages=advantages, returns=returns)

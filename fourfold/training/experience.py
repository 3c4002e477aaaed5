"""From opinions to a learning signal: shaped rewards, advantages and returns."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fourfold.algorithms.advantages import gae
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
    """What reward shaping carries from step to step."""

    kl_coef: float
    moments: RunningMoments


def shape_scores(scored: ScoredRollout, settings: PpoSection, shaping: Shaping) -> Tensor:
    """Scores after normalisation, clipping and penalties, in this order: float32 [batch].

    A response that was cut by length keeps no score under truncation = "bootstrap": the value of its last state
    stands for everything after it.
    """
    scores = scored.scores
    if settings.reward_normalization == "batch":
        scores = normalise_by_batch(scores)
    elif settings.reward_normalization == "running":
        scores = normalise_by_moments(scores, shaping.moments)
    if settings.score_clip:
        scores = clip_scores(scores, settings.score_clip)
    scores = subtract_missing_eos(scores, scored.truncated, settings.missing_eos_penalty)
    shortest, longest = settings.length_range
    scores = subtract_length_penalty(scores, scored.lengths, settings.length_penalty, shortest, longest)
    return torch.where(scored.truncated, 0.0, scores) if settings.truncation == "bootstrap" else scores


def estimate_advantages(scored: ScoredRollout, settings: PpoSection, shaping: Shaping) -> Experience:
    """Per-token rewards (KL on every token, score on the last), GAE, then whitened advantages.

    Returns are formed before whitening, so the critic learns unscaled values.
    """
    mask = scored.response_mask
    rewards = per_token_rewards(shape_scores(scored, settings, shaping), scored.kl, mask, shaping.kl_coef)
    goes_on = scored.truncated if settings.truncation == "bootstrap" else torch.zeros_like(scored.truncated)
    advantages, returns = gae(
        rewards,
        scored.values,
        mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        bootstrap_values=torch.where(goes_on, scored.last_values, 0.0),
    )
    if settings.whiten_advantages:
        advantages = whiten(advantages, mask)
    carried = {f.name: getattr(scored, f.name) for f in fields(ScoredRollout)}
    return Experience(**carried, rewards=rewards, advantages=advantages, returns=returns)

"""What normalisation, clipping and penalties did to the scores of a step: metrics of each that is switched on."""

from __future__ import annotations

import torch

from fourfold.algorithms.rewards import normalise_by_batch, normalise_by_moments, subtract_length_penalty
from fourfold.batch import ScoredRollout
from fourfold.config.schema import PpoSection
from fourfold.training.experience import Shaping


def shaping_row(scored: ScoredRollout, settings: PpoSection, shaping: Shaping) -> dict[str, float]:
    """Of the responses learned from; nothing of what is off (names: diagnostics/metrics)."""
    scores, row = scored.scores, dict[str, float]()
    if settings.reward_normalization != "none":
        running = settings.reward_normalization == "running"
        std = shaping.moments.std if running else float(scores.std()) if len(scores) > 1 else 0.0
        row["score_normalization_mean"] = shaping.moments.mean if running else float(scores.mean())
        row["score_normalization_std"] = std
        scores = normalise_by_moments(scores, shaping.moments) if running else normalise_by_batch(scores)
    if settings.score_clip:
        row["score_clipped_share"] = float((scores.abs() > settings.score_clip).float().mean())
    if settings.missing_eos_penalty:
        row["missing_eos_penalty_mean"] = settings.missing_eos_penalty * float(scored.truncated.float().mean())
    if settings.length_penalty:
        none, lengths = torch.zeros_like(scores), scored.lengths
        taken = -subtract_length_penalty(none, lengths, settings.length_penalty, *settings.length_range)
        row["length_penalty_mean"] = float(taken.mean())
        row["length_penalised_share"] = float((taken > 0).float().mean())
    return row

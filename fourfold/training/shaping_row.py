"""What normalisation, clipping and penalties did to the scores of a step: metrics of each that is switched on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.algorithms.rewards import (
    RunningMoments,
    normalise_by_batch,
    normalise_by_moments,
    subtract_length_penalty,
)
from fourfold.batch import ScoredRollout
from fourfold.config.schema import PpoSection
from fourfold.training.experience import Shaping


def shaping_row(
    scored: ScoredRollout, settings: PpoSection, shaping: Shaping, names: Sequence[str] = ("score",)
) -> dict[str, float]:
    """Of the responses learned from; nothing of what is off (metrics: diagnostics/metrics).

    Below a critic of several values each part of the reward is normalised and clipped by itself: `names` are theirs.
    """
    row, clipped = dict[str, float](), list[Tensor]()
    for ending, scores, moments in _normalised_alone(scored, shaping, names):
        if settings.reward_normalization != "none":
            running = settings.reward_normalization == "running"
            std = moments.std if running else float(scores.std()) if len(scores) > 1 else 0.0
            row[f"score_normalization_mean{ending}"] = moments.mean if running else float(scores.mean())
            row[f"score_normalization_std{ending}"] = std
            scores = normalise_by_moments(scores, moments) if running else normalise_by_batch(scores)
        clipped.append(scores.abs() > settings.score_clip)
    if settings.score_clip:
        row["score_clipped_share"] = float(torch.stack(clipped).any(dim=0).float().mean())
    if settings.missing_eos_penalty:
        row["missing_eos_penalty_mean"] = settings.missing_eos_penalty * float(scored.truncated.float().mean())
    if settings.length_penalty:
        none, lengths = torch.zeros_like(scored.scores), scored.lengths
        taken = -subtract_length_penalty(none, lengths, settings.length_penalty, *settings.length_range)
        row["length_penalty_mean"] = float(taken.mean())
        row["length_penalised_share"] = float((taken > 0).float().mean())
    return row


def _normalised_alone(
    scored: ScoredRollout, shaping: Shaping, names: Sequence[str]
) -> Iterator[tuple[str, Tensor, RunningMoments]]:
    """The raw scores that are normalised and clipped as one, with the ending of their metrics and running moments."""
    if not scored.by_dimension:
        yield "", scored.scores, shaping.moments
        return
    parts = zip(names, scored.score_parts.unbind(dim=1), shaping.part_moments, strict=True)
    yield from ((f"/{name}", scores, moments) for name, scores, moments in parts)

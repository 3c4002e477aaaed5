"""What a run is paid by: one source, or a weighted sum of several, each asked as a role of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from fourfold.algorithms.rewards import combine_scores
from fourfold.errors import RunFailed
from fourfold.scoring.sources import RewardSource


@dataclass(frozen=True)
class RewardPart:
    """A source of scores with its name and weight; `on_failure` = "stop" ends the run where a row has no valid score.

    Rows without one are not valid under "drop", whatever the other parts say of them: they are never learned from as 0.
    """

    name: str
    weight: float
    source: RewardSource
    on_failure: Literal["stop", "drop"]

    def require(self, valid: Bool[Tensor, "batch"]) -> None:
        """RunFailed where the settings want the run to stop at rows that are not valid."""
        failed = int((~valid).sum())
        if failed and self.on_failure == "stop":
            raise RunFailed(
                f"score: reward.parts.{self.name}: {failed} of {len(valid)} responses got no valid score (None, NaN or "
                f'infinite); mend that part, or set reward.parts.{self.name}.on_failure = "drop"'
            )


@dataclass(frozen=True)
class Combined:
    """Several sources: a row's score is the weighted sum of theirs, and valid where all of them are."""

    parts: tuple[RewardPart, ...]


Reward = RewardSource | Combined


def parts_of(reward: Reward) -> tuple[RewardPart, ...]:
    """Those of a combination; a source alone is one part of weight 1, whose failures `learnable` deals with."""
    return reward.parts if isinstance(reward, Combined) else (RewardPart("score", 1.0, reward, "drop"),)


def combined(
    parts: tuple[RewardPart, ...], scores: Float32[Tensor, "batch dimensions"], valid: Bool[Tensor, "batch dimensions"]
) -> tuple[Float32[Tensor, "batch"], Bool[Tensor, "batch"]]:
    """The weighted sum of the parts' scores, and where it is valid; RunFailed where a part's failures stop the run."""
    for index, part in enumerate(parts):
        part.require(valid[:, index])
    weights = torch.tensor([part.weight for part in parts], dtype=torch.float32, device=scores.device)
    return combine_scores(scores, weights), valid.all(dim=1)

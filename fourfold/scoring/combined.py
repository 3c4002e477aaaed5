"""What a run is paid by: one source, or a weighted sum of several, each asked as a role of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from fourfold.algorithms.rewards import combine_scores
from fourfold.batch import Rollout
from fourfold.data.told_weights import ToldWeights
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

    def require(self, valid: Bool[Tensor, "batch"], *, phase: str = "score", rows: str = "responses") -> None:
        """RunFailed where the settings want the run to stop at rows that are not valid; `rows` are what they are."""
        failed = int((~valid).sum())
        if failed and self.on_failure == "stop":
            key = f"reward.parts.{self.name}"
            raise RunFailed(
                f"{phase}: {key}: {failed} of {len(valid)} {rows} got no valid score (None, NaN or infinite); mend "
                f'that part, or set {key}.on_failure = "drop"',
                blamed=key,
            )


@dataclass(frozen=True)
class Combined:
    """Several sources: a row's score is the weighted sum of theirs, and valid where all of them are.

    Where prompts are `told` of weights, those of each row count instead of the parts' own.
    """

    parts: tuple[RewardPart, ...]
    told: ToldWeights | None = None


Reward = RewardSource | Combined


def parts_of(reward: Reward) -> tuple[RewardPart, ...]:
    """Those of a combination; a source alone is one part of weight 1, whose failures `learnable` deals with."""
    return reward.parts if isinstance(reward, Combined) else (RewardPart("score", 1.0, reward, "drop"),)


def asked_once(reward: Reward) -> list[tuple[RewardSource, list[int]]]:
    """The sources, and the parts that each of them says a score of: several, where they read one model's logits."""
    columns: dict[int, tuple[RewardSource, list[int]]] = {}
    for index, part in enumerate(parts_of(reward)):
        columns.setdefault(id(part.source), (part.source, []))[1].append(index)
    return list(columns.values())


def told_by(reward: Reward) -> ToldWeights | None:
    """What prompts are told of weights; None where the reward's are fixed."""
    return reward.told if isinstance(reward, Combined) else None


def weights_of(reward: Reward, rollout: Rollout) -> Float32[Tensor, "batch dimensions"]:
    """What the parts count in the score of each row."""
    told = told_by(reward)
    if told is not None:
        return told.read(rollout)
    weights = torch.tensor([part.weight for part in parts_of(reward)], dtype=torch.float32)
    return weights.to(rollout.sequences.device).repeat(len(rollout.sequences), 1)


def combined(
    parts: tuple[RewardPart, ...],
    scores: Float32[Tensor, "batch dimensions"],
    valid: Bool[Tensor, "batch dimensions"],
    weights: Float32[Tensor, "batch dimensions"],
) -> tuple[Float32[Tensor, "batch"], Bool[Tensor, "batch"]]:
    """The weighted sum of the parts' scores, and where it is valid; RunFailed where a part's failure stops a run."""
    for index, part in enumerate(parts):
        part.require(valid[:, index])
    return combine_scores(scores, weights), valid.all(dim=1)

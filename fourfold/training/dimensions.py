"""The dimensions of a vector critic as it learns: their clip ranges, and what the loss of each of them counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fourfold.algorithms.balance import gradient_norm_weights, uncertainty_weights
from fourfold.algorithms.losses import ValueLoss
from fourfold.algorithms.masking import masked_mean
from fourfold.algorithms.statistics import correlations, explained_variance, moments
from fourfold.batch import Experience
from fourfold.config.schema import RunConfig
from fourfold.models.heads import AnyNumberHead, VectorHead

Balance = Literal["fixed", "uncertainty", "grad_norm"]


@dataclass(frozen=True)
class Dimensions:
    """Names of the reward's parts and of the penalties, in the order of the critic's numbers; of a scalar one none.

    What their losses count lies in the critic's head (`VectorHead.loss_weights`), and so in its checkpoints: under
    "uncertainty" it follows from every rollout's errors before the first mini-batch; under "grad_norm" from the
    gradients of the mini-batch before.
    """

    names: tuple[str, ...] = ()
    value_clip_eps: tuple[float, ...] = ()
    balance: Balance = "fixed"

    @classmethod
    def of(cls, config: RunConfig) -> Dimensions:
        """What the settings say."""
        names, own = config.value_dimensions, config.critic.value_clip_eps
        ranges = tuple(own.get(name, config.ppo.value_clip_eps) for name in names)
        return cls(names, ranges, config.critic.loss_balance) if names else cls()

    def clip_range(self, default: float, like: Tensor) -> float | Tensor:
        """The clip range of a scalar critic, or of each dimension."""
        return torch.tensor(self.value_clip_eps, device=like.device) if self.names else default

    @torch.no_grad()
    def begin(self, head: AnyNumberHead, experience: Experience) -> None:
        """A rollout is to be learned from."""
        if self.balance != "uncertainty" or not isinstance(head, VectorHead):
            return
        errors = (experience.values - experience.returns).square().unbind(dim=-1)
        mask = experience.response_mask
        head.loss_weights.copy_(uncertainty_weights(torch.stack([masked_mean(each, mask) for each in errors])))

    def measure(self, loss: ValueLoss, hidden: Tensor, sums: dict[str, float]) -> None:
        """Add up |d loss_k / d hidden|^2 of each dimension, which is what the shared body gets of it.

        Rows and tokens have hidden states of their own, so the squares of a mini-batch are the sums over its
        micro-batches. Taken at what the heads read, as in Sener and Koltun 2018 (section 3.3), so that the body is not
        gone through once for each dimension.
        """
        if self.balance != "grad_norm":
            return
        for name, each in zip(self.names, loss.loss_sum, strict=True):
            [slope] = torch.autograd.grad(each, hidden, retain_graph=True)
            sums[f"squares/{name}"] += float(slope.float().square().sum())

    @torch.no_grad()
    def conclude(self, head: AnyNumberHead, sums: dict[str, float], before: Mapping[str, float]) -> None:
        """A mini-batch is done; `before` is what the sums were when it began."""
        if self.balance != "grad_norm" or not isinstance(head, VectorHead):
            return
        keys = [f"squares/{name}" for name in self.names]
        squares = torch.tensor([sums[key] - before.get(key, 0.0) for key in keys], dtype=torch.float64)
        head.loss_weights.copy_(gradient_norm_weights(squares.clamp_min(0.0).sqrt()))

    def note(self, loss: ValueLoss, weights: Tensor, sums: dict[str, float]) -> None:
        """Add a micro-batch to what is logged of each dimension."""
        rows = zip(self.names, loss.loss_sum.tolist(), loss.clipped_sum.tolist(), weights.tolist(), strict=True)
        for name, loss_sum, clipped, weight in rows:
            sums[f"value_loss/{name}"] += loss_sum
            sums[f"value_clipped/{name}"] += clipped
            sums[f"weighted_value_loss/{name}"] += weight * loss_sum

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What an update logs of each dimension."""
        tokens = sums["critic_tokens"]
        if not tokens:
            return {}
        row: dict[str, float] = {}
        total = sum(sums[f"weighted_value_loss/{name}"] for name in self.names)
        for name in self.names:
            plain, weighted = sums[f"value_loss/{name}"], sums[f"weighted_value_loss/{name}"]
            row[f"value_loss_per_token/{name}"] = plain / tokens
            row[f"value_clip_fraction/{name}"] = sums[f"value_clipped/{name}"] / tokens
            row[f"value_loss_share/{name}"] = weighted / total if total else 0.0
            row[f"value_loss_weight/{name}"] = weighted / plain if plain else 1.0
        return row


ONE_VALUE = Dimensions()


def dimensions_row(score_parts: Tensor, experience: Experience, config: RunConfig) -> dict[str, float]:
    """How the parts of a reward relate, and how well a critic of several dimensions knows each.

    `score_parts` are the raw scores [valid rows, parts] of a rollout, `experience` what was learned from.
    """
    row: dict[str, float] = {}
    parts, found = config.reward.dimensions, correlations(score_parts)
    for i, j in itertools.combinations(range(len(parts)), 2):
        row[f"score_correlation/{parts[i]}:{parts[j]}"] = float(found[i, j])
    mask, names = experience.response_mask, config.value_dimensions
    if not names:
        return row
    apart = zip(experience.values.unbind(dim=2), experience.returns.unbind(dim=2), strict=True)
    weights = experience.dimension_weights
    for k, (name, (values, returns)) in enumerate(zip(names, apart, strict=True)):
        row[f"explained_variance/{name}"] = explained_variance(values, returns, mask)
        _, row[f"advantage_std/{name}"] = moments((returns - values) * weights[:, k : k + 1], mask)
    return row

"""How the critic learns from a rollout beyond the plain value loss: dropout before its head, and an ensemble of heads.

Random numbers have addresses (docs/decisions/0004): what is left out of a response, and how often a head counts it, are
functions of the update's seed and the row alone, so that neither the way to cut micro-batches nor a resumed run changes
them. Values of a rollout are computed without any of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from fourfold.algorithms.ensembles import ensemble_value_loss
from fourfold.batch import Experience
from fourfold.config.schema import CriticSection, PpoSection
from fourfold.models.ensemble import EnsembleHead
from fourfold.rollout.sampler import row_seed
from fourfold.training.objectives import note_value_error, value_objective

if TYPE_CHECKING:
    from fourfold.training.learner import Learner, Totals


@dataclass(frozen=True)
class ValueLesson:
    """What counts of features and heads in one update with this seed."""

    settings: PpoSection
    critic: CriticSection
    seed: int

    def objective(
        self,
        learner: Learner,
        hidden: Float[Tensor, "batch response hidden"],
        part: Experience,
        rows: Int64[Tensor, "batch"],
        step: int,
        totals: Totals,
    ) -> Tensor:
        """The critic's objective on a micro-batch: `rows` are its rows of the rollout, `step` counts mini-batches."""
        if self.critic.dropout:
            hidden = hidden.float() * self.kept(rows, hidden.shape[-1], step).to(hidden.device)
        head = learner.critic.head
        if not isinstance(head, EnsembleHead):
            return value_objective(learner, hidden, part, self.settings, totals)
        each = head.each(hidden)
        note_value_error(each.mean(dim=-1), part, totals)
        weights = self.counts(rows, each.shape[-1]).to(each.device)
        loss = ensemble_value_loss(each, part.returns, part.response_mask, weights)
        totals.sums["value_loss"] += float(loss.loss_sum.detach())
        totals.sums["value_spread"] += float(loss.spread_sum)
        return self.settings.value_coef * loss.loss_sum

    def kept(self, rows: Int64[Tensor, "batch"], hidden: int, step: int) -> Float32[Tensor, "batch 1 hidden"]:
        """1 / (1 - p) for features that stay, 0 for those that are left out: the same at every token of a response.

        One mask a sequence is what Gal and Ghahramani 2016 ("A Theoretically Grounded Application of Dropout in
        Recurrent Neural Networks") derive: a value function is drawn, rather than noise at every token.
        """
        share = self.critic.dropout
        drawn = [self._generator("dropout", step, row) for row in rows.tolist()]
        kept = torch.stack([torch.rand(hidden, generator=generator) >= share for generator in drawn])
        return kept[:, None, :].float() / (1.0 - share)

    def counts(self, rows: Int64[Tensor, "batch"], heads: int) -> Float32[Tensor, "batch heads"]:
        """How often each head counts a response in all epochs of the update: drawn from Poisson(1)."""
        drawn = [self._generator("ensemble", row) for row in rows.tolist()]
        return torch.stack([torch.poisson(torch.ones(heads), generator=generator) for generator in drawn])

    def _generator(self, *address: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(row_seed(*address[:1], self.seed, *address[1:]))

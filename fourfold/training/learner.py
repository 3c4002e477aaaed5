"""Who learns in the stage ppo, with which optimizers, and what an update adds up."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field

from fourfold.algorithms.decoupling import Agreement
from fourfold.backends.base import RoleOptimizer
from fourfold.batch import Experience
from fourfold.config.schema import PpoSection, TrunkSection
from fourfold.memory.budget import BatchSizes
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.split import Part
from fourfold.models.trunk import drift
from fourfold.training.accounting import TrunkWork, Work
from fourfold.training.gradients import TrunkGradients

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrunkLearner:
    """A trained trunk with its optimizer; `start` is the trunk as it was at step 0."""

    part: Part
    start: Part
    optimizer: RoleOptimizer
    settings: TrunkSection
    gradients: TrunkGradients

    def step(self) -> float:
        """Step with the gradients that are there; returns their norm before clipping."""
        self.gradients.release()
        return self.optimizer.step()

    def discard(self) -> None:
        """Drop the gradients, also those that are set aside."""
        self.gradients.release()
        self.optimizer.discard()


@dataclass(frozen=True)
class Learner:
    """The two trained roles with their optimizers, and the trunk below them where it is trained too."""

    actor: Policy
    critic: Scorer
    actor_optimizer: RoleOptimizer
    critic_optimizer: RoleOptimizer
    trunk: TrunkLearner | None = None

    def optimizers(self) -> dict[str, RoleOptimizer]:
        """All of them, by name."""
        both = {"actor": self.actor_optimizer, "critic": self.critic_optimizer}
        return both | ({"trunk": self.trunk.optimizer} if self.trunk is not None else {})

    def conclude_actor(self, lesson: Lesson, approx_kl: float, tokens: int, totals: Totals) -> bool:
        """The actor's step, and that of the trunk with it; False when `target_kl` was reached and it was dropped.

        `approx_kl` is the sum of KL(old, new) over the `tokens` of the mini-batch.
        """
        target = lesson.settings.target_kl
        totals.sums["approx_kl"] += approx_kl
        totals.sums["actor_tokens"] += tokens
        if target is not None and approx_kl / tokens >= target:
            self.discard_actor()
            totals.sums["skipped"] += 1
            log.warning(
                "learn: KL(old, new) of %.4f nats a token reached ppo.target_kl = %g; the update ends in epoch %d of "
                "%d",
                approx_kl / tokens,
                target,
                totals.sums["epochs_run"] + 1,
                lesson.settings.num_epochs,
            )
            return False
        totals.sums["actor_grad_norm"] += self.actor_optimizer.step()
        totals.sums["actor_steps"] += 1
        if self.trunk is not None:
            totals.sums["trunk_grad_norm"] += self.trunk.step()
        return True

    def discard_actor(self) -> None:
        """Drop the gradients of the actor, and of the trunk with them."""
        self.actor_optimizer.discard()
        if self.trunk is not None:
            self.trunk.discard()

    def step_critic(self, totals: Totals) -> None:
        """The critic's step; the trunk waits for the actor's."""
        totals.sums["critic_grad_norm"] += self.critic_optimizer.step()
        totals.sums["critic_steps"] += 1


@dataclass(frozen=True)
class Lesson:
    """What an update learns from, and how."""

    experience: Experience
    activations: Activations
    settings: PpoSection
    temperature: float
    sizes: BatchSizes


@dataclass(frozen=True)
class Learned:
    """Metrics of an update (names and formulas: diagnostics/metrics) and the rows that each role worked through."""

    metrics: dict[str, float]
    actor: Work
    critic: Work
    trunk: TrunkWork


@dataclass
class Totals:
    """Sums over the tokens of all mini-batches of an update, and the largest of what has a maximum."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    actor: Work = field(default_factory=Work)
    critic: Work = field(default_factory=Work)
    trunk: TrunkWork = field(default_factory=TrunkWork)

    def restore(self, before: Totals) -> None:
        """Take back what was added since `before` was copied."""
        vars(self).update(vars(before))

    def measured(self, found: Agreement, critic_scale: float) -> None:
        """Note the trunk's two gradients of a mini-batch, and the factor that the critic's was given."""
        self.sums["trunk_measured"] += 1
        self.sums["trunk_critic_scale"] += critic_scale
        for name, value in found._asdict().items():
            self.sums[f"trunk_{name}"] += value

    def means(self, denominator: str, **names: str) -> dict[str, float]:
        """Sums over a denominator, under the metrics' names; none where nothing was counted: 0 would say something."""
        count = self.sums[denominator]
        return {metric: self.sums[name] / count for metric, name in names.items()} if count else {}

    def metrics(self, learner: Learner) -> dict[str, float]:
        """What an update logs, except how it ended."""
        policy = self.means(
            "actor_tokens",
            policy_loss_per_token="policy_loss",
            entropy_per_token_mean="entropy",
            approx_kl_per_token_mean="approx_kl",
            ratio_mean="ratio",
            policy_clip_fraction="clipped",
            dual_clip_fraction="dual_clipped",
        )
        if policy:
            policy["ratio_max"] = self.maxima["ratio"]
        return {
            **policy,
            **self.means("critic_tokens", value_loss_per_token="value_loss", value_clip_fraction="value_clipped"),
            **self.means("actor_steps", actor_grad_norm="actor_grad_norm"),
            **self.means("critic_steps", critic_grad_norm="critic_grad_norm"),
            **(self._of_trunk(learner.trunk) if learner.trunk is not None else {}),
            "actor_learning_rate": learner.actor_optimizer.learning_rate,
            "critic_learning_rate": learner.critic_optimizer.learning_rate,
            "actor_optimizer_steps": self.sums["actor_steps"],
            "critic_optimizer_steps": self.sums["critic_steps"],
            "epochs_run": self.sums["epochs_run"],
            "mini_batches_skipped": self.sums["skipped"],
        }

    def _of_trunk(self, trunk: TrunkLearner) -> dict[str, float]:
        measured = self.means(
            "trunk_measured",
            trunk_gradient_cosine="trunk_cosine",
            trunk_actor_grad_norm="trunk_actor_norm",
            trunk_critic_grad_norm="trunk_critic_norm",
            trunk_critic_scale_mean="trunk_critic_scale",
        )
        penalty = self.means("joint_tokens", trunk_decoupling_penalty="squared_cosine")
        return {
            **measured,
            **self.means("actor_steps", trunk_grad_norm="trunk_grad_norm"),
            **(penalty if trunk.settings.decoupling else {}),
            "trunk_learning_rate": trunk.optimizer.learning_rate,
            "trunk_drift": drift(trunk.part, trunk.start),
        }

"""Who learns in the stage ppo, with which optimizers, when they step, and what an update adds up."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from fourfold.algorithms.decoupling import Agreement
from fourfold.backends.base import RoleOptimizer
from fourfold.backends.scaling import LossScale
from fourfold.batch import Experience
from fourfold.config.schema import PpoSection, TrunkSection
from fourfold.memory.budget import BatchSizes, stops_when_short
from fourfold.models.ensemble import EnsembleHead
from fourfold.models.own_critic import OwnCritic
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.split import Part
from fourfold.models.trunk import drift
from fourfold.training.accounting import TrunkWork, Work
from fourfold.training.dimensions import ONE_VALUE, Dimensions
from fourfold.training.gradients import TrunkGradients

if TYPE_CHECKING:
    from fourfold.training.value_lesson import ValueLesson

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrunkLearner:
    """A trained trunk with its optimizer; `start` is the trunk as it was at step 0."""

    part: Part
    start: Part
    optimizer: RoleOptimizer
    settings: TrunkSection
    gradients: TrunkGradients

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
    values: Dimensions = ONE_VALUE

    @property
    def one_pass(self) -> bool:
        """Whether actor and critic learn from one pass over a trained trunk, unless it is in turns."""
        return self.trunk is not None and not isinstance(self.critic, OwnCritic)

    @property
    def ensemble(self) -> bool:
        """Whether the critic has several heads."""
        return isinstance(self.critic.head, EnsembleHead)

    def optimizers(self) -> dict[str, RoleOptimizer]:
        """All of them, by name."""
        both = {"actor": self.actor_optimizer, "critic": self.critic_optimizer}
        return both | ({"trunk": self.trunk.optimizer} if self.trunk is not None else {})

    @property
    def loss_scale(self) -> LossScale | None:
        """What all optimizers scale losses with in float16."""
        return self.actor_optimizer.loss_scale

    def reached(self, lesson: Lesson, approx_kl: float, mini: Tensor, totals: Totals) -> bool:
        """Whether `target_kl` was reached: then the gradients of the actor, and of the trunk, are dropped.

        `approx_kl` is the sum of KL(old, new) over the tokens of the mini-batch.
        """
        target, tokens = lesson.settings.target_kl, lesson.tokens(mini)
        totals.sums["approx_kl"] += approx_kl
        totals.sums["actor_tokens"] += tokens
        # A mean that is not finite comes of a loss that is not: an overflow, not a move of the policy.
        if target is None or not target <= approx_kl / tokens < math.inf:
            return False
        self.discard_actor()
        log.warning(
            "learn: KL(old, new) of %.4f nats a token reached ppo.target_kl = %g; the update ends in epoch %d of %d",
            approx_kl / tokens,
            target,
            totals.sums["epochs_run"] + 1,
            lesson.settings.num_epochs,
        )
        return True

    def discard_actor(self) -> None:
        """Drop the gradients of the actor, and of the trunk with them."""
        self.actor_optimizer.discard()
        if self.trunk is not None:
            self.trunk.discard()


class Steps:
    """The optimizer steps of one mini-batch, each as soon as its gradients are there; the trunk steps with the actor.

    In float16 they wait for each other, and where one's gradients have overflowed none is taken (docs/decisions/0009).
    """

    def __init__(self, learner: Learner, totals: Totals, sizes: BatchSizes) -> None:
        self._learner, self._totals, self._sizes = learner, totals, sizes
        self._before = copy.deepcopy(totals)
        self._waiting: dict[str, RoleOptimizer] = {}

    def due(self, role: Literal["actor", "critic"]) -> None:
        """The gradients of a role are complete."""
        names = ("actor", "trunk") if role == "actor" else (role,)
        self._waiting |= {name: each for name, each in self._learner.optimizers().items() if name in names}
        if self._learner.loss_scale is None:
            self._take()

    def concluded(self, *, reached: bool) -> bool:
        """Take the steps that wait; False where `target_kl` was `reached`, so that the actor's is not among them."""
        scale, totals = self._learner.loss_scale, self._totals
        if scale is not None and self._waiting:
            if scale.agree(list(self._waiting.values())):
                self._take()
            else:
                # The passes were made and count as work, but their numbers need not be finite.
                totals.sums, totals.maxima = self._before.sums, self._before.maxima
        totals.sums["skipped"] += reached
        return not reached

    def _take(self) -> None:
        for name, optimizer in self._waiting.items():
            size = self._sizes.critic if name == "critic" else self._sizes.actor
            with stops_when_short("learn", f"a step of the {name}'s optimizer", size.budget, size.describe):
                self._totals.sums[f"{name}_grad_norm"] += optimizer.step()
            self._totals.sums[f"{name}_steps"] += 1
        self._waiting.clear()


class CriticBatch(NamedTuple):
    """A mini-batch of the critic's, which of the update's it is, and which pass over the rollout it belongs to."""

    rows: Tensor
    number: int
    of_pass: int


@dataclass(frozen=True)
class Lesson:
    """What an update learns from, and how."""

    experience: Experience
    activations: Activations
    settings: PpoSection
    temperature: float
    sizes: BatchSizes
    value_lesson: ValueLesson

    def tokens(self, mini: Tensor) -> int:
        """Response tokens of a mini-batch: what its losses are divided by."""
        return int(self.experience.response_mask[mini].sum())


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
    critic_pass: int = -1

    def restore(self, before: Totals) -> None:
        """Take back what was added since `before` was copied."""
        vars(self).update(vars(before))

    def measured(self, found: Agreement, critic_scale: float) -> None:
        """Note the trunk's two gradients of a mini-batch, and the factor that the critic's was given."""
        self.sums["trunk_measured"] += 1
        self.sums["trunk_critic_scale"] += critic_scale
        for name, value in found._asdict().items():
            self.sums[f"trunk_{name}"] += value

    def value_pass(self, number: int) -> None:
        """With its first mini-batch of another pass over the rollout, what the critic errs by is counted anew.

        That need not be the pass's own first one, which may be the actor's turn.
        """
        if number != self.critic_pass:
            self.critic_pass = number
            self.sums["value_error"] = self.sums["value_error_tokens"] = 0.0

    def end_first_epoch(self) -> None:
        """Note the entropy as it is until then: later epochs' is that of a policy which has moved on."""
        for name in ("entropy", "actor_tokens"):
            self.sums[f"first_{name}"] = self.sums[name]

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
            **self.means("first_actor_tokens", entropy_first_epoch_per_token_mean="first_entropy"),
            **self.means("critic_tokens", value_loss_per_token="value_loss", value_clip_fraction="value_clipped"),
            **self.means("value_error_tokens", value_loss_last_pass_per_token="value_error"),
            **(self.means("critic_tokens", value_spread_per_token_mean="value_spread") if learner.ensemble else {}),
            **learner.values.metrics(self.sums),
            **self.means("actor_steps", actor_grad_norm="actor_grad_norm"),
            **self.means("critic_steps", critic_grad_norm="critic_grad_norm"),
            **(self._of_trunk(learner.trunk) if learner.trunk is not None else {}),
            "actor_learning_rate": learner.actor_optimizer.learning_rate,
            "critic_learning_rate": learner.critic_optimizer.learning_rate,
            "actor_optimizer_steps": self.sums["actor_steps"],
            "critic_optimizer_steps": self.sums["critic_steps"],
            "epochs_run": self.sums["epochs_run"],
            "mini_batches_skipped": self.sums["skipped"],
            **({} if learner.loss_scale is None else learner.loss_scale.take()),
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
            **self.means("trunk_steps", trunk_grad_norm="trunk_grad_norm"),
            **(penalty if trunk.settings.decoupling else {}),
            "trunk_learning_rate": trunk.optimizer.learning_rate,
            "trunk_drift": drift(trunk.part, trunk.start),
        }

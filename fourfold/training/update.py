"""The learn phase: epochs x mini-batches x micro-batches of PPO (Schulman et al. 2017) on one rollout.

Every loss is a sum over tokens divided once by the response tokens of the whole mini-batch, so the gradient does not
depend on micro-batch size, padding or row order. The critic goes first and frees its gradients before the actor's
are made: the peak holds one set of gradients. In float16 both roles step together or not at all, so that both sets
are there before either steps (docs/decisions/0009).
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_loss
from fourfold.algorithms.log_probs import Entropy, recomputed_tokens
from fourfold.algorithms.losses import entropy_sum, policy_loss, value_loss
from fourfold.algorithms.masking import masked_sum
from fourfold.backends.base import RoleOptimizer
from fourfold.backends.scaling import LossScale
from fourfold.batch import Experience
from fourfold.config.schema import PpoSection
from fourfold.memory.budget import BatchSizes
from fourfold.models.roles import Activations, Policy, Scorer, micro_batches
from fourfold.rollout.sampler import row_seed
from fourfold.training.accounting import Work

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learner:
    """The two trained roles with their optimizers."""

    actor: Policy
    critic: Scorer
    actor_optimizer: RoleOptimizer
    critic_optimizer: RoleOptimizer

    @property
    def loss_scale(self) -> LossScale | None:
        """What both optimizers scale losses with in float16."""
        return self.actor_optimizer.loss_scale


@dataclass(frozen=True)
class Learned:
    """Metrics of an update (names and formulas: diagnostics/metrics) and the rows that each role worked through."""

    metrics: dict[str, float]
    actor: Work
    critic: Work


@dataclass
class _Totals:
    """Sums over the tokens of all mini-batches of an update, and the largest of what has a maximum."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    actor: Work = field(default_factory=Work)
    critic: Work = field(default_factory=Work)

    def restore(self, before: _Totals) -> None:
        """Take back what was added since `before` was copied."""
        vars(self).update(vars(before))

    def means(self, denominator: str, **names: str) -> dict[str, float]:
        """Sums over a denominator, under the metrics' names; none where nothing was counted: 0 would say something."""
        count = self.sums[denominator]
        return {metric: self.sums[name] / count for metric, name in names.items()} if count else {}


def update(
    learner: Learner,
    experience: Experience,
    activations: Activations,
    settings: PpoSection,
    *,
    temperature: float,
    seed: int,
    train_actor: bool = True,
    sizes: BatchSizes | None = None,
) -> Learned:
    """Learn from one rollout.

    With `target_kl`, a mini-batch whose KL(old, new) reaches it ends the update: its gradients are dropped and its
    step is not taken, and only the critic's step on it stands. A role whose pass runs out of memory does its mini-batch
    again from the start, in smaller micro-batches of `sizes`.
    """
    totals = _Totals()
    sizes = sizes or BatchSizes.of(settings)
    rows = len(experience.sequences)
    stopped = False
    for epoch in range(settings.num_epochs):
        generator = torch.Generator().manual_seed(row_seed("epoch", seed, epoch))
        order = torch.randperm(rows, generator=generator).to(experience.sequences.device)
        for mini in order.split(settings.mini_batch_size):
            given = _MiniBatch(learner, experience, activations, mini, settings, temperature, totals, sizes)
            stopped = not (_one_by_one if learner.loss_scale is None else _together)(given, train_actor)
            if stopped:
                break
        if stopped:
            break
        totals.sums["epochs_run"] += 1
    return Learned(_metrics(totals, learner, stopped), totals.actor, totals.critic)


@dataclass(frozen=True)
class _MiniBatch:
    """What a step of either role needs."""

    learner: Learner
    experience: Experience
    activations: Activations
    mini: Tensor
    settings: PpoSection
    temperature: float
    totals: _Totals
    sizes: BatchSizes

    @property
    def tokens(self) -> int:
        """Response tokens: what losses are divided by."""
        return int(self.experience.response_mask[self.mini].sum())

    def undo(self, optimizer: RoleOptimizer) -> Callable[[], None]:
        """Takes back what passes from here on leave behind."""
        before = copy.deepcopy(self.totals)

        def undo() -> None:
            optimizer.discard()
            self.totals.restore(copy.deepcopy(before))

        return undo


def _one_by_one(given: _MiniBatch, train_actor: bool) -> bool:
    """The critic's step, then the actor's; False when `target_kl` was reached and the actor's was dropped."""
    with given.sizes.critic.working("critic"):
        _critic_gradients(given)
        _step(given, "critic", given.learner.critic_optimizer)
    if train_actor:
        with given.sizes.actor.working("actor"):
            if _reached(given, _actor_gradients(given)):
                return False
            _step(given, "actor", given.learner.actor_optimizer)
    return True


def _together(given: _MiniBatch, train_actor: bool) -> bool:
    """Both roles' gradients, then both steps, or none where either has overflowed."""
    learner, totals = given.learner, given.totals
    assert learner.loss_scale is not None
    before, reached = copy.deepcopy(totals), False
    waiting = {"critic": learner.critic_optimizer}
    with given.sizes.critic.working("critic"):
        _critic_gradients(given)
    if train_actor:
        with given.sizes.actor.working("actor"):
            reached = _reached(given, _actor_gradients(given))
        if not reached:
            waiting["actor"] = learner.actor_optimizer
    if not learner.loss_scale.agree(list(waiting.values())):
        # The passes were made and count as work, but their numbers need not be finite.
        totals.sums, totals.maxima = before.sums, before.maxima
        totals.sums["skipped"] += reached
        return not reached
    for name, optimizer in waiting.items():
        _step(given, name, optimizer)
    return not reached


def _step(given: _MiniBatch, role: str, optimizer: RoleOptimizer) -> None:
    given.totals.sums[f"{role}_grad_norm"] += optimizer.step()
    given.totals.sums[f"{role}_steps"] += 1


def _critic_gradients(given: _MiniBatch) -> None:
    learner, settings, totals, tokens = given.learner, given.settings, given.totals, given.tokens

    def passes(rows: int) -> None:
        for _, part, inputs in micro_batches(given.experience, given.activations, given.mini, rows):
            values = learner.critic.values(inputs, part)
            loss = value_loss(values, part.values, part.returns, part.response_mask, clip_eps=settings.value_clip_eps)
            learner.critic_optimizer.backward(settings.value_coef * loss.loss_sum / tokens)
            totals.sums["value_loss"] += float(loss.loss_sum.detach())
            totals.sums["value_clipped"] += float(loss.clipped_sum)

    given.sizes.critic.fitting(passes, len(given.mini), given.undo(learner.critic_optimizer))
    totals.critic.add(given.experience, given.mini, with_last=False)
    totals.sums["critic_tokens"] += tokens


def _actor_gradients(given: _MiniBatch) -> float:
    """The sum over tokens of KL(old, new)."""
    undo = given.undo(given.learner.actor_optimizer)
    approx_kl = given.sizes.actor.fitting(lambda rows: _actor_passes(given, rows), len(given.mini), undo)
    given.totals.sums["approx_kl"] += approx_kl
    given.totals.actor.add(given.experience, given.mini, with_last=False)
    given.totals.sums["actor_tokens"] += given.tokens
    return approx_kl


def _reached(given: _MiniBatch, approx_kl: float) -> bool:
    """Whether `target_kl` was reached: then the actor's gradients are dropped."""
    settings, totals, mean = given.settings, given.totals, approx_kl / given.tokens
    # A mean that is not finite comes of a loss that is not: an overflow, not a move of the policy.
    if settings.target_kl is None or not settings.target_kl <= mean < math.inf:
        return False
    given.learner.actor_optimizer.discard()
    totals.sums["skipped"] += 1
    log.warning(
        "learn: KL(old, new) of %.4f nats a token reached ppo.target_kl = %g; the update ends in epoch %d of %d",
        mean,
        settings.target_kl,
        totals.sums["epochs_run"] + 1,
        settings.num_epochs,
    )
    return True


def _actor_passes(given: _MiniBatch, rows: int) -> float:
    """The gradients of one mini-batch, `rows` at a time; returns the sum over tokens of KL(old, new)."""
    learner, settings, totals, tokens = given.learner, given.settings, given.totals, given.tokens
    wanted: Entropy = "learn" if settings.entropy_coef else "report"
    approx_kl = 0.0
    for _, part, inputs in micro_batches(given.experience, given.activations, given.mini, rows):
        mask = part.response_mask
        log_probs, entropy = learner.actor.log_probs(inputs, part, given.temperature, entropy=wanted)
        loss = policy_loss(
            log_probs,
            part.log_probs,
            part.advantages,
            mask,
            clip_eps_low=settings.clip_eps,
            clip_eps_high=settings.clip_eps_high or settings.clip_eps,
            dual_clip=settings.dual_clip,
        )
        objective = loss.loss_sum
        entropy_total = entropy_sum(entropy, mask)
        if settings.entropy_coef:
            objective = objective - settings.entropy_coef * entropy_total
        if settings.kl_loss_coef:
            kl = kl_loss(log_probs, part.ref_log_probs, settings.kl_loss_estimator)
            objective = objective + settings.kl_loss_coef * masked_sum(kl, mask)
        learner.actor_optimizer.backward(objective / tokens)
        approx_kl += float(loss.approx_kl_sum)
        totals.sums["policy_loss"] += float(loss.loss_sum.detach())
        totals.sums["entropy"] += float(entropy_total.detach())
        totals.sums["ratio"] += float(loss.ratio_sum)
        totals.sums["clipped"] += float(loss.clipped_sum)
        totals.sums["dual_clipped"] += float(loss.dual_clipped_sum)
        totals.actor.head_again += recomputed_tokens(
            int(mask.sum()), head_trained=learner.actor.head.weight.requires_grad, entropy=wanted
        )
        totals.maxima["ratio"] = max(totals.maxima["ratio"], float(loss.ratio_max))
    return approx_kl


def _metrics(totals: _Totals, learner: Learner, stopped: bool) -> dict[str, float]:
    policy = totals.means(
        "actor_tokens",
        policy_loss_per_token="policy_loss",
        entropy_per_token_mean="entropy",
        approx_kl_per_token_mean="approx_kl",
        ratio_mean="ratio",
        policy_clip_fraction="clipped",
        dual_clip_fraction="dual_clipped",
    )
    if policy:
        policy["ratio_max"] = totals.maxima["ratio"]
    return {
        **policy,
        **totals.means("critic_tokens", value_loss_per_token="value_loss", value_clip_fraction="value_clipped"),
        **totals.means("actor_steps", actor_grad_norm="actor_grad_norm"),
        **totals.means("critic_steps", critic_grad_norm="critic_grad_norm"),
        "actor_learning_rate": learner.actor_optimizer.learning_rate,
        "critic_learning_rate": learner.critic_optimizer.learning_rate,
        "actor_optimizer_steps": totals.sums["actor_steps"],
        "critic_optimizer_steps": totals.sums["critic_steps"],
        "epochs_run": totals.sums["epochs_run"],
        "early_stopped": float(stopped),
        "mini_batches_skipped": totals.sums["skipped"],
        **({} if learner.loss_scale is None else learner.loss_scale.take()),
    }

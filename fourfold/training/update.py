"""The learn phase: epochs x mini-batches x micro-batches of PPO (Schulman et al. 2017) on one rollout.

Every loss is a sum over tokens divided once by the response tokens of the whole mini-batch, so the gradient does not
depend on micro-batch size, padding or row order. The critic goes first and frees its gradients before the actor's
are made: the peak holds one set of gradients.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_loss
from fourfold.algorithms.log_probs import Entropy, recomputed_tokens
from fourfold.algorithms.losses import entropy_sum, policy_loss, value_loss
from fourfold.algorithms.masking import masked_sum
from fourfold.backends.base import RoleOptimizer
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
            with sizes.critic.working("critic"):
                _critic_step(learner, experience, activations, mini, settings, totals, sizes)
            if train_actor:
                with sizes.actor.working("actor"):
                    stopped = not _actor_step(
                        learner, experience, activations, mini, settings, temperature, totals, sizes
                    )
            if stopped:
                break
        if stopped:
            break
        totals.sums["epochs_run"] += 1
    return Learned(_metrics(totals, learner, stopped), totals.actor, totals.critic)


def _critic_step(
    learner: Learner,
    experience: Experience,
    activations: Activations,
    mini: Tensor,
    settings: PpoSection,
    totals: _Totals,
    sizes: BatchSizes,
) -> None:
    tokens = int(experience.response_mask[mini].sum())
    before = copy.deepcopy(totals)

    def passes(rows: int) -> None:
        for _, part, inputs in micro_batches(experience, activations, mini, rows):
            values = learner.critic.values(inputs, part)
            loss = value_loss(values, part.values, part.returns, part.response_mask, clip_eps=settings.value_clip_eps)
            learner.critic_optimizer.backward(settings.value_coef * loss.loss_sum / tokens)
            totals.sums["value_loss"] += float(loss.loss_sum.detach())
            totals.sums["value_clipped"] += float(loss.clipped_sum)

    def undo() -> None:
        learner.critic_optimizer.discard()
        totals.restore(copy.deepcopy(before))

    sizes.critic.fitting(passes, len(mini), undo)
    totals.critic.add(experience, mini, with_last=False)
    totals.sums["critic_tokens"] += tokens
    totals.sums["critic_grad_norm"] += learner.critic_optimizer.step()
    totals.sums["critic_steps"] += 1


def _actor_step(
    learner: Learner,
    experience: Experience,
    activations: Activations,
    mini: Tensor,
    settings: PpoSection,
    temperature: float,
    totals: _Totals,
    sizes: BatchSizes,
) -> bool:
    """One mini-batch for the actor; False when `target_kl` was reached and the step was dropped."""
    tokens = int(experience.response_mask[mini].sum())
    before = copy.deepcopy(totals)

    def undo() -> None:
        learner.actor_optimizer.discard()
        totals.restore(copy.deepcopy(before))

    approx_kl = sizes.actor.fitting(
        lambda rows: _actor_passes(learner, experience, activations, mini, settings, temperature, totals, rows),
        len(mini),
        undo,
    )
    totals.sums["approx_kl"] += approx_kl
    totals.actor.add(experience, mini, with_last=False)
    totals.sums["actor_tokens"] += tokens
    if settings.target_kl is not None and approx_kl / tokens >= settings.target_kl:
        learner.actor_optimizer.discard()
        totals.sums["skipped"] += 1
        log.warning(
            "learn: KL(old, new) of %.4f nats a token reached ppo.target_kl = %g; the update ends in epoch %d of %d",
            approx_kl / tokens,
            settings.target_kl,
            totals.sums["epochs_run"] + 1,
            settings.num_epochs,
        )
        return False
    totals.sums["actor_grad_norm"] += learner.actor_optimizer.step()
    totals.sums["actor_steps"] += 1
    return True


def _actor_passes(
    learner: Learner,
    experience: Experience,
    activations: Activations,
    mini: Tensor,
    settings: PpoSection,
    temperature: float,
    totals: _Totals,
    rows: int,
) -> float:
    """The gradients of one mini-batch, `rows` at a time; returns the sum over tokens of KL(old, new)."""
    tokens = int(experience.response_mask[mini].sum())
    wanted: Entropy = "learn" if settings.entropy_coef else "report"
    approx_kl = 0.0
    for _, part, inputs in micro_batches(experience, activations, mini, rows):
        mask = part.response_mask
        log_probs, entropy = learner.actor.log_probs(inputs, part, temperature, entropy=wanted)
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
    }

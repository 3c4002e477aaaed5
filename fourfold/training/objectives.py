"""The losses of PPO on one micro-batch, as sums over its tokens, with what is logged of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_loss
from fourfold.algorithms.log_probs import Entropy, recomputed_tokens
from fourfold.algorithms.losses import entropy_sum, policy_loss, value_loss
from fourfold.algorithms.masking import masked_mean, masked_sum
from fourfold.algorithms.off_policy import capped_share, effective_sample_share, importance_weights
from fourfold.batch import Experience
from fourfold.config.schema import PpoSection
from fourfold.models.heads import VectorHead
from fourfold.models.roles import Policy

if TYPE_CHECKING:
    from fourfold.training.learner import Learner, Totals


def value_objective(learner: Learner, hidden: Tensor, part: Experience, settings: PpoSection, totals: Totals) -> Tensor:
    """The critic's objective, from what its head reads before each response token [batch, response, hidden].

    Of several dimensions it is the sum of their losses, each times what it counts (fourfold.training.dimensions).
    """
    values, head, several = learner.critic.values_of(hidden, part), learner.critic.head, learner.values
    note_value_error(values, part, totals)
    eps = several.clip_range(settings.value_clip_eps, values)
    loss = value_loss(values, part.values, part.returns, part.response_mask, clip_eps=eps)
    total = loss.loss_sum
    if isinstance(head, VectorHead):
        several.measure(loss, hidden, totals.sums)
        several.note(loss, head.loss_weights, totals.sums)
        # A copy: what the losses count next is written into the head after this mini-batch.
        total = (loss.loss_sum * head.loss_weights.clone()).sum()
    totals.sums["value_loss"] += float(total.detach())
    totals.sums["value_clipped"] += float(loss.clipped_sum.float().mean())
    return settings.value_coef * total


@torch.no_grad()
def note_value_error(values: Tensor, part: Experience, totals: Totals) -> None:
    """Half the squared error, which no clipping bounds: what the critic has learned of these very returns."""
    errors = part.total(values) - part.total(part.returns)
    totals.sums["value_error"] += 0.5 * float(masked_sum(errors.square(), part.response_mask))
    totals.sums["value_error_tokens"] += int(part.response_mask.sum())


def wanted_entropy(settings: PpoSection) -> Entropy:
    """Whether the entropy is learned from or only logged."""
    return "learn" if settings.entropy_coef else "report"


def sample_weights(part: Experience, settings: PpoSection) -> Tensor:
    """What each token counts, by how likely the training engine and the sampler found it: float32 [batch, response].

    Entropy and values are not weighted: they are exact in the states that the sampler has reached.
    """
    mask = part.response_mask
    assert settings.importance != "auto", "resolved when a run begins"
    if settings.importance == "none":
        return mask.float()
    return importance_weights(
        part.log_probs, part.sampler_log_probs, mask, settings.importance, cap=settings.importance_cap
    )


def weight_metrics(experience: Experience, settings: PpoSection) -> dict[str, float]:
    """What the weights are like that the actor learns with; nothing where all tokens weigh alike."""
    if settings.importance == "none":
        return {}
    mask, weights = experience.response_mask, sample_weights(experience, settings)
    return {
        "importance_weight_mean": float(masked_mean(weights, mask)),
        "importance_capped_share": capped_share(weights, mask, settings.importance_cap),
        "effective_sample_share": effective_sample_share(weights, mask),
    }


def policy_objective(
    actor: Policy, log_probs: Tensor, entropy: Tensor, part: Experience, settings: PpoSection, totals: Totals
) -> tuple[Tensor, float]:
    """The actor's objective, and the sum over tokens of KL(old, new)."""
    mask, weights = part.response_mask, sample_weights(part, settings)
    loss = policy_loss(
        log_probs,
        part.log_probs,
        weights * part.advantages,  # the loss is proportional to them
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
        objective = objective + settings.kl_loss_coef * masked_sum(weights * kl, mask)
    totals.sums["policy_loss"] += float(loss.loss_sum.detach())
    totals.sums["entropy"] += float(entropy_total.detach())
    totals.sums["ratio"] += float(loss.ratio_sum)
    totals.sums["clipped"] += float(loss.clipped_sum)
    totals.sums["dual_clipped"] += float(loss.dual_clipped_sum)
    totals.actor.head_again += recomputed_tokens(
        int(mask.sum()), head_trained=actor.head.weight.requires_grad, entropy=wanted_entropy(settings)
    )
    totals.maxima["ratio"] = max(totals.maxima["ratio"], float(loss.ratio_max))
    return objective, float(loss.approx_kl_sum)

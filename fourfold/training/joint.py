"""One pass over a trained trunk for actor and critic: logits and values from the same activations.

Both losses go backward to the trunk's output h, each to a copy of its own, so that the critic's gradient can be scaled
before it enters the trunk: h.backward(g_a + s g_c). In an update's first mini-batch, and in every one where the two are
balanced by their norms, the products are taken apart: then norms and cosine are known in the trunk's parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fourfold.algorithms.decoupling import balanced_scale, squared_cosine_sum
from fourfold.batch import Experience
from fourfold.models.micro_batches import cut_rows, micro_batches
from fourfold.models.roles import Activations
from fourfold.models.trunk import above
from fourfold.training.learner import CriticBatch, Learner, Lesson, Steps, Totals, TrunkLearner
from fourfold.training.objectives import policy_objective, wanted_entropy


def joint_step(learner: Learner, trunk: TrunkLearner, lesson: Lesson, batch: CriticBatch, totals: Totals) -> bool:
    """One mini-batch for trunk, critic and actor; False when `target_kl` was reached and only the critic stepped.

    Each of the three has its own gradient norm and is clipped by it alone.
    """
    experience, mini = lesson.experience, batch.rows
    totals.value_pass(batch.of_pass)
    tokens, steps = lesson.tokens(mini), Steps(learner, totals, lesson.sizes)
    apart = trunk.settings.balance == "grad_norm" or not totals.sums["trunk_measured"]
    before = copy.deepcopy(totals)

    def passes(rows: int) -> float:
        approx_kl = 0.0
        pieces = cut_rows(experience, mini, rows, lesson.sizes.actor.tokens)
        for chosen, part, inputs in micro_batches(experience, lesson.activations, pieces):
            values = partial(lesson.value_lesson.objective, learner, rows=chosen, step=batch.number, totals=totals)
            approx_kl += _joint_pass(learner, trunk, lesson, part, inputs, tokens, totals, values, apart=apart)
        return approx_kl

    def undo() -> None:
        learner.critic_optimizer.discard()
        learner.discard_actor()
        totals.restore(copy.deepcopy(before))

    approx_kl = lesson.sizes.actor.fitting(passes, len(mini), undo)
    for work in (totals.actor, totals.critic, totals.trunk.forward, *[totals.trunk.backward] * (2 if apart else 1)):
        work.add(experience, mini, with_last=False)
    learner.values.conclude(learner.critic.head, totals.sums, before.sums)
    if apart:
        _put_together(learner, trunk, totals)
    totals.sums["critic_tokens"] += tokens
    totals.sums["joint_tokens"] += tokens
    steps.due("critic")
    reached = learner.reached(lesson, approx_kl, mini, totals)
    if not reached:
        steps.due("actor")
    return steps.concluded(reached=reached)


def _joint_pass(
    learner: Learner,
    trunk: TrunkLearner,
    lesson: Lesson,
    part: Experience,
    inputs: Activations,
    tokens: int,
    totals: Totals,
    values: Callable[..., Tensor],
    *,
    apart: bool,
) -> float:
    """The gradients of one micro-batch; returns the sum over its tokens of KL(old, new)."""
    actor, critic, settings = learner.actor, learner.critic, lesson.settings
    shared = above(trunk.part, inputs.states(), part.prompt_length - 1)
    read_by_actor, read_by_critic = (shared.inputs.detach().requires_grad_() for _ in range(2))
    features = actor.hidden_at(Activations(read_by_actor, shared.mask), part)
    value_features = critic.hidden_at(Activations(read_by_critic, shared.mask), part)
    value = values(hidden=value_features, part=part)
    log_probs, entropy = actor.log_probs_of(features, part, lesson.temperature, entropy=wanted_entropy(settings))
    policy, approx_kl = policy_objective(actor, log_probs, entropy, part, settings, totals)
    if trunk.settings.decoupling:
        others = value_features[part.response_mask]
        # Each role goes backward by itself, so it gets its share of the penalty's gradient: the other's features fixed.
        penalty = squared_cosine_sum(features, others.detach())
        policy = policy + trunk.settings.decoupling * penalty
        value = value + trunk.settings.decoupling * squared_cosine_sum(features.detach(), others)
        totals.sums["squared_cosine"] += float(penalty.detach())
    learner.critic_optimizer.backward(value / tokens)
    learner.actor_optimizer.backward(policy / tokens)
    both = _gradient_at(read_by_actor), _gradient_at(read_by_critic)
    if apart:
        trunk.gradients.add_apart(shared.inputs, *both)
    else:
        trunk.gradients.add_both(shared.inputs, *both, trunk.settings.critic_grad_scale)
    return approx_kl


def _gradient_at(door: Tensor) -> Tensor:
    """NaN where a loss that overflowed float16 went no way back: the step is not taken then."""
    return torch.full_like(door, math.nan) if door.grad is None else door.grad


def _put_together(learner: Learner, trunk: TrunkLearner, totals: Totals) -> None:
    """Measure the gradients that were kept apart, and form the one that the trunk steps by."""
    found = trunk.gradients.agreement()
    scale = trunk.settings.critic_grad_scale
    if trunk.settings.balance == "grad_norm":
        scale = balanced_scale(scale, found)
    if not all(map(math.isfinite, found)):
        scale = math.nan  # whichever has overflowed, and however little of it would arrive: the step is not to be taken
    trunk.gradients.join(scale)
    if learner.loss_scale is not None:
        times = learner.loss_scale.scale
        found = found._replace(actor_norm=found.actor_norm / times, critic_norm=found.critic_norm / times)
    totals.measured(found, scale)

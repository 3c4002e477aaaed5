"""The learn phase: epochs x mini-batches x micro-batches of PPO (Schulman et al. 2017) on one rollout.

Every loss is a sum over tokens divided once by the response tokens of the whole mini-batch, so the gradient does not
depend on micro-batch size, padding or row order. The critic goes first and frees its gradients before the actor's
are made: the peak holds one set of gradients. Over a trained trunk both learn in one pass (joint.py), or take turns. In
float16 all step together or not at all (learner.py), so that all gradients are there before the first step.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.config.schema import PpoSection
from fourfold.memory.budget import BatchSizes
from fourfold.models.roles import Activations, casts_once, micro_batches
from fourfold.rollout.sampler import row_seed
from fourfold.training.joint import joint_step
from fourfold.training.learner import Learned, Learner, Lesson, Steps, Totals
from fourfold.training.objectives import policy_objective, value_objective, wanted_entropy, weight_metrics

__all__ = ["Learned", "Learner", "update"]


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
    totals = Totals()
    lesson = Lesson(experience, activations, settings, temperature, sizes or BatchSizes.of(settings))
    rows = len(experience.sequences)
    learner.values.begin(learner.critic.head, experience)
    stopped, index = False, 0
    for epoch in range(settings.num_epochs):
        generator = torch.Generator().manual_seed(row_seed("epoch", seed, epoch))
        order = torch.randperm(rows, generator=generator).to(experience.sequences.device)
        for mini in order.split(settings.mini_batch_size):
            stopped = not _learn(learner, lesson, mini, index, totals, train_actor=train_actor)
            index += 1
            if stopped:
                break
        if stopped:
            break
        totals.sums["epochs_run"] += 1
    metrics = totals.metrics(learner) | {"early_stopped": float(stopped)}
    if train_actor:
        metrics |= weight_metrics(experience, settings)
    return Learned(metrics, totals.actor, totals.critic, totals.trunk)


def _learn(learner: Learner, lesson: Lesson, mini: Tensor, index: int, totals: Totals, *, train_actor: bool) -> bool:
    """One mini-batch for whoever learns from it; False when `target_kl` was reached."""
    sizes, trunk = lesson.sizes, learner.trunk
    turn = "both" if trunk is None else trunk.settings.turn(index)
    if trunk is not None and train_actor and turn == "both":
        with sizes.actor.working("trunk"):
            return joint_step(learner, trunk, lesson, mini, totals)
    steps, reached = Steps(learner, totals), False
    if turn != "actor" or not train_actor:
        with sizes.critic.working("critic"):
            _critic_gradients(learner, lesson, mini, totals)
            steps.due("critic")
    if turn != "critic" and train_actor:
        with sizes.actor.working("actor"):
            reached = learner.reached(lesson, _actor_gradients(learner, lesson, mini, totals), mini, totals)
            if not reached:
                steps.due("actor")
    return steps.concluded(reached=reached)


def _critic_gradients(learner: Learner, lesson: Lesson, mini: Tensor, totals: Totals) -> None:
    """Those of one mini-batch, over a trunk that stands still."""
    experience, settings, tokens = lesson.experience, lesson.settings, lesson.tokens(mini)
    before = copy.deepcopy(totals)

    def passes(rows: int) -> None:
        with casts_once(learner.critic, several=rows < len(mini)):
            for _, part, inputs in micro_batches(experience, lesson.activations, mini, rows):
                hidden = learner.critic.hidden_at(inputs.states(), part)
                learner.critic_optimizer.backward(value_objective(learner, hidden, part, settings, totals) / tokens)

    def undo() -> None:
        learner.critic_optimizer.discard()
        totals.restore(copy.deepcopy(before))

    lesson.sizes.critic.fitting(passes, len(mini), undo)
    learner.values.conclude(learner.critic.head, totals.sums, before.sums)
    totals.critic.add(experience, mini, with_last=False)
    if learner.trunk is not None:
        totals.trunk.forward.add(experience, mini, with_last=False)
    totals.sums["critic_tokens"] += tokens


def _actor_gradients(learner: Learner, lesson: Lesson, mini: Tensor, totals: Totals) -> float:
    """Those of one mini-batch, for the trunk too; returns the sum over tokens of KL(old, new)."""
    experience = lesson.experience
    before = copy.deepcopy(totals)

    def undo() -> None:
        learner.discard_actor()
        totals.restore(copy.deepcopy(before))

    approx_kl = lesson.sizes.actor.fitting(
        lambda rows: _actor_passes(learner, lesson, mini, totals, rows), len(mini), undo
    )
    totals.actor.add(experience, mini, with_last=False)
    if learner.trunk is not None:
        totals.trunk.forward.add(experience, mini, with_last=False)
        totals.trunk.backward.add(experience, mini, with_last=False)
    return approx_kl


def _actor_passes(learner: Learner, lesson: Lesson, mini: Tensor, totals: Totals, rows: int) -> float:
    """The gradients of one mini-batch, `rows` at a time; returns the sum over tokens of KL(old, new)."""
    settings, approx_kl = lesson.settings, 0.0
    actor, wanted = learner.actor, wanted_entropy(settings)
    with casts_once(actor, several=rows < len(mini)):
        for _, part, inputs in micro_batches(lesson.experience, lesson.activations, mini, rows):
            log_probs, entropy = actor.log_probs(inputs, part, lesson.temperature, entropy=wanted)
            objective, kl = policy_objective(actor, log_probs, entropy, part, settings, totals)
            learner.actor_optimizer.backward(objective / lesson.tokens(mini))
            approx_kl += kl
    return approx_kl

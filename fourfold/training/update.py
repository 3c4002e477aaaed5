"""The learn phase: epochs x mini-batches x micro-batches of PPO (Schulman et al. 2017) on one rollout.

Every loss is a sum over tokens divided once by the response tokens of the whole mini-batch, so the gradient does not
depend on micro-batch size, padding or row order. The critic goes first and frees its gradients before the actor's
are made: the peak holds one set of gradients. Over a trained trunk both learn in one pass (joint.py), or take turns. In
float16 all step together or not at all (learner.py), so that all gradients are there before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.batch import Experience
from fourfold.config.schema import CriticSection, PpoSection
from fourfold.memory.budget import BatchSizes
from fourfold.models.micro_batches import cut_rows, micro_batches
from fourfold.models.roles import Activations, casts_once
from fourfold.rollout.sampler import row_seed
from fourfold.training.joint import joint_step
from fourfold.training.learner import CriticBatch, Learned, Learner, Lesson, Steps, Totals
from fourfold.training.objectives import policy_objective, wanted_entropy, weight_metrics
from fourfold.training.value_lesson import ValueLesson

__all__ = ["Learned", "Learner", "update"]


def update(
    learner: Learner,
    experience: Experience,
    activations: Activations,
    settings: PpoSection,
    *,
    temperature: float,
    seed: int,
    critic: CriticSection | None = None,
    train_actor: bool = True,
    sizes: BatchSizes | None = None,
) -> Learned:
    """Learn from one rollout.

    The critic goes through it `critic.updates_per_actor` = n times in each epoch: before each mini-batch of the actor's
    it learns n of its own, in the order of those passes, of which the first is the actor's. With `target_kl`, a
    mini-batch whose KL(old, new) reaches it ends the update: its gradients are dropped and its step is not taken, and
    only the critic's steps before it stand. A role whose pass runs out of memory does its mini-batch again from the
    start, in smaller micro-batches of `sizes`.
    """
    critic = critic or CriticSection()
    totals, stopped = Totals(), False
    value_lesson = ValueLesson(settings, critic, seed)
    lesson = Lesson(experience, activations, settings, temperature, sizes or BatchSizes.of(settings), value_lesson)
    minis = _MiniBatches(len(experience.sequences), settings.mini_batch_size, seed, experience.sequences.device)
    learner.values.begin(learner.critic.head, experience)
    for epoch in range(settings.num_epochs):
        for turn in minis.turns(epoch, critic.updates_per_actor):
            stopped = not _learn(learner, lesson, turn, totals, train_actor=train_actor)
            if stopped:
                break
        if epoch == 0:
            totals.end_first_epoch()
        if stopped:
            break
        totals.sums["epochs_run"] += 1
    metrics = totals.metrics(learner) | {"early_stopped": float(stopped)}
    if train_actor:
        metrics |= weight_metrics(experience, settings)
    return Learned(metrics, totals.actor, totals.critic, totals.trunk)


class _Turn(NamedTuple):
    """A mini-batch of the actor's, which of the update's it is, and the critic's before it."""

    actor: Tensor
    index: int
    critic: list[CriticBatch]


class _MiniBatches:
    """Rows of a rollout in the orders in which they are learned from; each pass over them has an order of its own."""

    def __init__(self, rows: int, size: int, seed: int, device: torch.device) -> None:
        self._rows, self._size, self._seed, self._device = rows, size, seed, device

    def turns(self, epoch: int, ratio: int) -> Iterator[_Turn]:
        """Of one epoch: `ratio` mini-batches of the critic's for each of the actor's."""
        actors = self._pass("epoch", self._seed, epoch)
        others = (self._pass("critic pass", self._seed, epoch, again) for again in range(1, ratio))
        critics = [*actors, *chain.from_iterable(others)]
        count = len(actors)
        for place, mini in enumerate(actors):
            own = range(place * ratio, (place + 1) * ratio)
            before = [CriticBatch(critics[i], epoch * count * ratio + i, epoch * ratio + i // count) for i in own]
            yield _Turn(mini, epoch * count + place, before)

    def _pass(self, *address: int | str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(row_seed(*address))
        order = torch.randperm(self._rows, generator=generator).to(self._device)
        return list(order.split(self._size))


def _learn(learner: Learner, lesson: Lesson, turn: _Turn, totals: Totals, *, train_actor: bool) -> bool:
    """One mini-batch of the actor's, with the critic's before it; False when `target_kl` was reached."""
    sizes, trunk = lesson.sizes, learner.trunk
    whose = trunk.settings.turn(turn.index) if trunk is not None and learner.one_pass else "both"
    if trunk is not None and train_actor and learner.one_pass and whose == "both":
        with sizes.actor.working("trunk"):
            return joint_step(learner, trunk, lesson, turn.critic[0], totals)
    steps, reached = Steps(learner, totals, sizes), False
    if whose != "actor" or not train_actor:
        for mini in turn.critic:
            steps.concluded(reached=False)  # those of the critic's mini-batch before
            steps = Steps(learner, totals, sizes)
            with sizes.critic.working("critic"):
                _critic_gradients(learner, lesson, mini, totals)
                steps.due("critic")
    if whose != "critic" and train_actor:
        with sizes.actor.working("actor"):
            approx_kl = _actor_gradients(learner, lesson, turn.actor, totals)
            reached = learner.reached(lesson, approx_kl, turn.actor, totals)
            if not reached:
                steps.due("actor")
    return steps.concluded(reached=reached)


def _critic_gradients(learner: Learner, lesson: Lesson, batch: CriticBatch, totals: Totals) -> None:
    """Those of one mini-batch, over a trunk that stands still."""
    experience, critic, mini = lesson.experience, learner.critic, batch.rows
    tokens = lesson.tokens(mini)
    totals.value_pass(batch.of_pass)
    before = copy.deepcopy(totals)

    def passes(rows: int) -> None:
        pieces = cut_rows(experience, mini, rows, lesson.sizes.critic.tokens)
        with casts_once(critic, several=len(pieces) > 1):
            for chosen, part, inputs in micro_batches(experience, lesson.activations, pieces):
                hidden = critic.hidden_at(critic.reads(inputs, part).states(), part)
                objective = lesson.value_lesson.objective(learner, hidden, part, chosen, batch.number, totals)
                learner.critic_optimizer.backward(objective / tokens)

    def undo() -> None:
        learner.critic_optimizer.discard()
        totals.restore(copy.deepcopy(before))

    lesson.sizes.critic.fitting(passes, len(mini), undo)
    learner.values.conclude(learner.critic.head, totals.sums, before.sums)
    totals.critic.add(experience, mini, with_last=False)
    if learner.one_pass:
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
    pieces = cut_rows(lesson.experience, mini, rows, lesson.sizes.actor.tokens)
    with casts_once(actor, several=len(pieces) > 1):
        for _, part, inputs in micro_batches(lesson.experience, lesson.activations, pieces):
            log_probs, entropy = actor.log_probs(inputs, part, lesson.temperature, entropy=wanted)
            objective, kl = policy_objective(actor, log_probs, entropy, part, settings, totals)
            learner.actor_optimizer.backward(objective / lesson.tokens(mini))
            approx_kl += kl
    return approx_kl

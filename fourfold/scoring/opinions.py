"""What a role says of the rows of a rollout, asked in micro-batches where the role is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.data.told_weights import ToldWeights
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize
from fourfold.memory.offload import residency_of, resident
from fourfold.models.micro_batches import by_length, micro_batch, tokens_of
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.scoring.sources import RewardSource

# What is said of every token of a response, and not once of each.
_OF_TOKENS = ("ref_log_probs", "kl", "values")

Asked = Callable[[Activations, Rollout], dict[str, Tensor]]


@dataclass(frozen=True)
class Opinions:
    """What the models say of a whole rollout, filled in as its micro-batches are done; 0 where a response has ended.

    `scores` and `valid` have a column for each part of the reward.
    """

    ref_log_probs: Tensor
    kl: Tensor
    values: Tensor
    last_values: Tensor
    scores: Tensor
    valid: Tensor

    @classmethod
    def empty(cls, rollout: Rollout, parts: int, values: tuple[int, ...] = ()) -> Opinions:
        """Nobody has been asked; `values` is the shape of a critic's opinion on one state."""
        tokens = torch.zeros_like(rollout.sampler_log_probs)
        scores = tokens.new_zeros(len(tokens), parts)
        valid = torch.zeros_like(scores, dtype=torch.bool)
        every, last = tokens.new_zeros(*tokens.shape, *values), tokens.new_zeros(len(tokens), *values)
        return cls(tokens, tokens.clone(), every, last, scores, valid)

    def require_finite(self) -> None:
        """RunFailed where a model's number is none, or a score that is called valid."""
        checked = (("reference", "ref_log_probs"), ("actor", "kl"), ("critic", "values"), ("critic", "last_values"))
        for role, name in checked:
            if not bool(torch.isfinite(getattr(self, name)).all()):
                raise RunFailed(f"score: the {role}'s {name} are not finite; the last good checkpoint is kept")
        claimed = self.scores[self.valid]
        if bad := int((~torch.isfinite(claimed)).sum()):
            raise RunFailed(
                f"score: the reward's scores: {bad} of {len(claimed)} are NaN or infinite though it calls them valid; "
                "the last good checkpoint is kept"
            )

    def put(self, rows: Tensor, **opinions: Tensor) -> None:
        """Write the opinions on these rows; responses may be narrower than the rollout's."""
        for name, opinion in opinions.items():
            target = getattr(self, name)
            if name in _OF_TOKENS:
                target[rows, : opinion.shape[1]] = opinion.to(target.device)
            else:
                target[rows] = opinion.to(target.device)


@dataclass(frozen=True)
class OfParts:
    """The columns of some parts of the reward, into which the scores of one source go."""

    opinions: Opinions
    columns: Sequence[int]

    def put(self, rows: Tensor, scores: Tensor, valid: Tensor) -> None:
        """Write what the source says of these rows, a column for each part; one part needs none."""
        for target, said in ((self.opinions.scores, scores), (self.opinions.valid, valid)):
            by_part = said.reshape(len(said), len(self.columns)).to(target.device)
            for place, column in enumerate(self.columns):
                target[rows, column] = by_part[:, place]


def shortest_first(rollout: Rollout) -> Tensor:
    """The order in which every role goes through the rows."""
    return by_length(rollout, torch.arange(len(rollout.sequences), device=rollout.sequences.device))


def ask(
    found: Opinions | OfParts, rollout: Rollout, activations: Activations, role: Any, asked: Asked, size: BatchSize
) -> None:
    """Let a role go through a rollout, the shortest rows first; what it reads goes where it computes.

    A source that reads texts at once is given all rows, and no activations of them.
    """
    order = shortest_first(rollout)
    if getattr(role, "whole", False):
        found.put(order, **asked(activations, rollout.select(order)))
        return
    held = residency_of(role)

    def opinions(piece: slice) -> None:
        part, inputs = micro_batch(rollout, activations, order[piece])
        if held is not None:
            part, inputs = part.to(held.device), inputs.to(held.device)
        found.put(order[piece], **asked(inputs, part))

    with resident(role):
        size.through(len(order), opinions, lambda: tokens_of(rollout, order))


def of_reference(reference: Policy, temperature: float, size: BatchSize) -> Asked:
    """The reference's log-probs of the response tokens."""

    def asked(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        with size.working("reference"):
            return {"ref_log_probs": reference.log_probs(inputs, part, temperature)[0]}

    return asked


def of_critic(critic: Scorer, size: BatchSize) -> Asked:
    """The critic's values of all states, those after the last token apart."""

    def asked(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        with size.working("critic"):
            return dict(zip(("values", "last_values"), critic.values_and_last(inputs, part), strict=True))

    return asked


def of_reward(reward: RewardSource, size: BatchSize, told: ToldWeights | None = None) -> Asked:
    """The source's scores, and which of them are valid; one that reads texts reads prompts without weights in them."""
    reads_texts = getattr(reward, "reads_texts", False)

    def asked(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        read = told.untold(part) if told is not None and reads_texts else part
        with size.working("reward"):
            return dict(zip(("scores", "valid"), reward(inputs, read), strict=True))

    return asked

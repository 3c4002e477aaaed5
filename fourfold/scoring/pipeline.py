"""The score phase: one pass of reference, critic and reward over a rollout, in micro-batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_estimate
from fourfold.batch import Rollout, ScoredRollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize, batch_size
from fourfold.memory.offload import is_elsewhere
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.scoring.ahead import Ahead
from fourfold.scoring.combined import Reward, asked_once, combined, parts_of, told_by, weights_of
from fourfold.scoring.opinions import Asked, OfParts, Opinions, ask, of_critic, of_reference, of_reward, shortest_first
from fourfold.scoring.service.roles import sent_ahead

# The rollout and, for each row, whether its score is valid (bool [batch]).
Scored = tuple[ScoredRollout, Tensor]


@torch.no_grad()
def score(
    rollout: Rollout,
    activations: Activations,
    *,
    actor: Policy,
    reference: Policy,
    critic: Scorer,
    reward: Reward,
    temperature: float,
    kl_estimator: str,
    micro_batch_size: int | BatchSize,
    ahead: Ahead | None = None,
) -> Scored:
    """Ask reference, critic and reward about a rollout.

    One role after the other goes through the rollout, so that those that are not kept in memory come in once, alone.
    Where reference and reward have been asked `ahead`, while the rollout was sampled, the critic works beside them.
    Those at a service are asked at the start and heard at the end: they work while the others do.
    """
    exact = kl_estimator == "full"
    assert ahead is None or not exact, "the exact KL takes actor and reference at once"
    parts = parts_of(reward)
    found = Opinions.empty(rollout, len(parts), critic.head.shape)
    size = batch_size(micro_batch_size, "score", "reference")
    asked_reference = of_reference(reference, temperature, size)

    def with_exact_kl(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        opinions = asked_reference(inputs, part)
        with size.working("actor"):
            return opinions | {"kl": reference.kl_from(actor, inputs, part, temperature)}

    roles: list[tuple[Any, Asked, Opinions | OfParts]] = [(critic, of_critic(critic, size), found)]
    if ahead is None:
        first = (reference, with_exact_kl if exact else asked_reference, found)
        told = told_by(reward)
        sources = asked_once(reward)
        last = [(each, of_reward(each, size, told), OfParts(found, columns)) for each, columns in sources]
        roles = sorted([first, *roles, *last], key=lambda each: is_elsewhere(each[0]))
    with sent_ahead([role for role, _, _ in roles], rollout, shortest_first(rollout), size, temperature):
        for role, asked, into in roles:
            ask(into, rollout, activations, role, asked, size)
    if ahead is not None:
        ahead.take(found)
    if not exact:
        kl = kl_estimate(rollout.log_probs, found.ref_log_probs, kl_estimator)
        found.kl.copy_(torch.where(rollout.response_mask, kl, 0.0))
    found.require_finite()
    weights = weights_of(reward, rollout)
    scores, valid = combined(parts, found.scores, found.valid, weights)
    said = {name: getattr(found, name) for name in ("ref_log_probs", "kl", "values", "last_values")}
    carried = {f.name: getattr(rollout, f.name) for f in fields(Rollout)}
    return ScoredRollout(**carried, **said, scores=scores, score_parts=found.scores, score_weights=weights), valid


def learnable(scored: ScoredRollout, valid: Tensor, *, truncation: str, on_failure: str) -> Tensor:
    """Rows to learn from (int64): those with a valid score, and under truncation = "drop" those that ended themselves.

    A failed score is never replaced by a number: the run stops, or the row is left out, as `on_failure` says.
    """
    failed = int((~valid).sum())
    if failed and on_failure == "stop":
        raise RunFailed(
            f"score: {failed} of {len(valid)} responses got no valid score (None, NaN or infinite); "
            'mend the reward, or set reward.on_failure = "drop"',
            blamed="reward",
        )
    kept = valid & ~scored.truncated if truncation == "drop" else valid
    if not bool(kept.any()):
        said = (
            f"score: no response can be learned from: {failed} without a valid score, {int(scored.truncated.sum())} "
            "cut by length; raise sampling.max_new_tokens or mend the reward"
        )
        raise RunFailed(said, blamed="reward") if failed else RunFailed(said)
    return kept.nonzero()[:, 0]

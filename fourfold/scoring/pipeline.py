"""The score phase: one pass of reference, critic and reward over a rollout, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_estimate
from fourfold.batch import Rollout, ScoredRollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize, batch_size
from fourfold.memory.offload import resident
from fourfold.models.roles import Activations, Policy, Scorer, by_length, micro_batch
from fourfold.scoring.sources import RewardSource

Asked = Callable[[Activations, Rollout], dict[str, Tensor]]


@torch.no_grad()
def score(
    rollout: Rollout,
    activations: Activations,
    *,
    actor: Policy,
    reference: Policy,
    critic: Scorer,
    reward: RewardSource,
    temperature: float,
    kl_estimator: str,
    micro_batch_size: int | BatchSize,
) -> tuple[ScoredRollout, Tensor]:
    """The scored rollout and, for each row, whether its score is valid (bool [batch]).

    One role after the other goes through the rollout, so that those that are not kept in memory come in once, alone.
    """
    found = _Opinions.empty(rollout)
    size = batch_size(micro_batch_size, "score", "reference")
    order = by_length(rollout, torch.arange(len(rollout.sequences), device=rollout.sequences.device))

    def of_reference(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        with size.working("reference"):
            log_probs, _ = reference.log_probs(inputs, part, temperature)
        with size.working("actor" if kl_estimator == "full" else "reference"):
            kl = _kl(part, inputs, log_probs, actor, reference, temperature, kl_estimator)
        return {"ref_log_probs": log_probs, "kl": kl}

    def of_critic(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        with size.working("critic"):
            return dict(zip(("values", "last_values"), critic.values_and_last(inputs, part), strict=True))

    def of_reward(inputs: Activations, part: Rollout) -> dict[str, Tensor]:
        with size.working("reward"):
            return dict(zip(("scores", "valid"), reward(inputs, part), strict=True))

    for role, asked in ((reference, of_reference), (critic, of_critic), (reward, of_reward)):

        def opinions(piece: slice, asked: Asked = asked) -> None:
            part, inputs = micro_batch(rollout, activations, order[piece])
            found.put(order[piece], **asked(inputs, part))

        with resident(role):
            size.through(len(order), opinions)
    checked = (("reference", "ref_log_probs"), ("actor", "kl"), ("critic", "values"), ("critic", "last_values"))
    for role, name in checked:
        if not bool(torch.isfinite(getattr(found, name)).all()):
            raise RunFailed(f"score: the {role}'s {name} are not finite; the last good checkpoint is kept")
    claimed = found.scores[found.valid]
    if bad := int((~torch.isfinite(claimed)).sum()):
        raise RunFailed(
            f"score: the reward's scores: {bad} of {len(claimed)} are NaN or infinite though it calls them valid; the "
            "last good checkpoint is kept"
        )
    scored = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "valid"}
    return ScoredRollout(**{f.name: getattr(rollout, f.name) for f in fields(Rollout)}, **scored), found.valid


@dataclass(frozen=True)
class _Opinions:
    """What the models say of a whole rollout, filled in as its micro-batches are done; 0 where a response has ended."""

    ref_log_probs: Tensor
    kl: Tensor
    values: Tensor
    last_values: Tensor
    scores: Tensor
    valid: Tensor

    @classmethod
    def empty(cls, rollout: Rollout) -> _Opinions:
        tokens = torch.zeros_like(rollout.sampler_log_probs)
        sequences = tokens.new_zeros(len(tokens))
        valid = torch.zeros_like(sequences, dtype=torch.bool)
        return cls(tokens, tokens.clone(), tokens.clone(), sequences, sequences.clone(), valid)

    def put(self, rows: Tensor, **opinions: Tensor) -> None:
        """Write the opinions on these rows; responses may be narrower than the rollout's."""
        for name, opinion in opinions.items():
            if opinion.ndim == 1:
                getattr(self, name)[rows] = opinion
            else:
                getattr(self, name)[rows, : opinion.shape[1]] = opinion


def _kl(
    rollout: Rollout,
    activations: Activations,
    ref_log_probs: Tensor,
    actor: Policy,
    reference: Policy,
    temperature: float,
    estimator: str,
) -> Tensor:
    """Per-token KL(actor, reference), 0 where the response has ended."""
    mask = rollout.response_mask
    if estimator != "full":
        return torch.where(mask, kl_estimate(rollout.log_probs, ref_log_probs, estimator), 0.0)
    exact = actor.head.full_kl(
        actor.hidden_before(activations, rollout),
        reference.head,
        reference.hidden_before(activations, rollout),
        temperature,
        (actor.branch.compute_dtype, reference.branch.compute_dtype),
    )
    return torch.zeros_like(ref_log_probs).masked_scatter(mask, exact)


def learnable(scored: ScoredRollout, valid: Tensor, *, truncation: str, on_failure: str) -> Tensor:
    """Rows to learn from (int64): those with a valid score, and under truncation = "drop" those that ended themselves.

    A failed score is never replaced by a number: the run stops, or the row is left out, as `on_failure` says.
    """
    failed = int((~valid).sum())
    if failed and on_failure == "stop":
        raise RunFailed(
            f"score: {failed} of {len(valid)} responses got no valid score (None, NaN or infinite); "
            'mend the reward, or set reward.on_failure = "drop"'
        )
    kept = valid & ~scored.truncated if truncation == "drop" else valid
    if not bool(kept.any()):
        raise RunFailed(
            f"score: no response can be learned from: {failed} without a valid score, {int(scored.truncated.sum())} "
            "cut by length; raise sampling.max_new_tokens or mend the reward"
        )
    return kept.nonzero()[:, 0]

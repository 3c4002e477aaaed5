"""The score phase: one pass of reference, critic and reward over a rollout, in micro-batches."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_estimate
from fourfold.batch import Rollout, ScoredRollout
from fourfold.errors import RunFailed
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.scoring.sources import RewardSource


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
    micro_batch_size: int,
) -> tuple[ScoredRollout, Tensor]:
    """The scored rollout and, for each row, whether its score is valid (bool [batch])."""
    parts: list[dict[str, Tensor]] = []
    for rows in torch.arange(len(rollout.sequences), device=rollout.sequences.device).split(micro_batch_size):
        part, inputs = rollout.select(rows), activations.select(rows)
        ref_log_probs, _ = reference.log_probs(inputs, part, temperature)
        kl = _kl(part, inputs, ref_log_probs, actor, reference, temperature, kl_estimator)
        values, last_values = critic.values(inputs, part)
        scores, valid = reward(inputs, part)
        parts.append(
            {
                "ref_log_probs": ref_log_probs,
                "kl": kl,
                "values": values,
                "last_values": last_values,
                "scores": scores,
                "valid": valid,
            }
        )
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    valid = joined.pop("valid")
    checked = (("reference", "ref_log_probs"), ("actor", "kl"), ("critic", "values"), ("critic", "last_values"))
    for role, name in checked:
        if not bool(torch.isfinite(joined[name]).all()):
            raise RunFailed(f"score: the {role}'s {name} are not finite; the last good checkpoint is kept")
    return ScoredRollout(**{f.name: getattr(rollout, f.name) for f in fields(Rollout)}, **joined), valid


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
        actor.branch.compute_dtype,
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

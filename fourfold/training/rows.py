"""One row of metrics.jsonl out of a step's tensors, counters and timings (names: diagnostics/metrics)."""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_estimate
from fourfold.algorithms.masking import masked_mean
from fourfold.algorithms.statistics import moments
from fourfold.batch import Experience, ScoredRollout
from fourfold.config.schema import RunConfig
from fourfold.diagnostics.kept import value_fit
from fourfold.memory.meter import WORKING, PhaseUsage
from fourfold.training.dimensions import dimensions_row
from fourfold.training.evaluation import parts_row
from fourfold.training.experience import Shaping, shape_scores
from fourfold.training.shaping_row import shaping_row
from fourfold.training.state import Progress

TIMED_PHASES = ("generate", "score", "learn", "save")


def training_row(
    progress: Progress,
    experience: Experience,
    scored: ScoredRollout,
    valid: Tensor,
    learned: dict[str, float],
    work: dict[str, float],
    usage: dict[str, PhaseUsage],
    *,
    config: RunConfig,
    shaping: Shaping,
) -> dict[str, float]:
    """Everything a PPO step logs.

    `scored` holds the rows as they were sampled, `valid` which of them have a score (bool [batch]), `experience` those
    that were learned from; `shaping` is what the step's rewards were made with.
    """
    row = {**counters(progress), "policy_version": progress.step - 1, "kl_coef": shaping.kl_coef}
    row |= _scores(scored.scores[valid]) | parts_row(scored.score_parts[valid], config.reward.dimensions)
    row |= _rollout(scored) | truncation_row(scored) | {"invalid_scores": int((~valid).sum())}
    row |= curriculum_row(config, progress.step - 1) | shaping_row(
        experience, config.ppo, shaping, config.reward.dimensions
    )
    row["score_shaped_mean"] = float(experience.total(shape_scores(experience, config.ppo, shaping)).mean())
    row["dropped_rows"] = len(scored.sequences) - len(experience.sequences)
    cut = valid & scored.truncated if config.ppo.truncation == "drop" else valid & False
    row["dropped_truncated_rows"] = int(cut.sum())
    row["reward_per_sequence_mean"] = float(experience.total(experience.rewards).sum(dim=1).mean())
    row |= _values(experience) | dimensions_row(scored.score_parts[valid], experience, config)
    row |= learned
    row |= work
    seconds = 0.0
    for phase in TIMED_PHASES:
        measured = usage.get(phase, PhaseUsage(0.0, 0))
        row[f"{phase}_seconds"], row[f"{phase}_peak_bytes"] = measured
        seconds += measured.seconds
    for phase, role in WORKING:
        if f"{phase}/{role}" in usage:
            row[f"{role}_{phase}_peak_bytes"] = usage[f"{phase}/{role}"].peak_bytes
    row["step_seconds"] = seconds
    if "offloaded_pass_seconds" in row:
        row["offloaded_per_generate_ratio"] = row["offloaded_pass_seconds"] / row["generate_seconds"]
    row["tokens_per_second"] = int(scored.response_mask.sum()) / seconds
    return row


def curriculum_row(config: RunConfig, step: int) -> dict[str, float]:
    """How far lengths and rollouts had grown at a step, counted from 0; nothing where they do not grow."""
    given, row = config.curriculum, dict[str, float]()
    if given.steps and given.start_new_tokens:
        row["curriculum_new_tokens"] = config.new_tokens_at(step)
    if given.steps and given.start_rollout_batch_size:
        row["curriculum_rollout_rows"] = config.rows_at(step)
    return row


def counters(progress: Progress) -> dict[str, float]:
    """Where the run stands, by four measures that all rise."""
    return {
        "step": progress.step,
        "episodes": progress.episodes,
        "optimizer_steps": progress.optimizer_steps,
        "tokens": progress.tokens,
    }


def _scores(scores: Tensor) -> dict[str, float]:
    """Of the valid ones only: a failed score is no number (`learnable` has made sure that there is one)."""
    return {
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std(unbiased=False)),
        "score_raw_min": float(scores.min()),
        "score_raw_max": float(scores.max()),
    }


def _rollout(scored: ScoredRollout) -> dict[str, float]:
    mask, rows = scored.response_mask, len(scored.sequences)
    tokens = int(mask.sum())
    kl = float(torch.where(mask, scored.kl, 0.0).sum())
    k1, k3 = (
        float(torch.where(mask, kl_estimate(scored.log_probs, scored.ref_log_probs, name), 0.0).sum())
        for name in ("k1", "k3")
    )
    gap = (scored.sampler_log_probs - scored.log_probs).abs()[mask]
    sampler_kl = kl_estimate(scored.sampler_log_probs, scored.log_probs, "k3")[mask]
    return {
        "kl_per_sequence_mean": kl / rows,
        "kl_per_token_mean": kl / tokens,
        "kl_k1_per_sequence_mean": k1 / rows,
        "kl_k3_per_sequence_mean": k3 / rows,
        "response_length_mean": tokens / rows,
        "response_length_max": int(scored.lengths.max()),
        "eos_share": float((~scored.truncated).float().mean()),
        "sampler_gap_mean": float(gap.mean()),
        "sampler_gap_max": float(gap.max()),
        "sampler_kl_k3_per_token_mean": float(sampler_kl.mean()),
    }


def truncation_row(scored: ScoredRollout) -> dict[str, float]:
    """Log-ratio to the reference of cut responses and of those that ended, of either only where there are any."""
    ratio = torch.where(scored.response_mask, scored.log_probs - scored.ref_log_probs, 0.0).sum(dim=1)
    kinds = {"truncated": scored.truncated, "ended": ~scored.truncated}
    return {
        f"kl_k1_{name}_per_token_mean": float(ratio[rows].sum() / scored.lengths[rows].sum())
        for name, rows in kinds.items()
        if rows.any()
    }


def _values(experience: Experience) -> dict[str, float]:
    mask = experience.response_mask
    row = value_fit(experience)
    values, returns = (experience.total(each) for each in (experience.values, experience.returns))
    row["value_loss_fresh_per_token"] = 0.5 * float(masked_mean((values - returns).square(), mask))
    for name, tensor in (("value", values), ("return", returns), ("advantage", experience.advantages)):
        row[f"{name}_mean"], row[f"{name}_std"] = moments(tensor, mask)
    return row

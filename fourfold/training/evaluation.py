"""Held-out prompts under the policy of the moment: rewards, distance from the reference, and what a judge says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fourfold.algorithms.statistics import correlations, distinct_n
from fourfold.batch import Experience, ScoredRollout
from fourfold.diagnostics.kept import response_tokens, value_fit
from fourfold.scoring.combined import Reward, parts_of, told_by
from fourfold.scoring.sources import texts_of

Judge = Callable[[Sequence[str]], list[float]]


@dataclass(frozen=True)
class Evaluation:
    """Metrics on held-out prompts, and the texts that they come from."""

    metrics: dict[str, float]
    prompts: list[str]
    responses: list[str]


def parts_row(parts: Tensor, names: Sequence[str], prefix: str = "") -> dict[str, float]:
    """Mean and standard deviation of the raw scores (float32 [batch, dimensions]) of each part of a combined reward.

    Nothing for a reward of one source, of which `score_mean` and `score_std` tell.
    """
    if tuple(names) == ("score",):
        return {}
    row = {f"{prefix}score_mean/{name}": float(parts[:, i].mean()) for i, name in enumerate(names)}
    return row | {f"{prefix}score_std/{name}": float(parts[:, i].std(unbiased=False)) for i, name in enumerate(names)}


def steering_row(scored: ScoredRollout, names: Sequence[str]) -> dict[str, float]:
    """How far each part follows the weight that the prompt was told of it: their correlation over responses."""
    both = [correlations(torch.stack(each, dim=1)) for each in _columns(scored)]
    return {f"eval_steering/{name}": float(found[0, 1]) for name, found in zip(names, both, strict=True)}


def _columns(scored: ScoredRollout) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(scored.score_weights.unbind(dim=1), scored.score_parts.unbind(dim=1), strict=True)


def summarise(
    scored: Experience,
    tokenizer: Any,
    judge: Judge | None,
    reward: Reward,
    drift: Mapping[str, float] = MappingProxyType({}),
) -> Evaluation:
    """Metrics of an evaluation rollout, with those that tell how far the actor has gone from where it started; KL is
    the run's own estimator summed over each response.

    The judge reads prompt and response as one text, as a reader would, without weights that the prompt is told of.
    """
    prompts, responses = texts_of(scored, tokenizer)
    mask = scored.response_mask
    tokens = int(mask.sum())
    metrics = {
        "eval_score_mean": float(scored.scores.mean()),
        "eval_kl_per_sequence": float(torch.where(mask, scored.kl, 0.0).sum(dim=1).mean()),
        "eval_ref_log_prob_per_token": float(torch.where(mask, scored.ref_log_probs, 0.0).sum()) / tokens,
        "eval_distinct_2": distinct_n(response_tokens(scored), 2),
        "eval_mean_length": float(scored.lengths.float().mean()),
        "eval_eos_share": float((~scored.truncated).float().mean()),
        **drift,
    }
    metrics |= {f"eval_{name}": value for name, value in value_fit(scored).items()}
    names, told = [part.name for part in parts_of(reward)], told_by(reward)
    metrics |= parts_row(scored.score_parts, names, "eval_")
    if told is not None:
        metrics |= steering_row(scored, names)
    if judge is not None:
        read = prompts if told is None else texts_of(told.untold(scored), tokenizer)[0]
        judged = judge([prompt + response for prompt, response in zip(read, responses, strict=True)])
        metrics["eval_judge_mean"] = sum(judged) / len(judged)
    return Evaluation(metrics, prompts, responses)

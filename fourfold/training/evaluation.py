"""Held-out prompts under the policy of the moment: rewards, distance from the reference, and what a judge says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.algorithms.statistics import distinct_n
from fourfold.batch import Experience
from fourfold.diagnostics.kept import response_tokens, value_fit
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


def summarise(
    scored: Experience, tokenizer: Any, judge: Judge | None, dimensions: Sequence[str] = ("score",)
) -> Evaluation:
    """Metrics of an evaluation rollout; KL is the run's own estimator summed over each response.

    The judge reads prompt and response as one text, as a reader would; `dimensions` name the parts of the reward.
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
    }
    metrics |= parts_row(scored.score_parts, dimensions, "eval_")
    metrics |= {f"eval_{name}": value for name, value in value_fit(scored).items()}
    if judge is not None:
        judged = judge([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        metrics["eval_judge_mean"] = sum(judged) / len(judged)
    return Evaluation(metrics, prompts, responses)

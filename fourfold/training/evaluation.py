"""Held-out prompts under the policy of the moment: rewards, distance from the reference, and what a judge says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fourfold.algorithms.statistics import distinct_n
from fourfold.batch import Experience
from fourfold.diagnostics.kept import response_tokens, value_fit
from fourfold.memory.budget import BatchSize
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy
from fourfold.training.supervised import Texts, mean_nll
from fourfold.training.texts import TextCache

Judge = Callable[[Sequence[str]], list[float]]


@dataclass(frozen=True)
class HeldOutTexts:
    """Texts that the actor has not written: what it still knows of the language that sft has taught it."""

    base: Base
    texts: Texts
    size: BatchSize

    def nll(self, actor: Policy) -> float:
        """Nats a token under the actor as it is now (teacher-forced)."""
        return mean_nll(actor, _Inputs(self.base, actor), self.texts, self.size)


class _Inputs:
    """What an actor reads of texts; nothing of it is kept."""

    def __init__(self, base: Base, actor: Policy) -> None:
        self._ids = TextCache(replace(base, trunk=None))
        # Over a trunk that is trained the actor takes ids through its own.
        self._trunk = base.trunk if actor.trunk is None else None

    def activations(self, texts: Texts) -> tuple[Activations, Tensor]:
        """Of the frozen trunk where there is one, else the ids."""
        found, ids = self._ids.activations(texts)
        return found if self._trunk is None else Activations(self._trunk(ids, found.mask), found.mask), ids


@dataclass(frozen=True)
class Evaluation:
    """Metrics on held-out prompts, and the texts that they come from."""

    metrics: dict[str, float]
    prompts: list[str]
    responses: list[str]


def summarise(
    scored: Experience,
    prompts: list[str],
    responses: list[str],
    judge: Judge | None,
    drift: Mapping[str, float] = MappingProxyType({}),
) -> Evaluation:
    """Metrics of an evaluation rollout, with those that tell how far the actor has gone from where it started; KL is
    the run's own estimator summed over each response.

    The judge reads prompt and response as one text, as a reader would.
    """
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
    if judge is not None:
        judged = judge([prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        metrics["eval_judge_mean"] = sum(judged) / len(judged)
    return Evaluation(metrics, prompts, responses)

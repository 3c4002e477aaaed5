"""Responses that another engine has drawn, as a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fourfold.batch import Rollout
from fourfold.models.loading import Base
from fourfold.rollout.sampler import PromptBatch


@dataclass
class Response:
    """What was drawn for a row: tokens, their log-probs in the engine, and whether the response ended by itself."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool = False


def rollout_of(base: Base, prompts: PromptBatch, responses: Sequence[Response], policy_version: int) -> Rollout:
    """Still without the training engine's log-probs."""
    rollout = Rollout.of_tokens(prompts.tokens, [each.tokens for each in responses], base.pad_id)
    log_probs = torch.zeros_like(rollout.sampler_log_probs)
    log_probs[rollout.response_mask] = torch.tensor([number for each in responses for number in each.log_probs])
    rollout = replace(
        rollout,
        sampler_log_probs=log_probs,
        truncated=torch.tensor([not each.ended for each in responses]),
        policy_version=torch.full_like(rollout.policy_version, policy_version),
        prompt_id=torch.tensor(list(prompts.prompt_ids)),
    )
    return rollout.to(next(base.policy.parameters()).device)

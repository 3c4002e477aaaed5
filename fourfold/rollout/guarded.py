"""A sampler that draws from another distribution than the one that is trained, used as long as that is near enough."""

from __future__ import annotations

import logging

from fourfold.algorithms.masking import masked_mean
from fourfold.batch import Rollout
from fourfold.models.roles import Activations
from fourfold.rollout.sampler import PromptBatch, Sampler

log = logging.getLogger(__name__)


class GuardedSampler:
    """`quick` draws; a rollout that is more than `max_gap` off, in nats a token, is drawn again by `exact`.

    Importance weights mend small gaps. Beyond, most of a rollout's weights are at the cap or near 0, and a sampler that
    is broken shows nothing else.
    """

    def __init__(self, quick: Sampler, exact: Sampler, max_gap: float) -> None:
        self._quick = quick
        self._exact = exact
        self._max_gap = max_gap

    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """What the quick sampler drew, or the exact one with the same seeds."""
        rollout, activations = self._quick.generate(prompts, policy_version=policy_version)
        gap = mean_gap(rollout)
        if gap <= self._max_gap:
            return rollout, activations
        log.warning(
            "generate: sampler and trainer are %.3g nats a token apart (allowed by sampling.max_gap: %g); the rollout "
            "is drawn again in the training precision",
            gap,
            self._max_gap,
        )
        del rollout, activations  # the next ones need their room
        return self._exact.generate(prompts, policy_version=policy_version)


def mean_gap(rollout: Rollout) -> float:
    """Mean |sampler_log_probs - log_probs| over the response tokens, nats."""
    return float(masked_mean((rollout.sampler_log_probs - rollout.log_probs).abs(), rollout.response_mask))

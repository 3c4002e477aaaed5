"""The prior of a run, step by step: it moves by its rule, what stands still is guarded, and drift from step 0 is told.

Where the KL is taken to another policy than the actor at step 0, a small KL says nothing of how far the actor has gone:
KL(actor, actor at step 0) is logged beside it, estimated on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.algorithms.kl import kl_estimate
from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize
from fourfold.models.assembly import FourModels
from fourfold.models.roles import Activations, Policy
from fourfold.scoring.opinions import Opinions, ask, of_reference
from fourfold.training.held_out_texts import HeldOutTexts


@dataclass
class Prior:
    """Guards frozen weights and follows a reference's rule; `start` comes after a checkpoint has been put in."""

    models: FourModels
    temperature: float
    size: BatchSize
    texts: HeldOutTexts | None = None

    def start(self) -> None:
        """Note what must not change from here on."""
        self._frozen = self.models.frozen_checksums()

    def require_unmoved(self, step: int) -> None:
        """RunFailed where weights have changed that must not, or otherwise than the rule says."""
        if self.models.frozen_checksums() != self._frozen:
            raise RunFailed(
                f"step {step}: the weights of trunk, reference or reward have changed, which they "
                "must never do; nothing was saved, the checkpoint before is intact"
            )
        if self.models.moving is not None:
            self.models.moving.require_unmoved()

    def follow(self, step: int) -> None:
        """Move the reference as its rule says after `step` steps."""
        if self.models.moving is not None:
            self.models.moving.follow(step)

    def drift(self, rollout: Rollout, activations: Activations) -> dict[str, float]:
        """What a step logs of KL(actor, actor at step 0), nats a response; nothing where the KL is taken to that."""
        if self.models.step_0 is None:
            return {}
        found = self._log_probs(rollout, activations, self.models.step_0)
        return {"kl_step_0_per_sequence_mean": _kl(rollout, found)}

    def evaluated(self, rollout: Rollout, activations: Activations, valid: Tensor) -> dict[str, float]:
        """The same of held-out responses with a `valid` score, how likely the actor at step 0 finds them, and how
        likely the actor as it is finds held-out texts; those of the three that there are."""
        told = {} if self.texts is None else {"eval_text_nll_per_token": self.texts.nll(self.models.actor)}
        if self.models.step_0 is None:
            return told
        rows = valid.nonzero()[:, 0]
        rollout, activations = rollout.select(rows), activations.select(rows)
        found = self._log_probs(rollout, activations, self.models.step_0)
        likely = float(torch.where(rollout.response_mask, found, 0.0).sum()) / int(rollout.response_mask.sum())
        return told | {"eval_kl_step_0_per_sequence": _kl(rollout, found), "eval_step_0_log_prob_per_token": likely}

    @torch.no_grad()
    def _log_probs(self, rollout: Rollout, activations: Activations, policy: Policy) -> Tensor:
        """Of the response tokens under the actor at step 0."""
        found = Opinions.empty(rollout, parts=0)  # no reward is asked
        ask(found, rollout, activations, policy, of_reference(policy, self.temperature, self.size), self.size)
        return found.ref_log_probs


def _kl(rollout: Rollout, log_probs: Tensor) -> float:
    """Sum over tokens of log p - log p_0, the mean over responses: k1, which is unbiased for tokens drawn from p."""
    k1 = kl_estimate(rollout.log_probs, log_probs, "k1")
    return float(torch.where(rollout.response_mask, k1, 0.0).sum()) / len(rollout.sequences)

"""Held-out texts under the actor of the moment: what it still knows of the language that sft has taught it."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.memory.budget import BatchSize
from fourfold.models.loading import Base
from fourfold.models.roles import Policy
from fourfold.training.supervised import Texts, mean_nll
from fourfold.training.texts import UncachedTexts


@dataclass(frozen=True)
class HeldOutTexts:
    """Texts that somebody else has written, and how many of them are read at a time."""

    base: Base
    texts: Texts
    size: BatchSize

    def nll(self, actor: Policy) -> float:
        """Nats a token under the actor as it is now (teacher-forced)."""
        # Over a trunk that is trained the actor takes ids through its own.
        inputs = UncachedTexts(self.base, self.base.trunk if actor.trunk is None else None)
        return mean_nll(actor, inputs, self.texts, self.size)

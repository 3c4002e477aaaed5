"""Held-out texts under the actor of the moment: what it still knows of the language that sft has taught it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fourfold.memory.budget import BatchSize
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy
from fourfold.training.supervised import Texts, mean_nll
from fourfold.training.texts import TextCache


@dataclass(frozen=True)
class HeldOutTexts:
    """Texts that somebody else has written, and how many of them are read at a time."""

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

"""What the trainer asks of a sampler, whatever engine it drives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fourfold.batch import Rollout
from fourfold.models.roles import Activations


@dataclass(frozen=True)
class PromptBatch:
    """Token ids of prompts, the number of each in its data set, and a seed for each response to draw.

    A response has at most `max_new_tokens`; None leaves it to the sampler's settings.
    """

    tokens: Sequence[Sequence[int]]
    prompt_ids: Sequence[int]
    seeds: Sequence[int]
    max_new_tokens: int | None = None

    def first(self, rows: int) -> PromptBatch:
        """The first rows only."""
        return PromptBatch(self.tokens[:rows], self.prompt_ids[:rows], self.seeds[:rows], self.max_new_tokens)


class Listener(Protocol):
    """Is told of the rows of a rollout while others are still to be sampled."""

    def begin(self) -> None:
        """A rollout begins."""
        ...

    def finished(self, rows: Sequence[int], rollout: Rollout, activations: Activations) -> None:
        """These rows of the rollout, all but their `log_probs`, and what every pass over them starts from."""
        ...


class Sampler(Protocol):
    """Draws one response for each row of a `PromptBatch` from the policy as it is now."""

    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """The rollout, and the activations that every later pass over it starts from.

        `sampler_log_probs` are log-probs of the tempered distribution that was sampled (processed, not raw).
        """
        ...


def row_seed(*parts: int | str) -> int:
    """A 63-bit seed made of the run's seed and a row's place, so that no generator state has to be carried along."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

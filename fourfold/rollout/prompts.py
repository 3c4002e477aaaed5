"""Which prompts a step samples from: a pure function of seed and step, so resuming needs no state."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fourfold.rollout.sampler import PromptBatch, row_seed


class PromptStream:
    """Endless shuffled passes over the prompts; each pass sees every prompt once."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, seed: int, rows: int, responses_per_prompt: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._per_prompt = responses_per_prompt
        self._prompts_a_step = rows // responses_per_prompt
        self._orders: dict[int, list[int]] = {}

    def elsewhere(self, seed: int) -> PromptStream:
        """The same prompts in other orders, with other random numbers for their responses."""
        rows = self._prompts_a_step * self._per_prompt
        return PromptStream(self._prompts, seed=seed, rows=rows, responses_per_prompt=self._per_prompt)

    def batch(self, step: int) -> PromptBatch:
        """The prompts of a step (counted from 0); the responses to one prompt stand side by side."""
        first = step * self._prompts_a_step
        ids = [self._at(first + i) for i in range(self._prompts_a_step) for _ in range(self._per_prompt)]
        seeds = [row_seed("rollout", self._seed, step, row) for row in range(len(ids))]
        return PromptBatch([self._prompts[i] for i in ids], ids, seeds)

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._prompts))
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            random.Random(row_seed("order", self._seed, epoch)).shuffle(order)
            # A batch may straddle two passes, so the one before is kept.
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1} | {epoch: order}
        return self._orders[epoch][place]


def evaluation_batch(prompts: Sequence[Sequence[int]], *, seed: int, responses_per_prompt: int) -> PromptBatch:
    """Every prompt with fixed seeds, so that two policies are compared on the same random numbers."""
    ids = [i for i in range(len(prompts)) for _ in range(responses_per_prompt)]
    seeds = [row_seed("evaluation", seed, row) for row in range(len(ids))]
    return PromptBatch([prompts[i] for i in ids], ids, seeds)

"""Which prompts a step samples from: a pure function of seed and step, so resuming needs no state."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fourfold.rollout.sampler import PromptBatch, row_seed


class PromptStream:
    """Endless shuffled passes over the prompts; each pass sees every prompt once.

    `rows` are the responses of a step, `new_tokens` their limit; both may depend on the step, counted from 0.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        rows: Callable[[int], int],
        responses_per_prompt: int,
        new_tokens: Callable[[int], int | None] = lambda step: None,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._per_prompt = responses_per_prompt
        self._rows = rows
        self._new_tokens = new_tokens
        self._firsts = [0]  # place of the first prompt of each step, as far as it has been asked for
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int) -> PromptBatch:
        """The prompts of a step (counted from 0); the responses to one prompt stand side by side."""
        while len(self._firsts) <= step + 1:
            self._firsts.append(self._firsts[-1] + self._rows(len(self._firsts) - 1) // self._per_prompt)
        ids = [self._at(place) for place in range(*self._firsts[step : step + 2]) for _ in range(self._per_prompt)]
        seeds = [row_seed("rollout", self._seed, step, row) for row in range(len(ids))]
        return PromptBatch([self._prompts[i] for i in ids], ids, seeds, self._new_tokens(step))

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

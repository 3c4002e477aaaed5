"""Which prompts a step samples from: a pure function of seed and step, so resuming needs no state."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from fourfold.data.told_weights import ToldWeights
from fourfold.rollout.sampler import PromptBatch, row_seed


class PromptStream:
    """Endless shuffled passes over the prompts; each pass sees every prompt once.

    `rows` are the responses of a step, `new_tokens` their limit; both may depend on the step, counted from 0. With
    `told`, weights are drawn for each prompt of a step and told in front of it; its responses share them.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        rows: Callable[[int], int],
        responses_per_prompt: int,
        new_tokens: Callable[[int], int | None] = lambda step: None,
        told: ToldWeights | None = None,
    ) -> None:
        self._prompts = prompts
        self._told = told
        self._seed = seed
        self._per_prompt = responses_per_prompt
        self._rows = rows
        self._new_tokens = new_tokens
        self._firsts = [0]  # place of the first prompt of each step, as far as it has been asked for
        self._orders: dict[int, list[int]] = {}

    def elsewhere(self, seed: int) -> PromptStream:
        """The same prompts in other orders, with other random numbers; every step as large as the first one here."""
        return PromptStream(
            self._prompts,
            seed=seed,
            rows=lambda step: self._rows(0),
            responses_per_prompt=self._per_prompt,
            new_tokens=lambda step: self._new_tokens(0),
            told=self._told,
        )

    def batch(self, step: int) -> PromptBatch:
        """The prompts of a step (counted from 0); the responses to one prompt stand side by side."""
        while len(self._firsts) <= step + 1:
            self._firsts.append(self._firsts[-1] + self._rows(len(self._firsts) - 1) // self._per_prompt)
        places = range(*self._firsts[step : step + 2])
        ids, seeds = [self._at(place) for place in places], [row_seed("weights", self._seed, place) for place in places]
        prompts = _told(self._told, [self._prompts[i] for i in ids], seeds)
        batch = _several(prompts, ids, self._per_prompt, "rollout", self._seed, step)
        return replace(batch, max_new_tokens=self._new_tokens(step))

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._prompts))
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            random.Random(row_seed("order", self._seed, epoch)).shuffle(order)
            # A batch may straddle two passes, so the one before is kept.
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1} | {epoch: order}
        return self._orders[epoch][place]


def evaluation_batch(
    prompts: Sequence[Sequence[int]], *, seed: int, responses_per_prompt: int, told: ToldWeights | None = None
) -> PromptBatch:
    """Every prompt with fixed seeds, and weights, so that two policies are compared on the same random numbers."""
    seeds = [row_seed("evaluation weights", seed, i) for i in range(len(prompts))]
    return _several(_told(told, prompts, seeds), range(len(prompts)), responses_per_prompt, "evaluation", seed)


def _told(told: ToldWeights | None, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Sequence[int]]:
    """The prompts, each with weights drawn by its seed in front."""
    if told is None:
        return prompts
    return [told.tell(prompt, told.draw(seed)) for prompt, seed in zip(prompts, seeds, strict=True)]


def _several(prompts: Sequence[Sequence[int]], ids: Sequence[int], each: int, *address: int | str) -> PromptBatch:
    """A row for each of several responses to every prompt, side by side, with a seed of its own."""
    rows = [i for i in range(len(prompts)) for _ in range(each)]
    seeds = [row_seed(*address, row) for row in range(len(rows))]
    return PromptBatch([prompts[i] for i in rows], [ids[i] for i in rows], seeds)

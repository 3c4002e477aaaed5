"""Texts for supervised stages: batches of similar length, over cached activations of the frozen trunk."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fourfold.memory.budget import BatchSize
from fourfold.models.loading import Base
from fourfold.models.roles import Activations
from fourfold.models.split import Part
from fourfold.rollout.sampler import row_seed

# Rows of this many batches are sorted by length before they are cut into batches: little padding, enough shuffling.
BUCKET_BATCHES = 8
# Tokens that the trunk works on at once when it fills the cache.
TRUNK_TOKENS = 4096


class TextCache:
    """Activations of whole texts below the branches: computed once a text, used by every epoch of a stage.

    Each stage fills a cache of its own: which texts share a pass through the trunk then depends on the stage's data
    alone, not on what an earlier stage of the same process has left, and a resumed run stays equal bit for bit.

    Without a trunk there is nothing to cache and the token ids themselves are the input.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._device = next(base.policy.parameters()).device
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._at_once = BatchSize("cache", "trunk", 0, base.budget)

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(row.numel() * row.element_size() for row in self._rows.values())

    def missing(self, texts: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        """The texts that `fill` would have to compute, shortest first."""
        if self._base.trunk is None:
            return []
        return sorted({tuple(text) for text in texts} - self._rows.keys(), key=lambda text: (len(text), text))

    @torch.no_grad()
    def fill(self, texts: Sequence[tuple[int, ...]]) -> Iterable[int]:
        """Run the trunk over texts of similar length together; yields how many were done after each batch."""
        trunk = self._base.trunk
        assert trunk is not None, "there is no trunk, so nothing is ever missing"
        start = 0
        while start < len(texts):
            stop = start + 1
            while stop < len(texts) and len(texts[stop]) * (stop + 1 - start) <= TRUNK_TOKENS:
                stop += 1
            self._at_once.through(stop - start, partial(self._fill, trunk, texts[start:stop]))
            yield stop - start
            start = stop

    def _fill(self, trunk: Part, texts: Sequence[tuple[int, ...]], piece: slice) -> None:
        ids, mask = self._pad(texts[piece])
        hidden = trunk(ids, mask)
        for row, text in zip(hidden, texts[piece], strict=True):
            self._rows[text] = row[: len(text)].clone()

    def activations(self, texts: Sequence[Sequence[int]]) -> tuple[Activations, Tensor]:
        """Right-padded input of the branches, and the ids [batch, time]."""
        ids, mask = self._pad(texts)
        if self._base.trunk is None:
            return Activations(ids, mask), ids
        rows = [self._rows[tuple(text)] for text in texts]
        return Activations(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask), ids

    def _pad(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(text) for text in texts)
        ids = torch.full((len(texts), width), self._base.pad_id, dtype=torch.int64)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = torch.tensor(text)
        lengths = torch.tensor([len(text) for text in texts])
        return ids.to(self._device), (torch.arange(width) < lengths[:, None]).to(self._device)


class UncachedTexts:
    """The same input of texts that are read once: each pass goes through `trunk`, if any, and nothing is kept."""

    def __init__(self, base: Base, trunk: Part | None) -> None:
        self._ids = TextCache(replace(base, trunk=None))
        self._trunk = trunk

    def activations(self, texts: Sequence[Sequence[int]]) -> tuple[Activations, Tensor]:
        """Right-padded input of the branches, and the ids [batch, time]."""
        found, ids = self._ids.activations(texts)
        return found if self._trunk is None else Activations(self._trunk(ids, found.mask), found.mask), ids


def epoch_batches(lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Shuffled batches of row numbers whose rows have similar lengths; every row once, the last batch may be small."""
    generator = random.Random(row_seed("texts", seed, epoch))
    order = list(range(len(lengths)))
    generator.shuffle(order)
    batches: list[list[int]] = []
    bucket = batch_size * BUCKET_BATCHES
    for start in range(0, len(order), bucket):
        rows = sorted(order[start : start + bucket], key=lambda row: lengths[row])
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    generator.shuffle(batches)
    return batches


def draw(count: int, limit: int, *, seed: int, name: str) -> list[int]:
    """Row numbers to use: all, or `limit` of them drawn by the seed."""
    order = list(range(count))
    if not limit or limit >= count:
        return order
    random.Random(row_seed(name, seed)).shuffle(order)
    return sorted(order[:limit])

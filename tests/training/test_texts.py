"""Batches of texts, and the cache of what lies below the branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.models.loading import Base, load_base
from fourfold.training import texts as module
from fourfold.training.texts import TextCache, draw, epoch_batches
from training.runs import SHARINGS, make_config, settings

TEXTS = [[5, 9, 33], [7], [8, 90, 41, 12, 66, 30], [5, 9, 34], [11, 12]]


def base_for(folder: Path, sharing: str) -> Base:
    return load_base(make_config(settings(folder, SHARINGS[sharing])))


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_every_row_is_in_an_epoch_once(lengths: list[int], batch_size: int, seed: int) -> None:
    first, second, again = (epoch_batches(lengths, batch_size, seed=seed, epoch=epoch) for epoch in (0, 1, 0))
    assert sorted(row for batch in first for row in batch) == list(range(len(lengths)))
    assert sorted(row for batch in second for row in batch) == list(range(len(lengths)))
    assert first == again
    assert all(0 < len(batch) <= batch_size for batch in first)
    assert len(first) == -(-len(lengths) // batch_size), "at most one batch is not full"


def test_epochs_and_seeds_differ_and_batches_hold_similar_lengths() -> None:
    lengths = [1 + (i * 37) % 50 for i in range(256)]
    orders = [epoch_batches(lengths, 8, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] and orders[0] != orders[2]
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in orders[0])
    assert padded < 1.15 * sum(lengths), "little of a batch is padding"
    longest = [max(lengths[row] for row in batch) for batch in orders[0]]
    assert longest != sorted(longest), "batches come in no order of length"


@given(count=st.integers(0, 60), limit=st.integers(0, 80), seed=st.integers(0, 1000))
def test_drawn_rows_are_different_and_in_order(count: int, limit: int, seed: int) -> None:
    rows = draw(count, limit, seed=seed, name="texts")
    assert rows == sorted(set(rows)) and set(rows) <= set(range(count))
    assert len(rows) == (min(count, limit) if limit else count)
    assert rows == draw(count, limit, seed=seed, name="texts")


def test_drawing_depends_on_seed_and_name() -> None:
    assert len({tuple(draw(50, 10, seed=s, name=n)) for s, n in ((0, "texts"), (1, "texts"), (0, "pairs"))}) == 3


@torch.no_grad()
def test_cached_activations_are_those_of_a_direct_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever texts were computed together: alone, unpadded, each gives the same to 1e-5."""
    base = base_for(tmp_path, "trunk")
    assert base.trunk is not None
    monkeypatch.setattr(module, "TRUNK_TOKENS", 8)  # several batches of padded texts
    cache = TextCache(base)
    missing = cache.missing(TEXTS)
    done = list(cache.fill(missing))
    assert sum(done) == len(TEXTS) and len(done) > 1
    assert cache.missing(TEXTS) == []
    assert cache.bytes == sum(map(len, TEXTS)) * base.trunk.hidden_size * 4

    rows = [2, 0, 1]
    activations, ids = cache.activations([TEXTS[row] for row in rows])
    assert activations.mask.sum(dim=1).tolist() == [6, 3, 1]
    for place, row in enumerate(rows):
        text = torch.tensor([TEXTS[row]])
        length = text.shape[1]
        assert ids[place, :length].tolist() == TEXTS[row]
        assert activations.mask[place].tolist() == [True] * length + [False] * (6 - length)
        direct = base.trunk(text, torch.ones_like(text, dtype=torch.bool))
        torch.testing.assert_close(activations.inputs[place, :length], direct[0], rtol=1e-5, atol=1e-5)


def test_without_a_trunk_the_ids_are_the_input(tmp_path: Path) -> None:
    cache = TextCache(base_for(tmp_path, "none"))
    assert cache.missing(TEXTS) == [] and cache.bytes == 0
    activations, ids = cache.activations(TEXTS)
    assert activations.inputs is ids and ids.dtype == torch.int64 and ids.shape == (5, 6)

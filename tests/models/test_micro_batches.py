"""Micro-batches: every row once, no column of mere padding, the same numbers."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.batch import Experience
from fourfold.models.micro_batches import cut_rows, micro_batches
from fourfold.models.roles import Activations
from test_batch import make_batch
from tiny_roles import MODES, activations_of, tiny_base, tiny_rollout

LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=6)


def whole(lengths: tuple[int, ...]) -> tuple[Experience, Activations]:
    batch = make_batch(Experience, lengths)
    inputs = torch.arange(batch.sequences.numel()).reshape(*batch.sequences.shape, 1).float()
    return batch, Activations(inputs, batch.attention_mask)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(0, 30), st.randoms())
def test_every_row_comes_once_with_all_of_its_tokens(
    lengths: list[int], size: int, tokens: int, random: Random
) -> None:
    batch, activations = whole(tuple(lengths))
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    seen: list[int] = []
    pieces = cut_rows(batch, torch.tensor(rows), size, tokens)
    for chosen, part, inputs in micro_batches(batch, activations, pieces):
        assert 1 <= len(chosen) <= size
        longest = int(part.attention_mask.sum(dim=1).max())
        assert not tokens or len(chosen) == 1 or len(chosen) * longest <= tokens
        seen += chosen.tolist()
        assert torch.equal(inputs.mask, part.attention_mask)
        for i, row in enumerate(chosen.tolist()):
            alone, mask = batch.select(torch.tensor([row])), part.response_mask[i]
            assert torch.equal(part.sequences[i][part.attention_mask[i]], batch.sequences[row][activations.mask[row]])
            assert torch.equal(inputs.inputs[i][inputs.mask[i]], activations.inputs[row][activations.mask[row]])
            for name in ("advantages", "log_probs", "values"):
                assert torch.equal(getattr(part, name)[i][mask], getattr(alone, name)[alone.response_mask])
            assert part.scores[i] == batch.scores[row]
    assert sorted(seen) == sorted(rows)


@settings(deadline=None)
@given(LENGTHS)
def test_a_trimmed_batch_has_a_real_token_in_its_outer_columns(lengths: list[int]) -> None:
    batch, _ = whole(tuple(lengths))
    part = batch.trimmed()
    assert type(part) is Experience
    assert bool(part.prompt_mask[:, 0].any()) and bool(part.response_mask[:, -1].any())
    assert part.lengths.tolist() == lengths
    assert all(torch.equal(getattr(part.trimmed(), f.name), getattr(part, f.name)) for f in fields(part))


def test_rows_of_like_length_share_a_micro_batch() -> None:
    batch, activations = whole((4, 1, 4, 1))
    widths = [
        part.response_mask.shape[1]
        for _, part, _ in micro_batches(batch, activations, cut_rows(batch, torch.arange(4), 2))
    ]
    assert widths == [1, 4]


def test_a_batch_without_prompt_tokens_keeps_the_state_before_the_first_response_token() -> None:
    batch, _ = whole((2, 1))
    empty = Experience(
        **{f.name: getattr(batch, f.name) for f in fields(batch)} | {"prompt_mask": torch.zeros(2, 3, dtype=torch.bool)}
    )
    assert empty.trimmed().prompt_length == 3


def test_an_empty_batch_is_left_as_it_is() -> None:
    batch, _ = whole((2, 1))
    none = batch.select(torch.zeros(0, dtype=torch.int64))
    assert none.trimmed().sequences.shape == (0, batch.sequences.shape[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
@torch.no_grad()
def test_roles_say_the_same_of_trimmed_rows(tmp_path: Path, mode: str, size: int) -> None:
    base = tiny_base(tmp_path / "m", "llama", mode)
    rollout = tiny_rollout([(3, 4), (6, 1), (1, 5), (4, 2)])
    activations = activations_of(base, rollout)
    scorer = base.new_scorer()
    torch.nn.init.normal_(scorer.head.linear.weight, generator=torch.Generator().manual_seed(1))
    log_probs, _ = base.policy.log_probs(activations, rollout, 0.7)
    values, last = scorer.values_and_last(activations, rollout)
    scores = scorer.scores(activations)
    for rows, part, inputs in micro_batches(rollout, activations, cut_rows(rollout, torch.arange(4), size)):
        columns = part.response_mask.shape[1]
        close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
        close(base.policy.log_probs(inputs, part, 0.7)[0], log_probs[rows, :columns])
        part_values, part_last = scorer.values_and_last(inputs, part)
        close(part_values, values[rows, :columns])
        close(part_last, last[rows])
        close(scorer.scores(inputs), scores[rows])

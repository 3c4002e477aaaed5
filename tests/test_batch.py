"""The data contract: shapes, dtypes, masks and what is derived from them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.batch import Experience, Rollout, ScoredRollout

PROMPT, RESPONSE, PARTS = 3, 4, 2


def make_batch(
    stage: type[Rollout] = Experience,
    lengths: tuple[int, ...] = (4, 1, 2),
    seed: int = 0,
    values: tuple[int, ...] = (),
) -> Any:
    """A batch of any stage: mixed lengths, left-padded prompts, random numbers in every float column."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    tensors = {
        "prompt_mask": torch.arange(PROMPT) >= torch.arange(rows)[:, None] % PROMPT,
        "response_mask": torch.arange(RESPONSE) < torch.tensor(lengths)[:, None],
        "sequences": torch.randint(50_000, (rows, PROMPT + RESPONSE), generator=generator),
        "truncated": torch.arange(rows) % 2 == 0,
        "policy_version": torch.arange(rows) + 7,
        "prompt_id": torch.arange(rows) * 10,
    }
    tensors["scores"] = torch.randn(rows, generator=generator)
    for name in ("score_parts", "score_weights"):
        tensors[name] = torch.randn(rows, PARTS, generator=generator)
    tensors["last_values"] = torch.randn(rows, *values, generator=generator)
    for name in ("values", "rewards", "returns"):
        tensors[name] = torch.randn(rows, RESPONSE, *values, generator=generator)
    for field in fields(Experience):
        if field.name not in tensors:
            tensors[field.name] = torch.randn(rows, RESPONSE, generator=generator)
    return stage(**{field.name: tensors[field.name] for field in fields(stage)})


def test_lengths_and_attention_mask_are_derived() -> None:
    batch = make_batch(Rollout)
    assert batch.prompt_length == PROMPT
    assert batch.lengths.tolist() == [4, 1, 2]
    assert batch.attention_mask.int().tolist() == [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
    ]


@pytest.mark.parametrize("stage", [Rollout, ScoredRollout, Experience])
def test_each_stage_is_a_type_that_inherits_the_one_before(stage: type[Rollout]) -> None:
    batch = make_batch(stage)
    assert isinstance(batch, Rollout)
    assert isinstance(batch, Experience) == (stage is Experience)
    with pytest.raises(TypeError):
        stage(**{f.name: getattr(batch, f.name) for f in fields(stage)[:-1]})


def test_selected_rows_keep_stage_and_order() -> None:
    batch = make_batch()
    part = batch.select(torch.tensor([2, 0]))
    assert type(part) is Experience
    for field in fields(Experience):
        whole = getattr(batch, field.name)
        assert torch.equal(getattr(part, field.name), torch.stack([whole[2], whole[0]]))


def test_a_batch_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        make_batch().scores = torch.zeros(3)


def test_a_batch_on_its_own_device_is_the_same_batch() -> None:
    batch = make_batch()
    moved = batch.to(torch.device("cpu"))
    assert type(moved) is Experience
    for field in fields(Experience):
        assert torch.equal(getattr(moved, field.name), getattr(batch, field.name))


@settings(deadline=None)
@given(st.lists(st.integers(1, RESPONSE), min_size=1, max_size=5))
def test_any_prefix_mask_is_accepted(lengths: list[int]) -> None:
    assert make_batch(Rollout, tuple(lengths)).lengths.tolist() == lengths


@pytest.mark.parametrize("parts", [1, 3, 6])
def test_trimming_cuts_responses_and_leaves_every_part_of_the_score(parts: int) -> None:
    """More parts than the longest response has tokens, too."""
    batch = make_batch(lengths=(1, 2, 1))
    batch = replace(batch, score_parts=torch.randn(3, parts), score_weights=torch.randn(3, parts))
    short = batch.trimmed()
    assert short.values.shape == (3, 2) and torch.equal(short.score_parts, batch.score_parts)
    assert torch.equal(short.score_weights, batch.score_weights)


@pytest.mark.parametrize("dimensions", [1, 3, 6])
def test_trimming_and_selecting_leave_every_dimension_of_a_value(dimensions: int) -> None:
    """More dimensions than the longest response has tokens, too."""
    batch = make_batch(lengths=(1, 2, 1), values=(dimensions,))
    short = batch.trimmed()
    for name in ("values", "rewards", "returns"):
        assert torch.equal(getattr(short, name), getattr(batch, name)[:, :2]), name
    assert torch.equal(short.last_values, batch.last_values)
    assert batch.select(torch.tensor([2, 0])).values.shape == (2, RESPONSE, dimensions)


def test_the_penalties_weigh_1_beside_the_parts() -> None:
    batch = make_batch(values=(PARTS + 1,))
    assert batch.by_dimension and not make_batch().by_dimension
    assert torch.equal(batch.dimension_weights, torch.cat([batch.score_weights, torch.ones(3, 1)], dim=1))


def test_a_total_is_each_rows_own_weighted_sum() -> None:
    batch = replace(make_batch(values=(PARTS + 1,)), score_weights=torch.tensor([[1.0, 0.5], [2.0, -0.1], [0.0, 0.0]]))
    x = torch.tensor([[[1.0, 10.0, 100.0], [2.0, 20.0, 0.0]]] * 3)
    torch.testing.assert_close(batch.total(x), torch.tensor([[106.0, 12.0], [101.0, 2.0], [100.0, 0.0]]))
    assert batch.total(x[:, 0]).tolist() == pytest.approx([106.0, 101.0, 100.0])
    scalar = make_batch()
    assert batch.total(x).shape == (3, 2) and scalar.total(scalar.values) is scalar.values


def test_values_of_other_dimensions_than_their_returns_are_refused() -> None:
    with pytest.raises(TypeError, match="returns"):
        replace(make_batch(values=(2,)), returns=torch.zeros(3, RESPONSE))


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one True"):
        make_batch(Rollout, (4, 0, 2))


def test_a_response_mask_with_a_gap_is_refused() -> None:
    gap = torch.tensor([[True, False, True, False]] * 3)
    with pytest.raises(ValueError, match="prefix"):
        replace(make_batch(Rollout), response_mask=gap)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("log_probs", torch.zeros(3, RESPONSE + 1)),
        ("log_probs", torch.zeros(2, RESPONSE)),
        ("log_probs", torch.zeros(3, RESPONSE, dtype=torch.bfloat16)),
        ("sequences", torch.zeros(3, PROMPT + RESPONSE - 1, dtype=torch.int64)),
        ("sequences", torch.zeros(3, PROMPT + RESPONSE, dtype=torch.int32)),
        ("truncated", torch.zeros(3)),
        ("values", torch.zeros(3)),
        ("scores", torch.zeros(3, 1)),
        ("score_parts", torch.zeros(3)),
        ("score_parts", torch.zeros(2, PARTS)),
        ("score_weights", torch.zeros(3, PARTS + 1)),
        ("advantages", torch.zeros(3, RESPONSE, dtype=torch.float64)),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_by_name(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=name):
        replace(make_batch(), **{name: wrong})

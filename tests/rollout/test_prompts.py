"""Which prompts a step samples from, as a pure function of seed and step."""

from __future__ import annotations

import pytest

from fourfold.rollout.prompts import PromptStream, evaluation_batch
from fourfold.rollout.sampler import row_seed

PROMPTS = [[10 + i, 20 + i] for i in range(7)]


def stream(rows: int = 3, responses: int = 1, seed: int = 5) -> PromptStream:
    return PromptStream(PROMPTS, seed=seed, rows=lambda step: rows, responses_per_prompt=responses)


@pytest.mark.parametrize("rows", [1, 3, 7, 10])
def test_every_epoch_holds_every_prompt_once(rows: int) -> None:
    prompts = stream(rows)
    ids = [i for step in range(7 * 4) for i in prompts.batch(step).prompt_ids]
    epochs = [ids[start : start + 7] for start in range(0, len(ids) - 6, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs[:4]}) > 1, "every epoch has an order of its own"


@pytest.mark.parametrize("rows", [3, 10])
def test_a_batch_depends_on_its_step_alone(rows: int) -> None:
    """Resuming at any step, or looking back, gives the batches of a run that went straight through."""
    straight = stream(rows)
    expected = [straight.batch(step) for step in range(12)]
    for first in range(12):
        for second in range(12):
            prompts = stream(rows)
            assert [prompts.batch(first), prompts.batch(second)] == [expected[first], expected[second]]


def test_the_responses_to_a_prompt_stand_side_by_side() -> None:
    batch = stream(rows=6, responses=3).batch(0)
    first, second = batch.prompt_ids[0], batch.prompt_ids[3]
    assert list(batch.prompt_ids) == [first] * 3 + [second] * 3 and first != second
    assert list(batch.tokens) == [PROMPTS[i] for i in batch.prompt_ids]


def test_no_two_rows_of_a_run_share_a_seed() -> None:
    prompts = stream(rows=6, responses=3)
    seeds = [seed for step in range(50) for seed in prompts.batch(step).seeds]
    seeds += evaluation_batch(PROMPTS, seed=5, responses_per_prompt=2).seeds
    seeds += stream(seed=6).batch(0).seeds
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_another_seed_is_another_order() -> None:
    orders = {tuple(i for step in range(7) for i in stream(1, seed=seed).batch(step).prompt_ids) for seed in range(4)}
    assert len(orders) == 4


def test_evaluation_asks_every_prompt_with_the_same_seeds_every_time() -> None:
    batch = evaluation_batch(PROMPTS, seed=5, responses_per_prompt=2)
    assert batch == evaluation_batch(PROMPTS, seed=5, responses_per_prompt=2)
    assert list(batch.prompt_ids) == [i for i in range(7) for _ in range(2)]
    assert list(batch.tokens) == [PROMPTS[i] for i in batch.prompt_ids]
    assert batch.seeds != evaluation_batch(PROMPTS, seed=6, responses_per_prompt=2).seeds


def test_seeds_do_not_change_between_versions() -> None:
    """They are part of what a resumed run relies on."""
    assert row_seed("rollout", 0, 0, 0) == 6856300233076026002
    assert row_seed("a", 1, 12) != row_seed("a", 11, 2)

"""Where the process's resident memory is held to the budget besides decoder layers: logits, steps of parked states."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.config.schema import MemorySection, OptimizerSection, PpoSection
from fourfold.memory.budget import BatchSize, BatchSizes, Budget, OverBudget, rows_within
from fourfold.models.heads import LanguageHead
from tiny_roles import MODES, tiny_base

MIB = 2**20


def test_a_chunk_of_logits_is_made_where_there_is_room_for_it_only() -> None:
    """1,024 tokens of 50,000 float32 logits are 195 MiB, of bfloat16 98 MiB; half as many tokens half of it."""
    budget = Budget()
    head = LanguageHead(nn.Parameter(torch.zeros(50_000, 8)), None, 0.0, budget)
    copied = copy.deepcopy(head)
    assert copied.budget is budget, "a copy is of the same process"

    def read(tokens: int, dtype: torch.dtype = torch.float32) -> None:
        labels = torch.zeros(tokens, dtype=torch.int64)
        copied.log_probs(torch.zeros(tokens, 8), labels, 1.0, dtype, entropy="none")

    budget.bytes = budget.resident() + 120 * MIB
    with pytest.raises(OverBudget, match=r"are resident and 0\.191 GiB are wanted, memory\.budget_gib"):
        read(1024)
    with pytest.raises(OverBudget):
        copied.full_kl(torch.zeros(1024, 8), head, torch.zeros(1024, 8), 1.0, (torch.float32, torch.float32))
    read(512)
    read(1024, torch.bfloat16)
    budget.bytes = 0
    read(1024)


@pytest.mark.parametrize("mode", MODES)
def test_the_heads_of_a_run_keep_to_its_budget(tmp_path: Path, mode: str) -> None:
    base = tiny_base(tmp_path / "model", mode=mode, memory__budget_gib=64.0)
    assert base.policy.head.budget is base.budget and base.budget.bytes == 64 * 2**30


@pytest.mark.parametrize("residency", ["park", "offload"])
def test_the_states_that_a_step_brings_in_count(tmp_path: Path, residency: Any) -> None:
    """One parameter's moments, and an offloaded one's master, are the most that a step has in memory."""
    budget = Budget()
    net = nn.Linear(4, 3)
    adam = LocalOptimizer(
        "actor",
        net,
        OptimizerSection(),
        total_steps=4,
        memory=MemorySection(optimizer_residency=residency),
        folder=tmp_path,
        budget=budget,
    )
    for limit in (0, budget.resident() + 1024 * MIB):
        budget.bytes = limit
        adam.backward(net(torch.ones(2, 4)).sum())
        adam.step()
    budget.bytes = 1
    adam.backward(net(torch.ones(2, 4)).sum())
    with pytest.raises(OverBudget):
        adam.step()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 40))
def test_rows_fill_a_limit_of_tokens(lengths: list[int], tokens: int) -> None:
    """By trying every number of rows: the most of which all shorter starts keep to the limit, and one at least."""
    fits = [count * max(lengths[:count]) <= tokens or not tokens for count in range(1, len(lengths) + 1)]
    expected = len(list(itertools.takewhile(bool, fits)))
    assert rows_within(lengths, tokens) == max(expected, 1)


def test_a_pass_ends_at_its_tokens_and_a_shortage_halves_them_too() -> None:
    taken: list[tuple[int, int]] = []
    size = BatchSize("score", "reference", 4, tokens=12)

    def work(piece: slice) -> None:
        if len(taken) == 1 and size.tokens == 12:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        taken.append((piece.start, piece.stop))

    size.through(8, work, lambda: [1, 2, 2, 3, 6, 6, 7, 20])
    assert taken == [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert (size.size, size.tokens) == (2, 6)


def test_halved_tokens_are_those_of_a_resumed_run() -> None:
    sizes = BatchSizes.of(PpoSection(micro_batch_tokens=100))
    sizes.actor.tokens, sizes.actor.size = 50, 16
    resumed = BatchSizes.of(PpoSection(micro_batch_tokens=100))
    resumed.restore(sizes.state())
    assert (resumed.actor.size, resumed.actor.tokens, resumed.critic.tokens) == (16, 50, 100)
    assert not any("tokens" in name for name in BatchSizes.of(PpoSection()).state())

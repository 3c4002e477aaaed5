"""Where the process's resident memory is held to the budget besides decoder layers: logits, steps of parked states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.config.schema import MemorySection, OptimizerSection
from fourfold.memory.budget import Budget, OverBudget
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

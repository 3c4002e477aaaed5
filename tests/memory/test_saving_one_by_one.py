"""A checkpoint of what lies below the device is written, and read, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.memory.tensors import LiveTensors
from fourfold.models.roles import Policy
from fourfold.models.storage import load_own_tensors, own_tensors
from fourfold.training.checkpoint import CheckpointStore, flatten_optimizer, restore_optimizer
from memory.test_optimizer_offload import optimizer, passes, trained_policy
from training.runs import weights_of


def saved(folder: Path, policy: Policy, adam: Any) -> CheckpointStore:
    everything = adam.state_dict()
    tensors, record = flatten_optimizer(everything["optimizer"])
    store = CheckpointStore(folder, keep_last=1)
    groups = {"role": own_tensors(policy, shares_head=False), "optimizer": tensors}
    store.save(1, groups, {"optimizer": record, "steps_done": everything["steps_done"]})
    return store


def stepped(folder: Path, residency: str) -> tuple[Any, Policy, Any, int]:
    """A base, its policy and the policy's optimizer after a step, and bytes of its largest tensor in float32."""
    base, policy = trained_policy(folder, "llama")
    adam = optimizer(policy, folder / "below", residency)
    passes(base, policy, adam, 0)
    adam.step()
    return base, policy, adam, 4 * max(p.numel() for p in policy.parameters() if p.requires_grad)


@pytest.mark.parametrize("residency", ["park", "offload"])
def test_saving_holds_one_tensor_of_what_is_away(tmp_path: Path, residency: str) -> None:
    """Counted by live bytes; a state that is kept beside it is not copied at all."""
    _, policy, adam, largest = stepped(tmp_path, residency)
    away = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    with LiveTensors() as live:
        before = live.bytes
        saved(tmp_path / "checkpoints", policy, adam)
        held = live.peak_bytes - before
    assert largest <= held < largest + 1024 < away / 2


@pytest.mark.parametrize("residency", ["park", "offload"])
def test_resuming_holds_one_tensor_of_what_is_away(tmp_path: Path, residency: str) -> None:
    """Role and states; a tensor of the file, and where it is a master's what the device gets of it."""
    base, policy, adam, largest = stepped(tmp_path, residency)
    expected = weights_of(policy)
    found = saved(tmp_path / "checkpoints", policy, adam).latest()
    assert found is not None
    passes(base, policy, adam, 1)
    adam.step()
    with LiveTensors() as live:
        before = live.bytes
        load_own_tensors(policy, found.tensors("role").unread(), shares_head=False)
        restored = restore_optimizer(found.tensors("optimizer").unread(), found.state["optimizer"])
        adam.load_state_dict({"optimizer": restored, "steps_done": found.state["steps_done"]})
        held = live.peak_bytes - before
    assert largest <= held < 1.5 * largest + 1024
    same = weights_of(policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in same.items())

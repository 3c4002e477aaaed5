"""A checkpoint of what lies below the device is written, and read, one tensor at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fourfold.memory.offload import Parked
from fourfold.memory.tensors import LiveTensors
from fourfold.models.roles import Policy
from fourfold.models.storage import load_own_tensors, own_tensors
from fourfold.training.checkpoint import CheckpointStore, flatten_optimizer, restore_optimizer
from memory.test_optimizer_offload import optimizer, passes, trained_policy
from memory.test_optimizers import PARK
from memory.test_optimizers import optimizer as optimizer_of


def saved(folder: Path, policy: Policy, adam: Any) -> CheckpointStore:
    everything = adam.state_dict()
    tensors, record = flatten_optimizer(everything["optimizer"])
    store = CheckpointStore(folder, keep_last=1)
    groups = {"role": own_tensors(policy, shares_head=False), "optimizer": tensors}
    store.save(1, groups, {"optimizer": record, "steps_done": everything["steps_done"]})
    return store


@pytest.mark.parametrize("residency", ["park", "offload"])
def test_saving_holds_one_tensor_of_what_is_away(tmp_path: Path, residency: str) -> None:
    """Counted by live bytes; a state that is kept beside it is not copied at all."""
    base, policy = trained_policy(tmp_path, "llama")
    adam = optimizer(policy, tmp_path / "below", residency)
    passes(base, policy, adam, 0)
    adam.step()
    largest = 4 * max(p.numel() for p in policy.parameters() if p.requires_grad)
    away = 8 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    with LiveTensors() as live:
        before = live.bytes
        saved(tmp_path / "checkpoints", policy, adam)
        held = live.peak_bytes - before
    assert largest <= held < largest + 1024 < away / 2


def resident_of(folder: Path) -> int:
    """Bytes of this process's memory that are pages of files in the folder."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_resuming_has_one_parameters_states_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight matrices of 4 MiB with two moments each, pages of the file stay while one parameter's are copied."""
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    adam = optimizer_of(net, memory=PARK, folder=tmp_path / "below")
    tensors, record = flatten_optimizer(adam.state_dict()["optimizer"])
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(1, {"optimizer": tensors}, {"optimizer": record})
    found = store.latest()
    assert found is not None
    overwrite, most = Parked.overwrite, []

    def watched(self: Parked, tensor: Tensor, numbers: Tensor) -> None:
        overwrite(self, tensor, numbers)
        most.append(resident_of(found.path))

    monkeypatch.setattr(Parked, "overwrite", watched)
    adam.load_state_dict({"optimizer": restore_optimizer(found.tensors("optimizer"), record), "steps_done": 0})
    around = 4 << 20  # pages that the system maps beside those that are asked for
    assert len(most) == 16 and 4 << 20 <= max(most) < (8 << 20) + around < 64 << 20
    assert resident_of(found.path) == 0


def test_a_role_is_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of an actor whose optimizer is offloaded."""
    base, policy = trained_policy(tmp_path, "llama")
    adam = optimizer(policy, tmp_path / "below", "offload")
    passes(base, policy, adam, 0)
    adam.step()
    found = saved(tmp_path / "checkpoints", policy, adam).latest()
    assert found is not None and policy.masters is not None
    write, most = type(policy.masters).write, []

    def watched(self: Any, tensor: Tensor, numbers: Tensor) -> None:
        write(self, tensor, numbers)
        most.append(Path("/proc/self/maps").read_text(encoding="utf-8").count("role.safetensors"))

    monkeypatch.setattr(type(policy.masters), "write", watched)
    load_own_tensors(policy, found.tensors("role"), shares_head=False)
    assert len(most) > 10 and max(most) == 1

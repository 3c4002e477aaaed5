"""Checkpointing: the same update bit for bit, less that is kept, and sampling with its cache left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.memory.activations import checkpoint_modules
from fourfold.models.split import cut
from tiny import FAMILIES, tiny_model
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    weights_of,
)

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "layers": {"checkpointing": "layers"},
    "every second layer": {"checkpointing": "layers", "checkpoint_every": 2},
    "attention": {"checkpointing": "attention"},
}
IDS = torch.arange(24).reshape(3, 8) % 100
MASK = torch.ones_like(IDS, dtype=torch.bool)


def kept_bytes(work: Callable[[], Any]) -> int:
    """Bytes that autograd holds between a forward pass and its backward pass."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(held.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["layers", "attentions"])
def test_gradients_are_bit_equal_and_less_is_kept(family: str, what: str) -> None:
    plain = cut(tiny_model(family), 0, 4, compute_dtype=torch.float32)
    forgetting = copy.deepcopy(plain)
    assert checkpoint_modules(getattr(forgetting, what)) == 4
    held = []
    for part in (plain, forgetting):
        outs: list[Tensor] = []
        held.append(kept_bytes(lambda part=part, outs=outs: outs.append(part(IDS, MASK))))
        outs[0].square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), forgetting.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
    assert held[1] < (0.6 if what == "layers" else 0.95) * held[0]


def test_a_copy_of_a_checkpointed_part_computes_with_its_own_weights() -> None:
    part = cut(tiny_model("llama"), 0, 4, compute_dtype=torch.float32)
    checkpoint_modules(part.layers)
    twin = copy.deepcopy(part)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2.0)
    assert not torch.equal(twin(IDS, MASK), part(IDS, MASK))
    twin(IDS, MASK).sum().backward()
    assert all(p.grad is None for p in part.parameters())
    assert all(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize("what", CHECKPOINTING)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_whole_step_is_bit_equal(tmp_path: Path, sharing: str, what: str) -> None:
    """Sampling, scoring and two epochs of learning; only the FLOPs of the backward passes differ."""
    outcomes = []
    for memory in ({}, CHECKPOINTING[what]):
        changes = merged(by_function("pays_by_hash", entropy_coef=0.01), SHARINGS[sharing])
        tree = settings(tmp_path, merged(changes, {"memory": memory} if memory else {}))
        trainer = make_trainer(make_config(tree))
        give_value_head(trainer.models)
        row = trainer.step()
        outcomes.append((row, weights_of(trainer.models.actor), weights_of(trainer.models.critic)))
    (plain, *ours), (checkpointed, *theirs) = outcomes
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    differing = {name for name in plain if "seconds" not in name and "bytes" not in name and "per_second" not in name}
    differing = {name for name in differing if plain[name] != checkpointed[name]}
    assert differing == {"actor_learn_flops", "critic_learn_flops"}
    assert all(checkpointed[name] > plain[name] for name in differing)

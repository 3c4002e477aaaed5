"""How often float32 masters are cast in an update: once a mini-batch, however many micro-batches it is cut into."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.runs import make_experience
from training.test_update import gradients, trainer_for


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_masters_are_cast_once_for_all_micro_batches_and_no_bit_changes(
    tmp_path: Path, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are computed again make their copies again: kept ones would take the room that is saved.

    By autocast, as where the processor multiplies bfloat16: elsewhere a layer's product makes the copy.
    """
    monkeypatch.setattr("fourfold.models.products.product_dtype", lambda device, dtype: dtype)
    changes = {"precision": {"compute": "bfloat16"}, "memory": {"checkpointing": checkpointing}}
    trainer = trainer_for(tmp_path, changes)
    given = trainer, *make_experience(trainer)
    weight = next(p for p in trainer.models.actor.branch.parameters() if p.ndim == 2 and p.requires_grad)
    casts = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal casts
            casts += func is torch.ops.aten._to_copy.default and args[0].data_ptr() == weight.data_ptr()
            return func(*args, **(kwargs or {}))

    def counted() -> tuple[list[Tensor], int]:
        nonlocal casts
        casts = 0
        with Counting():
            return gradients(*given, micro_batch_size=2), casts

    once, found = counted()
    monkeypatch.setattr("fourfold.training.update.casts_once", lambda role, *, several: contextlib.nullcontext())
    each, without = counted()
    assert all(torch.equal(a, b) for a, b in zip(once, each, strict=True))
    assert (found, without) == ((1, 4) if checkpointing == "none" else (8, 8))

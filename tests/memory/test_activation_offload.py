"""Offloaded activations: the same gradients bit for bit, less that is alive between forward and backward."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.memory import activation_offload
from fourfold.memory.activation_offload import _Moved, _Mover, offload_activations
from fourfold.memory.activations import checkpoint_modules
from fourfold.memory.tensors import LiveTensors
from fourfold.models.split import Part, cut
from tiny import tiny_model
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

IDS = torch.arange(48).reshape(4, 12) % 100
MASK = torch.ones_like(IDS, dtype=torch.bool)
MASK[0, :3] = False


def gradients(part: Part) -> list[Tensor]:
    part.zero_grad(set_to_none=True)
    part(IDS, MASK).square().sum().backward()
    found = [p.grad for p in part.parameters()]
    assert all(g is not None for g in found)
    return [g.clone() for g in found if g is not None]


@pytest.mark.parametrize("checkpointing", ["none", "layers", "attention"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "gpt_neox"])
def test_gradients_are_bit_equal_and_less_is_alive(family: str, checkpointing: str) -> None:
    plain = cut(tiny_model(family, hidden=64), 0, 4, compute_dtype=torch.float32)
    if checkpointing != "none":
        checkpoint_modules(plain.layers if checkpointing == "layers" else plain.attentions)
    moving = copy.deepcopy(plain)
    offload_activations(moving)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(moving), strict=True))
    held = []
    gc.collect()  # what other tests have left must not be freed within
    for part in (plain, moving):
        with LiveTensors() as live:
            before = live.bytes
            out = part(IDS, MASK)
            held.append(live.bytes - before)
            del out
    assert held[1] < (0.35 if checkpointing != "layers" else 0.8) * held[0], held


def test_nothing_is_moved_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    part = cut(tiny_model("llama"), 0, 4, compute_dtype=torch.float32)
    offload_activations(part)
    monkeypatch.setattr(_Mover, "pack", lambda self, tensor: pytest.fail("moved"))
    with torch.no_grad():
        part(IDS, MASK)


def test_a_storage_is_moved_once_and_comes_back_with_its_strides() -> None:
    mover = _Mover(nn.Linear(4, 4))
    whole = torch.randn(64, 96)
    views = [whole, whole.t(), whole[:, 32:64], whole[1:].transpose(0, 1)]
    held = [mover.pack(view) for view in views]
    assert all(isinstance(each, _Moved) for each in held) and len(mover._known) == 1
    for view, each in zip(views, held, strict=True):
        back = mover.unpack(each)
        assert torch.equal(back, view) and back.stride() == view.stride() and back.dtype == view.dtype
        assert back.storage_offset() == view.storage_offset()


def test_a_tensor_written_in_place_afterwards_comes_back_as_it_was_saved() -> None:
    mover = _Mover(nn.Linear(4, 4))
    tensor = torch.randn(64, 96)
    first, was = mover.pack(tensor), tensor.clone()
    tensor.add_(1.0)
    second = mover.pack(tensor)
    assert torch.equal(mover.unpack(first), was) and torch.equal(mover.unpack(second), was + 1.0)


def test_small_tensors_and_weights_stay() -> None:
    layer = nn.Linear(64, 64)
    mover = _Mover(layer)
    for tensor in (torch.zeros(8), layer.weight, layer.weight.t()):
        assert mover.pack(tensor) is tensor


def test_the_file_is_gone_with_the_graph() -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not list a process's open files")
    part = cut(tiny_model("llama"), 0, 4, compute_dtype=torch.float32)
    offload_activations(part)
    before = len(os.listdir("/proc/self/fd"))
    out = part(IDS, MASK)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    out.sum().backward()
    del out
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("sharing", ["trunk", "none"])
def test_a_step_with_activation_offload_is_bit_equal(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    real = activation_offload._to_file
    monkeypatch.setattr(activation_offload, "_to_file", lambda content, file: (moved.append(1), real(content, file))[1])
    outcomes = []
    for memory in ({}, {"activation_offload": True}):
        changes = merged(by_function("pays_by_hash", entropy_coef=0.01), SHARINGS[sharing])
        trainer = make_trainer(make_config(settings(tmp_path, merged(changes, {"memory": memory} if memory else {}))))
        give_value_head(trainer.models)
        assert not moved
        trainer.step()
        outcomes.append([weights_of(trainer.models.actor), weights_of(trainer.models.critic)])
    assert len(moved) > 20
    for ours, theirs in zip(*outcomes, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_they_go_to_pinned_memory_and_come_back() -> None:
    part: Any = cut(tiny_model("llama"), 0, 4, compute_dtype=torch.float32).cuda()
    moving = copy.deepcopy(part)
    offload_activations(moving)
    for each in (part, moving):
        each(IDS.cuda(), MASK.cuda()).square().sum().backward()
    for a, b in zip(part.parameters(), moving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)

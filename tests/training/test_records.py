"""Optimizers and random generators come back bit for bit, through files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from fourfold.tensor_files import read
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.records import flatten_optimizer, restore_optimizer, restore_rng, rng_state


def adamw(dtype: torch.dtype, *, fused: bool) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 3), (5,))]
    groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]
    return parameters, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), amsgrad=True, fused=fused)


def train(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_resumes_bit_for_bit(tmp_path: Path, dtype: torch.dtype, fused: bool) -> None:
    """FAULTS K7: types and bytes of each state are equal, and so are the first and the second step after it."""
    parameters, optimizer = adamw(dtype, fused=fused)
    train(parameters, optimizer, range(3))
    tensors, record = flatten_optimizer(optimizer.state_dict())
    weights = {str(index): parameter for index, parameter in enumerate(parameters)}
    store = CheckpointStore(tmp_path, 1)
    store.save(3, {"optimizer": tensors, "actor": weights}, {"optimizer": record})
    checkpoint = store.latest()
    assert checkpoint is not None

    resumed_parameters, resumed = adamw(dtype, fused=fused)
    with torch.no_grad():
        for index, parameter in enumerate(resumed_parameters):
            parameter.copy_(checkpoint.tensors("actor")[str(index)])
    resumed.load_state_dict(restore_optimizer(checkpoint.tensors("optimizer"), checkpoint.state["optimizer"]))
    for more in (range(3, 3), range(3, 4), range(4, 5)):
        train(parameters, optimizer, more)
        train(resumed_parameters, resumed, more)
        expected, found = optimizer.state_dict(), resumed.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, entry in expected["state"].items():
            assert {n: t.dtype for n, t in found["state"][key].items()} == {n: t.dtype for n, t in entry.items()}
            assert all(torch.equal(found["state"][key][name], tensor) for name, tensor in entry.items())
        assert all(torch.equal(a, b) for a, b in zip(parameters, resumed_parameters, strict=True))
    before = checkpoint.tensors("optimizer")["state.0.exp_avg"]
    assert not torch.equal(before, resumed.state_dict()["state"][0]["exp_avg"]), "training moved the moments"
    assert store.latest() is not None and store.warnings == [], "and did not write into the checkpoint's file"


def test_a_missing_optimizer_tensor_is_named() -> None:
    parameters, optimizer = adamw(torch.float32, fused=False)
    train(parameters, optimizer, range(1))
    found, record = flatten_optimizer(optimizer.state_dict())
    tensors = {name: read(tensor) for name, tensor in found.items() if name != "state.1.exp_avg_sq"}
    with pytest.raises(ValueError, match=r"no tensor 'state\.1\.exp_avg_sq'"):
        restore_optimizer(tensors, record)


def draw() -> list[float]:
    gauss = [random.gauss(0, 1), random.random(), float(numpy.random.standard_normal()), float(numpy.random.random())]
    return [*gauss, *torch.randn(3).tolist(), *torch.rand(2).tolist()]


def test_random_states_go_on_where_they_stood(tmp_path: Path) -> None:
    """Also in the middle of a pair of Gaussian numbers, whose second half Python and numpy keep back."""
    draw()
    random.gauss(0, 1)
    numpy.random.standard_normal()
    tensors, record = rng_state()
    store = CheckpointStore(tmp_path, 1)
    store.save(1, {"random": tensors}, {"random": record})
    expected = [draw(), draw()]
    draw()
    checkpoint = store.latest()
    assert checkpoint is not None
    restore_rng(checkpoint.tensors("random"), checkpoint.state["random"])
    assert [draw(), draw()] == expected

"""The optimizer of a role: clipping, schedule, decay, and what stops it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.config.schema import OptimizerSection
from fourfold.errors import RunFailed


class Layer(nn.Module):
    """A matrix, a vector and a frozen matrix, all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def optimizer(layer: nn.Module, *, total_steps: int = 10, **settings: Any) -> LocalOptimizer:
    return LocalOptimizer("actor", layer, OptimizerSection(**settings), total_steps=total_steps)


def loss_of(layer: nn.Module, slope: float) -> torch.Tensor:
    """Its gradient is `slope` in every trainable number."""
    return slope * sum((p.sum() for p in layer.parameters() if p.requires_grad), torch.zeros(()))


def test_the_norm_is_clipped_and_reported_as_it_was() -> None:
    """Eight gradients of 2 have the norm 4 sqrt 2; without momentum Adam's second moment shows what was used."""
    layer = Layer()
    adam = optimizer(layer, max_grad_norm=0.5, betas=(0.0, 0.5))
    adam.backward(loss_of(layer, 2.0))
    assert adam.step() == pytest.approx(2.0 * math.sqrt(8))
    moments = [entry["exp_avg"] for entry in adam.state_dict()["optimizer"]["state"].values()]
    assert torch.cat([m.flatten() for m in moments]).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert all(p.grad is None for p in layer.parameters())
    assert torch.equal(layer.frozen, torch.ones(2, 2))


def test_moments_exist_before_the_first_step_and_are_those_that_torch_makes() -> None:
    """Memory is known from the start, and the first step is the same bit for bit."""
    ours, torchs = Layer(), Layer()
    adam = optimizer(ours, weight_decay=0.1)
    moments = adam.state_dict()["optimizer"]["state"]
    assert [tuple(entry["exp_avg_sq"].shape) for entry in moments.values()] == [(2, 3), (2,)]
    groups = [{"params": [torchs.weight], "weight_decay": 0.1}, {"params": [torchs.bias], "weight_decay": 0.0}]
    settings = OptimizerSection()
    plain = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    for _ in range(2):
        adam.backward(loss_of(ours, 0.01))
        loss_of(torchs, 0.01).backward()
        adam.step()
        plain.step()
        plain.zero_grad()
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_losses_add_up_until_a_step_and_can_be_discarded() -> None:
    layer = Layer()
    adam = optimizer(layer, max_grad_norm=1e6)
    adam.backward(loss_of(layer, 5.0))
    adam.discard()
    for slope in (1.0, 2.0):
        adam.backward(loss_of(layer, slope))
    assert adam.step() == pytest.approx(3.0 * math.sqrt(8))


def test_matrices_decay_and_vectors_do_not() -> None:
    """FAULTS G10: decoupled, at the learning rate of the step: 1 - 0.1 * 0.5."""
    layer = Layer()
    adam = optimizer(layer, learning_rate=0.1, weight_decay=0.5)
    adam.backward(loss_of(layer, 0.0))
    adam.step()
    assert torch.allclose(layer.weight, torch.full((2, 3), 0.95)) and torch.equal(layer.bias, torch.ones(2))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0]),
    ],
)
def test_schedule_after_two_steps_of_warm_up(schedule: str, expected: list[float]) -> None:
    """Six steps in all; the rate that is shown is the rate that is used, and a state brings it back."""
    layer = Layer()
    settings = {"learning_rate": 2.0, "schedule": schedule, "warmup_steps": 2}
    adam = optimizer(layer, total_steps=6, **settings)
    rates = [adam.learning_rate]
    for _ in range(6):
        adam.backward(loss_of(layer, 1.0))
        adam.step()
        assert adam.state_dict()["optimizer"]["param_groups"][0]["lr"] == rates[-1]
        rates.append(adam.learning_rate)
        resumed = optimizer(Layer(), total_steps=6, **settings)
        resumed.load_state_dict(adam.state_dict())
        assert resumed.learning_rate == adam.learning_rate and resumed.steps_done == adam.steps_done
    assert rates == pytest.approx([2.0 * rate for rate in expected], abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stops_and_leaves_everything(bad: float) -> None:
    """FAULTS B10: the role is named, no step is taken, the gradients are gone."""
    layer = Layer()
    adam = optimizer(layer)
    adam.backward(loss_of(layer, 1.0))
    with pytest.raises(RunFailed, match="learn: the actor's loss is"):
        adam.backward(loss_of(layer, bad))
    assert layer.weight.grad is None
    adam.backward((layer.weight - 1.0).abs().sum().sqrt())  # 0 with an infinite slope
    with pytest.raises(RunFailed, match="learn: the actor's gradient norm is"):
        adam.step()
    assert layer.weight.grad is None and adam.steps_done == 0
    assert torch.equal(layer.weight, torch.ones(2, 3)) and torch.equal(layer.bias, torch.ones(2))

"""The loss scale of float16 by hand: when it halves and doubles, what it takes off, what it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.backends.local import LocalOptimizer
from fourfold.backends.scaling import LossScale, step_unless_overflowed
from fourfold.config.schema import OptimizerSection, PrecisionSection
from fourfold.errors import RunFailed

CPU = torch.device("cpu")


def role(name: str, scale: LossScale | None, **settings: Any) -> tuple[nn.Parameter, LocalOptimizer]:
    """A role of four weights, all 1."""
    module = nn.Linear(4, 1, bias=False)
    [weight] = module.parameters()
    nn.init.ones_(weight)
    chosen: dict[str, Any] = {"learning_rate": 0.1, "max_grad_norm": 0.0}
    section = OptimizerSection(**chosen | settings)
    return weight, LocalOptimizer(name, module, section, total_steps=10, loss_scale=scale)


def gradient(weight: nn.Parameter, *slopes: float) -> torch.Tensor:
    """A loss whose gradient is these numbers."""
    return (weight * torch.tensor([slopes])).sum()


def test_only_float16_scales() -> None:
    for compute in ("float32", "bfloat16"):
        assert LossScale.of(PrecisionSection(compute=compute), CPU) is None
    scale = LossScale.of(PrecisionSection(compute="float16", loss_scale=512.0), CPU)
    assert scale is not None and scale.scale == 512.0


def test_the_scale_halves_on_overflow_and_doubles_after_the_interval() -> None:
    """8; overflow: 4; two steps without: 8; overflow resets the count: 4, one step, overflow: 2."""
    scale = LossScale(8.0, CPU, growth_interval=2)
    weight, adam = role("actor", scale)
    seen = []
    for slope in (math.inf, 1.0, 1.0, math.inf, 1.0, math.inf, 1.0, 1.0):
        adam.backward(gradient(weight, 1.0, 1.0, 1.0, 1.0))
        assert weight.grad is not None
        assert weight.grad[0, 0] == scale.scale
        weight.grad[0, 3] *= slope
        step_unless_overflowed(adam)
        assert weight.grad is None
        seen.append((scale.scale, adam.steps_done))
    assert seen == [(4, 0), (4, 1), (8, 2), (4, 2), (4, 3), (2, 3), (2, 4), (4, 5)]
    assert scale.take()["steps_skipped_overflow"] == 3
    assert scale.take() == {"loss_scale": 4.0, "steps_skipped_overflow": 0}


@pytest.mark.parametrize("broken", [0, 1])
def test_both_skip_when_one_overflows(broken: int) -> None:
    scale = LossScale(1024.0, CPU)
    roles = [role(name, scale) for name in ("critic", "actor")]
    for number, (weight, adam) in enumerate(roles):
        adam.backward(gradient(weight, 1.0, 2.0, 3.0, 1e38 if number == broken else 4.0))
    assert not scale.agree([adam for _, adam in roles])
    assert scale.scale == 512.0
    for weight, adam in roles:
        assert weight.grad is None and adam.steps_done == 0 and torch.equal(weight, torch.ones(1, 4))
    for weight, adam in roles:
        adam.backward(gradient(weight, 1.0, 2.0, 3.0, 4.0))
    assert scale.agree([adam for _, adam in roles])
    assert [adam.step() for _, adam in roles] == pytest.approx([math.sqrt(30)] * 2)
    assert all(not torch.equal(weight, torch.ones(1, 4)) for weight, _ in roles)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), st.integers(0, 20))
def test_scaled_then_unscaled_is_the_gradient(slopes: list[float], power: int) -> None:
    """A power of two changes the exponent only: the step is the unscaled one to the bit, but for what is subnormal."""
    slopes = [slope if abs(slope) > 1e-30 else 0.0 for slope in slopes]
    scale = LossScale(2.0**power, CPU)
    (scaled, with_scale), (plain, without) = (
        role("actor", scale, max_grad_norm=1.0),
        role("actor", None, max_grad_norm=1.0),
    )
    for weight, adam in ((scaled, with_scale), (plain, without)):
        adam.backward(gradient(weight, *slopes))
    assert scale.agree([with_scale])
    assert scaled.grad is not None and plain.grad is not None and torch.equal(scaled.grad, plain.grad)
    assert with_scale.step() == without.step() and torch.equal(scaled, plain)


def test_another_scale_than_a_power_of_two_changes_only_the_rounding() -> None:
    scale = LossScale(1000.0, CPU)
    weight, adam = role("actor", scale)
    adam.backward(gradient(weight, 0.1, 1 / 3, 7.0, 1e-3))
    assert scale.agree([adam]) and weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.tensor([[0.1, 1 / 3, 7.0, 1e-3]]), rtol=3e-7, atol=0.0)


def test_underflow_is_the_share_of_small_entries_in_rows_that_have_any() -> None:
    """Two rows of four are reached: of their 6 entries 3 are below 2^-14; vectors are not half-precision products."""
    scale = LossScale(1.0, CPU)
    module = nn.Linear(3, 4)
    adam = LocalOptimizer("actor", module, OptimizerSection(), total_steps=10, loss_scale=scale)
    module.weight.grad = torch.tensor(
        [[0.0, 0.0, 0.0], [2.0**-14, -(2.0**-15), 0.0], [0.0, 0.0, 0.0], [1.0, -3.0, 2.0**-24]]
    )
    module.bias.grad = torch.tensor([1e-7, 0.0, 1e-7, 0.0])
    assert scale.agree([adam])
    assert scale.metrics()["gradient_underflow_fraction"] == 3 / 6
    scale.take()
    module.weight.grad, module.bias.grad = torch.zeros(4, 3), None
    scale.agree([adam])
    assert "gradient_underflow_fraction" not in scale.metrics(), "there was nothing to lose"


def test_underflow_is_counted_before_the_scale_is_taken_off() -> None:
    """2^-16 is lost at scale 1, and not at 4."""
    for factor, share in ((1.0, 1.0), (4.0, 0.0)):
        scale = LossScale(factor, CPU)
        weight, adam = role("actor", scale)
        adam.backward(gradient(weight, *[2.0**-16] * 4))
        scale.agree([adam])
        assert scale.metrics()["gradient_underflow_fraction"] == share


def test_a_loss_that_is_not_finite_is_an_overflow_until_the_scale_is_smallest() -> None:
    scale = LossScale(4.0, CPU)
    weight, adam = role("actor", scale)
    for left in (2.0, 1.0):
        adam.backward(gradient(weight, 1.0, 1.0, 1.0, 1.0))
        adam.backward(torch.clamp(gradient(weight, math.inf, 1.0, 1.0, 1.0), min=math.inf))
        step_unless_overflowed(adam)
        assert scale.scale == left and adam.steps_done == 0
    with pytest.raises(RunFailed, match="learn: the actor's loss is nan; the last good checkpoint is kept"):
        adam.backward(gradient(weight, math.nan, 1.0, 1.0, 1.0))
    assert torch.equal(weight, torch.ones(1, 4))


def test_a_gradient_that_is_not_finite_at_the_smallest_scale_stops_the_run() -> None:
    scale = LossScale(1.0, CPU)
    weight, adam = role("critic", scale)
    adam.backward(gradient(weight, 1.0, 1.0, 1.0, 1.0))
    assert weight.grad is not None
    weight.grad[0, 0] = math.nan
    with pytest.raises(RunFailed, match="learn: the critic's gradient norm is nan; no step was taken"):
        step_unless_overflowed(adam)


def test_state_comes_back_as_it_went() -> None:
    """The count of good steps too: after two more of three the scale doubles."""
    first = LossScale(64.0, CPU, growth_interval=3)
    weight, adam = role("actor", first)
    adam.backward(gradient(weight, 1.0, 1.0, 1.0, 1e-9))
    step_unless_overflowed(adam)
    second = LossScale(8.0, CPU, growth_interval=3)
    weight, adam = role("actor", second)
    second.load_state_dict(first.state_dict())
    assert second.metrics() == first.metrics() and second.scale == 64.0
    for expected in (64.0, 128.0):
        adam.backward(gradient(weight, 1.0, 1.0, 1.0, 1.0))
        step_unless_overflowed(adam)
        assert second.scale == expected

"""Half-precision products by way of float32: the numbers, the gradients and the types of ordinary ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.algorithms import products
from fourfold.algorithms.products import linear, linear_in_float32, matmul, product_dtype

HALF = (torch.bfloat16, torch.float16)


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    inputs=st.integers(1, 17),
    outputs=st.integers(1, 9),
    bias=st.booleans(),
    dtype=st.sampled_from(HALF),
    master=st.booleans(),
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(
    rows: list[int], inputs: int, outputs: int, bias: bool, dtype: torch.dtype, master: bool
) -> None:
    """The oracle is the product of the same rounded operands in float64; one rounding to half precision is allowed."""
    held = torch.float32 if master else dtype
    x = numbers(*rows, inputs, dtype=dtype, seed=0).requires_grad_()
    weight = numbers(outputs, inputs, dtype=held, seed=1).requires_grad_()
    add = numbers(outputs, dtype=held, seed=2).requires_grad_() if bias else None
    given_back = numbers(*rows, outputs, dtype=dtype, seed=3)
    found = linear_in_float32(x, weight, add)
    found.backward(given_back)

    exact = [None if t is None else t.detach().to(dtype).double().requires_grad_() for t in (x, weight, add)]
    expected = nn.functional.linear(*exact)  # type: ignore[arg-type]
    expected.backward(given_back.double())
    assert found.dtype == dtype and found.shape == expected.shape
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * inputs**0.5)
    for tensor, truth in zip((x, weight, add), exact, strict=True):
        if tensor is None or truth is None:
            continue
        assert tensor.grad is not None and truth.grad is not None and tensor.grad.dtype == tensor.dtype
        scale = float(truth.grad.abs().max())
        torch.testing.assert_close(tensor.grad.double(), truth.grad, rtol=bound, atol=bound * max(scale, 1e-3))


def test_a_masters_gradient_is_that_of_its_rounded_copy() -> None:
    """So a step is the same whether masters are there or lie below the device (memory/optimizer_offload.py)."""
    x, master = numbers(64, 8, dtype=torch.bfloat16, seed=0), numbers(4, 8, dtype=torch.float32, seed=1)
    copy = master.bfloat16().requires_grad_()
    master.requires_grad_()
    for weight in (master, copy):
        linear_in_float32(x, weight, None).square().sum().backward()
    assert master.grad is not None and copy.grad is not None and master.grad.dtype == torch.float32
    assert torch.equal(master.grad.bfloat16(), copy.grad) and torch.equal(master.grad, copy.grad.float())


def test_autocast_around_it_changes_nothing() -> None:
    x, weight = numbers(3, 8, dtype=torch.bfloat16, seed=0), numbers(4, 8, dtype=torch.float32, seed=1)
    alone = linear_in_float32(x, weight, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_in_float32(x, weight, None), alone)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_only_what_the_processor_does_not_multiply_is_widened(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert product_dtype("cuda", dtype) == dtype
    assert product_dtype("cpu", dtype) in ({dtype, torch.float32} if dtype in HALF else {dtype})
    x, weight = numbers(3, 8, dtype=dtype, seed=0), numbers(4, 8, dtype=dtype, seed=1)
    wide = (x.double() @ weight.double().t()).to(dtype)
    for there in (True, False):
        monkeypatch.setattr(products, "product_dtype", lambda _, own, there=there: own if there else torch.float32)
        for found in (linear(x, weight, None), matmul(x, weight.t().contiguous())):
            assert found.dtype == dtype
            torch.testing.assert_close(found, wide, rtol=1e-2, atol=1e-2)

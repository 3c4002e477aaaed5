"""Products for a few rows: the same numbers as the ordinary ones, and only where they are meant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.models.products import FEW_ROWS, FewRowsLinear, linear_few_rows, prepare_for_decoding


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    inputs=st.integers(1, 17),
    outputs=st.integers(1, 33),
    bias=st.booleans(),
)
def test_equals_the_ordinary_product(rows: list[int], inputs: int, outputs: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    add = torch.randn(outputs, generator=generator) if bias else None
    with torch.no_grad():
        found = linear_few_rows(x, weight, add)
    expected = nn.functional.linear(x.double(), weight.double(), None if add is None else add.double())
    assert found.is_contiguous() and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_training_and_long_inputs_take_the_ordinary_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FewRowsLinear(4, 3)
    x = torch.randn(rows, 4, requires_grad=True)
    products: list[int] = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(len(b)) or real(a, b))
    layer(x).sum().backward()
    assert products == [] and x.grad is not None
    with torch.no_grad():
        layer(x)
    assert len(products) == (rows <= FEW_ROWS)


def test_preparing_keeps_tensors_and_names() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2, bias=False)), nn.Linear(2, 2).bfloat16())
    before = dict(module.named_parameters())
    prepare_for_decoding(module)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert [type(layer) for layer in module.modules() if isinstance(layer, nn.Linear)] == [
        FewRowsLinear,
        FewRowsLinear,
        nn.Linear,
    ]

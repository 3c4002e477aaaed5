"""Products for a few rows: the same numbers as the ordinary ones, and only where they are meant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.algorithms import products as algorithms_products
from fourfold.models import products as few_rows
from fourfold.models.products import FEW_ROWS, FewRowsLinear, hold_narrowly, linear_few_rows, prepare_for_decoding
from fourfold.models.split import cut
from tiny import FAMILIES, tiny_model


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    inputs=st.integers(1, 17),
    outputs=st.integers(1, 33),
    bias=st.booleans(),
    onednn=st.booleans(),
)
def test_equals_the_ordinary_product(rows: list[int], inputs: int, outputs: int, bias: bool, onednn: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    add = torch.randn(outputs, generator=generator) if bias else None
    torch.backends.mkldnn.set_flags(_enabled=onednn)  # `flags` would warn of Intel's GPUs
    try:
        with torch.no_grad():
            found = linear_few_rows(x, weight, add)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)
    expected = nn.functional.linear(x.double(), weight.double(), None if add is None else add.double())
    assert found.is_contiguous() and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_training_and_long_inputs_take_the_ordinary_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FewRowsLinear(4, 3)
    x = torch.randn(rows, 4, requires_grad=True)
    products: list[int] = []
    real = few_rows._few_rows
    monkeypatch.setattr(few_rows, "_few_rows", lambda x, *given: products.append(len(x)) or real(x, *given))
    layer(x).sum().backward()
    assert products == [] and x.grad is not None
    with torch.no_grad():
        layer(x)
    assert len(products) == (rows <= FEW_ROWS)


def test_preparing_keeps_tensors_and_names() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2, bias=False)), nn.Linear(2, 2).double())
    before = dict(module.named_parameters())
    prepare_for_decoding(module)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert [type(layer) for layer in module.modules() if isinstance(layer, nn.Linear)] == [
        FewRowsLinear,
        FewRowsLinear,
        nn.Linear,
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_narrowly_held_weights_give_the_same_bits(family: str) -> None:
    """Every linear layer and look-up whose numbers are bfloat16's; GPT-2's layers are no `nn.Linear` and stay."""
    model = tiny_model(family)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    branch = cut(model, 0, 4, compute_dtype=torch.float32).requires_grad_(False)
    prepare_for_decoding(branch)

    def outputs() -> list[torch.Tensor]:
        """Few rows and many, each also without gradients, where other products run (FEW_ROWS)."""
        found = []
        for shape in ((1, 2), (1, 7), (3, 8), (9, 8)):
            ids = torch.arange(shape[0] * shape[1]).reshape(shape)
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    found.append(branch(ids, torch.ones_like(ids, dtype=torch.bool)))
        return found

    wide, held = outputs(), size(branch)
    hold_narrowly(branch)
    assert all(torch.equal(a, b) for a, b in zip(outputs(), wide, strict=True))
    assert size(branch) < (0.95 if family == "gpt2" else 0.52) * held


def test_only_frozen_weights_that_lose_nothing_are_held_narrowly() -> None:
    """1 + 2^-9 lies between two bfloat16 numbers; trained weights move there."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(2, 2)])
    prepare_for_decoding(layers)
    for layer in layers:
        nn.init.ones_(layer.get_parameter("weight"))
    layers.requires_grad_(False)
    layers[1].get_parameter("weight")[0, 0] += 2.0**-9
    layers[2].requires_grad_(True)
    hold_narrowly(layers)
    dtypes = [layer.get_parameter("weight").dtype for layer in layers]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert layers[0].get_parameter("bias").dtype == torch.float32


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("master", [True, False])
def test_half_precision_layers_give_the_same_with_and_without_instructions_for_it(
    master: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained through autocast from float32 masters, and frozen in bfloat16: all within its rounding."""
    model = tiny_model("llama")
    branch = cut(model, 0, 4, compute_dtype=torch.bfloat16)
    if not master:
        branch.bfloat16().requires_grad_(False)
    found = {}
    ids, mask = torch.arange(24).reshape(3, 8), torch.ones(3, 8, dtype=torch.bool)
    for there in (True, False):
        for module in (few_rows, algorithms_products):
            monkeypatch.setattr(module, "product_dtype", lambda _, own, there=there: own if there else torch.float32)
        prepare_for_decoding(branch)
        branch.zero_grad()
        out = branch(ids, mask)
        found[there] = [out.detach()]
        if master:
            out.float().square().sum().backward()
            found[there] += [p.grad.clone() for p in branch.parameters() if p.grad is not None]
    assert (len(found[True]) > 10) == master
    for ordinary, widened in zip(found[True], found[False], strict=True):
        assert ordinary.dtype == widened.dtype
        assert float((ordinary - widened).norm()) <= 0.05 * float(ordinary.norm())


@given(st.integers(1, FEW_ROWS), st.booleans(), st.booleans(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_few_rows_of_half_precision_are_widened_as_many_are(
    rows: int, bias: bool, autocast: bool, dtype: torch.dtype
) -> None:
    """Float32 sums of the rounded numbers, rounded once; a master is rounded first."""
    generator = torch.Generator().manual_seed(rows)
    given = torch.float32 if autocast else dtype
    x, weight = (torch.randn(n, 24, generator=generator).to(given) for n in (rows, 40))
    add = torch.randn(40, generator=generator).to(given) if bias else None
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(few_rows, "product_dtype", lambda *_: torch.float32)
        with torch.autocast("cpu", dtype, enabled=autocast):
            found = linear_few_rows(x, weight, add)
    exact = x.to(dtype).double() @ weight.to(dtype).double().T + (0 if add is None else add.to(dtype).double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)

"""Quantised layers against the explicit product of what their codes stand for; bytes by arithmetic; gradients after a
rollout, where bitsandbytes' own module goes wrong."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.memory.offload import Parked
from fourfold.memory.quantization import (
    KINDS,
    QuantizedLinear,
    dequantize,
    exact_products,
    kind_of,
    library,
    quantize,
    quiet_imports,
)
from fourfold.memory.stores import DiskStore
from fourfold.planner.quantization import QUANTIZED, held_bytes, matrix_bytes

# Rounding of a weight: half a step of 1/127 of its row's largest; half the widest gap of NF4's numbers (0.3) of its
# block's largest, and a little for the scales' own rounding.
LARGEST_ERROR = {"int8": 0.5 / 127, "int8_dynamic": 0.5 / 127, "nf4": 0.17}


def layer(kind: str, outputs: int = 96, inputs: int = 64, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """A quantised layer and the weight that it was made of."""
    generator = torch.Generator().manual_seed(seed)
    plain = nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype))
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    weight = plain[0].get_parameter("weight").detach().clone()
    quantize(plain.requires_grad_(False), kind)
    return plain[0], weight


def numbers(made: Any) -> Tensor:
    """What the codes stand for, by hand."""
    if made.kind != "nf4":
        return made.codes.float() * made.scales
    functional = library("nf4", "functional")
    scales = (
        functional.create_dynamic_map()[made.scales.long()]
        * made.scales_of_scales.repeat_interleave(256)[: len(made.scales)]
    )
    packed = made.codes.flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    found = functional.get_4bit_type("nf4", device="cpu")[codes][: made.out_features * made.in_features]
    blocks = (scales + made.offset).repeat_interleave(64)[: len(found)]
    return (found * blocks).reshape(made.out_features, made.in_features)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", [(96, 64), (33, 10), (7, 160), (5, 32), (2, 130)])
def test_codes_stand_for_nearly_the_weight_in_the_bytes_of_the_arithmetic(kind: str, shape: tuple[int, int]) -> None:
    made, weight = layer(kind, *shape)
    torch.testing.assert_close(made.dequantized(torch.float32), numbers(made), rtol=1e-6, atol=1e-6)
    largest = weight.abs().amax(dim=1, keepdim=True) if kind != "nf4" else weight.abs().max()
    assert bool(((made.weight - weight).abs() <= LARGEST_ERROR[kind] * largest * 1.02 + 1e-6).all())
    held = sum(p.nbytes for name, p in made.named_parameters() if name != "bias")
    assert held == matrix_bytes(kind, *shape)
    assert not any(p.requires_grad for p in made.parameters())


def test_bytes_of_a_large_matrix() -> None:
    """4,096 x 4,096: 1 byte and a float32 a row; half a byte, a byte for 64 and a float32 for 256 * 64."""
    assert matrix_bytes("int8", 4096, 4096) == 4096**2 + 4 * 4096
    assert matrix_bytes("nf4", 4096, 4096) == 4096**2 // 2 + 4096**2 // 64 + 4 * 4096**2 // 64 // 256 + 4
    assert held_bytes("auto", 1000, 64, 2) == 2000
    assert held_bytes("nf4", 4096**2, 4096, 2) == pytest.approx(0.516 * 4096**2, rel=1e-3)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@hypothesis_settings(max_examples=12, deadline=None)
@given(
    outputs=st.integers(2, 40),
    inputs=st.integers(2, 70),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
    bias=st.booleans(),
)
def test_the_product_is_the_explicit_one(
    kind: str, outputs: int, inputs: int, rows: int, seed: int, bias: bool
) -> None:
    made, _ = layer(kind, outputs, inputs, seed)
    if not bias:
        made.bias = None
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    w = numbers(made)
    out = made(x)
    torch.testing.assert_close(out, x @ w.T + (made.bias if made.bias is not None else 0.0), rtol=1e-4, atol=1e-4)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
    torch.testing.assert_close(torch.autograd.grad(out, x, up)[0], up @ w, rtol=1e-4, atol=1e-4)


def test_dynamic_activations_are_rounded_row_by_row_and_gradients_pass_straight_through() -> None:
    made, _ = layer("int8_dynamic")
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    steps = x.detach().abs().amax(dim=1, keepdim=True) / 127.5
    rounded = (x.detach() / steps).round().clamp(-128, 127) * steps
    out, w = made(x), numbers(made)
    gaps = [float((out - inputs @ w.T - made.bias).detach().abs().mean()) for inputs in (rounded, x)]
    assert gaps[0] < gaps[1] / 5 and gaps[1] < 0.2, "but for ties, the product is that of the rounded activations"
    torch.testing.assert_close(made(x[2:3]), out[2:3], rtol=1e-6, atol=1e-6)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(torch.autograd.grad(out, x, up)[0], up @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_gradients_are_right_after_a_rollout(kind: str) -> None:
    """A pass in eval mode without gradients comes first, as in sampling."""
    made, _ = layer(kind, dtype=torch.bfloat16)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        made.eval()(x)
    x.requires_grad_(True)
    [gradient] = torch.autograd.grad(made.train()(x).float().sum(), x)
    expected = numbers(made).sum(dim=0).expand(7, -1)
    assert torch.nn.functional.cosine_similarity(gradient.float().flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("kind", QUANTIZED)
def test_autocast_gives_its_type_and_no_widened_copy_waits_for_the_backward_pass(kind: str) -> None:
    made, _ = layer(kind)
    saved: list[int] = []
    x = torch.randn(7, 64, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        out = made(x)
    assert out.dtype == torch.bfloat16 and sum(saved) < made.in_features * made.out_features
    assert torch.autograd.grad(out.float().sum(), x)[0].dtype == torch.float32


@pytest.mark.parametrize("kind", QUANTIZED)
def test_copies_parking_and_the_way_back(kind: str, tmp_path: Any) -> None:
    made, _ = layer(kind)
    x = torch.randn(3, 64)
    expected = made(x)
    twin = copy.deepcopy(made)
    assert torch.equal(twin(x), expected) and twin.codes is not made.codes
    parameters = list(made.parameters())
    parked = Parked(parameters, DiskStore(100_000, tmp_path))
    assert sum(p.untyped_storage().nbytes() for p in parameters) < 40
    assert not bool(torch.isfinite(made(x)).any()), "what is away is not used by mistake"
    parked.fetch()
    assert torch.equal(made(x), expected)
    holder = nn.Sequential(made)
    with exact_products(holder):
        exact = holder(x)
    dequantize(holder)
    assert kind_of(holder) == "" and torch.equal(holder(x), exact)
    assert torch.equal(holder[0].get_parameter("weight"), twin.weight)


def test_transposed_layers_and_names_left_out() -> None:
    """GPT-2's Conv1D keeps [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    pair = nn.ModuleDict({"conv": Conv1D(12, 8), "lora_A": nn.Linear(8, 2), "norm": nn.LayerNorm(8)})
    x = torch.randn(4, 8)
    expected = pair["conv"](x)
    quantize(pair, "int8", but=lambda name: name.startswith("lora_"))
    assert isinstance(pair["conv"], QuantizedLinear) and type(pair["lora_A"]) is nn.Linear
    torch.testing.assert_close(pair["conv"](x), expected, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_codes_that_stand_for_something_else_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that belong to other rows or blocks, as bitsandbytes' kernel takes them for rows of no whole blocks."""
    real = KINDS[kind].quantized

    def damaged(self: Any, weight: Tensor) -> dict[str, Tensor]:
        found = real(self, weight * torch.logspace(-2, 2, len(weight))[:, None])
        return found | {"scales": found["scales"].flip(0)}

    monkeypatch.setattr(KINDS[kind], "quantized", damaged)
    with pytest.raises(
        ValueError, match=rf"weights in '{kind}': those of 0 are off by .* of their norm .*try 'int8' or"
    ):
        layer(kind)


@pytest.mark.parametrize(("kind", "name"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_missing_library_is_named_with_its_extra(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=rf"'{kind}' need the Python package {name}; try: pip install 'fourfold\[{name}\]'"
    ):
        library(kind)


def test_only_what_the_libraries_say_of_kernels_that_are_not_used_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    quiet_imports()
    logging.getLogger("torchao").warning("Failed to load x.so: no")
    logging.getLogger("torchao").warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_every_kind_has_its_class() -> None:
    assert tuple(KINDS) == QUANTIZED

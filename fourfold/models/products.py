"""Linear layers that compute the same by other means: for a few rows on a CPU, in half precision on a CPU that has no
instructions for it, and from weights held narrowly."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fourfold.algorithms.products import linear_in_float32, product_dtype
from fourfold.models.adapters import is_adapter

# Up to this many rows oneDNN beats MKL in float32 (AMD EPYC, one loaded core, all products of a 135M model's step: 57
# against 88 ms for 16 rows and 109 against 218 for 64); without oneDNN W @ x^T beats x @ W^T where MKL is alone.
FEW_ROWS = 64
# Rows that a packed weight's layout is chosen for; others are multiplied as well.
PACKED_ROWS = 16
# Rows of a weight over the vocabulary that are widened at once.
WIDENED_ROWS = 8192


def linear_few_rows(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """x W^T + b, by the fastest of three ways on a CPU: float32 has one of its own for few rows without gradient."""
    device = x.device.type
    if device != "cpu":
        return nn.functional.linear(x, weight, bias)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    few = x.numel() <= FEW_ROWS * x.shape[-1] and not torch.is_grad_enabled()
    if product_dtype(device, dtype) != dtype:
        return _few_rows_widened(x, weight, bias, dtype) if few else linear_in_float32(x.to(dtype), weight, bias)
    if not few or not dtype == x.dtype == weight.dtype == torch.float32:
        return nn.functional.linear(x, weight, bias)
    return _few_rows(x, weight, bias)


def _few_rows_widened(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `linear_in_float32`, for a few rows without gradient."""
    wide = None if bias is None else bias.to(dtype).float()
    with torch.autocast(x.device.type, enabled=False):
        return _few_rows(x.to(dtype).float(), weight.to(dtype).float(), wide).to(dtype)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        return linear_packed(x, weight, bias)  # packs it itself
    out = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().contiguous()
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], -1)


def linear_in_pieces(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """As `linear_few_rows`, with some rows of a narrower weight in the type of `x` at a time."""
    out = torch.cat([linear_few_rows(x, piece.to(x.dtype), None) for piece in weight.split(WIDENED_ROWS)], dim=-1)
    return out if bias is None else out + bias


def is_packable(weight: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether products with a frozen weight can be made with it `packed`, and are the same bit for bit then."""
    half = weight.device.type == "cpu" and weight.dtype == compute_dtype != torch.float32
    return half and not weight.requires_grad and torch.backends.mkldnn.enabled and _packs(weight.dtype)


@cache
@torch.no_grad()
def _packs(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor packs weights and multiplies by them as by plain ones: tried out once."""
    if not torch.backends.mkldnn.is_available() or product_dtype("cpu", dtype) != dtype:
        return False
    numbers = torch.randn(16 + 96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x, weight = numbers[:16], numbers[16:].clone()
    try:
        held = packed(weight)
        same = torch.equal(linear_packed(x, held, None), nn.functional.linear(x, weight))
        return same and torch.equal(held.to_dense(), weight)
    except RuntimeError:
        return False


def packed(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """A copy of a weight in the layout that oneDNN multiplies by; `to_dense` gives the numbers back."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def linear_packed(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """x W^T + b with a `packed` weight of the type of `x`, without gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies as `linear_few_rows` does."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return linear_few_rows(input, self.weight, self.bias)


def prepare_for_decoding(module: nn.Module) -> None:
    """Let plain linear layers on a CPU be `FewRowsLinear` where that helps; their tensors stay the same objects."""
    for child in module.modules():
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and _helped(child.weight.dtype):
            child.__class__ = FewRowsLinear


def _helped(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or product_dtype("cpu", dtype) != dtype


class WidenedLinear(FewRowsLinear):
    """A frozen linear layer that holds its weight in fewer bytes than it multiplies in, and widens it for each use."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the type of the input."""
        return linear_few_rows(input, self.weight.to(input.dtype), self.bias)


@cache
def _widened_conv1d() -> type[nn.Module]:
    """The same for GPT-2's Conv1D, which keeps [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    class WidenedConv1D(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight.to(x.dtype))
            return flat.view(*x.shape[:-1], self.nf)

    return WidenedConv1D


@torch.no_grad()
def hold_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Round the matrices of frozen linear layers and look-ups to `dtype`; products keep the type of their inputs.

    Adapters are left as they are. What the look-ups give is put into the compute type by the part that they belong to
    (models/split.py).
    """
    for name, child in module.named_modules():
        kind = type(child)
        if is_adapter(name):
            continue
        if kind in (nn.Linear, FewRowsLinear):
            child.__class__ = WidenedLinear
        elif kind.__name__ == "Conv1D":
            child.__class__ = _widened_conv1d()
        elif not isinstance(child, nn.Embedding):
            continue
        weight = child.get_parameter("weight")
        assert not weight.requires_grad, "a trained matrix keeps its float32 master"
        weight.data = rounded(weight, dtype)


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`; a number that is too large for it is a ValueError."""
    if weight.dtype == dtype:
        return weight
    narrow = weight.to(dtype)
    if not bool(torch.isfinite(narrow).all()) and bool(torch.isfinite(weight).all()):
        raise ValueError(
            f"a frozen weight of {float(weight.abs().max()):.3g} is too large for {str(dtype).removeprefix('torch.')} "
            f"(at most {torch.finfo(dtype).max:.3g}); allowed in [precision]: types that hold it; try 'bfloat16'"
        )
    return narrow


def hold_narrowly(module: nn.Module) -> None:
    """Hold float32 matrices of frozen linear layers and look-ups in bfloat16 where that is the same numbers.

    Published weights are mostly bfloat16, so the float32 copies of a role that is only scored with double its memory
    for nothing. Results stay bit-equal: the same products run in float32 as before, those for few rows included.
    """
    for child in module.modules():
        if type(child) in (nn.Linear, FewRowsLinear) and _narrow(child):
            child.__class__ = WidenedLinear
        elif isinstance(child, nn.Embedding):
            _narrow(child)


def _narrow(layer: nn.Module) -> bool:
    """Put a frozen float32 weight into bfloat16 if it comes back from there as it was."""
    weight = layer.get_parameter("weight")
    narrow = weight.bfloat16()
    exact = weight.dtype == torch.float32 and not weight.requires_grad and torch.equal(narrow.float(), weight)
    if exact:
        weight.data = narrow
    return exact

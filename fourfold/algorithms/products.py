"""Matrix products of half precision on processors that have no instructions for it: the same numbers in float32.

Without them torch multiplies bfloat16 matrices 8 to 50 times slower than float32 ones, and the product of a gradient
with a weight over 100 times (seen on AMD EPYC with AVX2: 512 rows, 576 inputs, 1,536 outputs). Sums of such products
are float32 anyway; what is stored, kept for the backward pass or cached stays in half precision.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


@cache
def product_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that products run in: the inputs' own, unless the processor has no instructions for it."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    mkldnn = torch.ops.mkldnn
    native = mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported()
    return dtype if native else torch.float32


def matmul(left: Float[Tensor, "*batch rows inner"], right: Float[Tensor, "*batch inner columns"]) -> Tensor:
    """left @ right in the type of `left`, for passes without gradient."""
    wide = product_dtype(left.device.type, left.dtype)
    if wide == left.dtype:
        return left @ right
    with torch.autocast(left.device.type, enabled=False):  # which would round the operands again
        return (left.to(wide) @ right.to(wide)).to(left.dtype)


def linear(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """x W^T + b in the type of `x`, outside of autocast."""
    if product_dtype(x.device.type, x.dtype) != x.dtype:
        return linear_in_float32(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def linear_in_float32(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """x W^T + b in the half precision of `x`, by float32 products of the same numbers.

    As under autocast a weight that is a float32 master is rounded to the type of `x` first, and so is its gradient.
    """
    return _Float32Product.apply(x, weight, bias)


class _Float32Product(torch.autograd.Function):
    """y = x W^T + b, dx = dy W, dW = dy^T x: float32 copies of the operands live as long as a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        wide_bias = None if bias is None else bias.to(x.dtype).float()
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.float(), weight.to(x.dtype).float(), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad = gradients[0].float().flatten(end_dim=-2)
        with torch.autocast(x.device.type, enabled=False):
            into_x = (grad @ weight.to(x.dtype).float()).to(x.dtype).view(x.shape) if needed[0] else None
            into_weight = grad.t() @ x.float().flatten(end_dim=-2) if needed[1] else None
            into_bias = grad.sum(dim=0) if bias is not None and needed[2] else None
        return into_x, _rounded(into_weight, x.dtype, weight), _rounded(into_bias, x.dtype, bias)


def _rounded(gradient: Tensor | None, dtype: torch.dtype, like: Tensor | None) -> Tensor | None:
    """The gradient as one of `dtype` that is handed on to a tensor `like` this."""
    return None if gradient is None or like is None else gradient.to(dtype).to(like.dtype)

"""Attention of a CPU in half precision: torch's fused kernel in float32, over keys that are not repeated.

What it saves: torch's backward pass multiplies bfloat16 three to four times slower than float32 (docs/log.md,
"Where the time of an update goes"), and transformers repeats grouped keys for every padded batch, which are then kept.
Here queries, keys and values are kept as they come. What it costs: float32 copies of one layer's at a time. What it
changes: scores, weights and sums are no longer rounded to half precision. What it excludes: nothing; what the kernel
does not do goes to transformers' "sdpa".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NAME = "sdpa_wide"  # in transformers' registry
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register() -> None:
    """Make the kernel known to transformers, with the masks of "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, wide_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def wide_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Outputs [batch, time, heads, size] for queries [batch, heads, time, size], by transformers' convention.

    `attention_mask` is True where a query [batch, 1, time, keys] sees a key; without one all do, or those before it.
    """
    if not _serves(query, key, value, attention_mask, dropout, kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out: Any = _WideAttention.apply(query, key, value, attention_mask, scaling, causal and attention_mask is None)
    return out.transpose(1, 2).contiguous(), None


def _serves(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> bool:
    """Whole sequences in half precision on a CPU; one token at a time stays with the sampler's own kernel."""
    half = value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16)
    square = 1 < query.shape[2] == key.shape[2] and query.shape[3] == value.shape[3]
    plain = not dropout and others.get("position_bias") is None and others.get("softcap") is None
    return half and square and plain and (mask is None or mask.dtype == torch.bool)


class _WideAttention(torch.autograd.Function):
    """softmax(scale q k^T, masked) v with everything after the inputs in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool
    ) -> Tensor:
        wide = [each.float() for each in (query, key, value)]
        out, log_sums = _kernel(*wide, 0.0, causal, attn_mask=_added(mask), scale=scale)
        out = out.to(value.dtype)
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, log_sums = ctx.saved_tensors
        [gradient] = gradients
        wide = [each.float() for each in (gradient, query, key, value, out)]
        found = _kernel_backward(*wide, log_sums, 0.0, ctx.causal, attn_mask=_added(mask), scale=ctx.scale)
        return *(g.to(x.dtype) for g, x in zip(found, (query, key, value), strict=True)), None, None, None


def _added(mask: Tensor | None) -> Tensor | None:
    """What is added to the scores: 0 where a key is seen, minus infinity elsewhere."""
    return None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)

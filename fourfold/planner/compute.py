"""FLOPs of a pass through consecutive decoder layers: two for each multiply-add of a matrix product.

Counted are the projections, the MLP, attention scores and values, and the head (Kaplan et al. 2020, section 2.1, with
attention by keys really attended to). Norms, activations, softmax, rotary positions and look-ups are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fourfold.planner.architectures import Architecture

Head = Literal["lm", "scalar", "none"]


def causal_attended_tokens(lengths: Iterable[int]) -> int:
    """Sum over tokens of the keys that each attends to: sum over rows of n (n + 1) / 2."""
    return sum(n * (n + 1) // 2 for n in lengths)


def _attention_flops(architecture: Architecture, attended_tokens: float) -> float:
    """Scores q.k and the weighted sum of values: head_dim multiply-adds each, for every head and attended key."""
    return 4 * architecture.heads * architecture.head_dim * attended_tokens


def _matrix_flops(architecture: Architecture, tokens: float) -> float:
    return 2 * (architecture.attention_matrix_parameters + architecture.mlp_matrix_parameters) * tokens


def _head_flops(architecture: Architecture, head: Head, head_tokens: float) -> float:
    width = {"lm": architecture.vocabulary, "scalar": 1, "none": 0}[head]
    return 2 * architecture.hidden * width * head_tokens


def forward_flops(
    architecture: Architecture,
    *,
    layers: int,
    tokens: float,
    attended_tokens: float,
    head: Head,
    head_tokens: float,
    adapter_parameters: int = 0,
) -> float:
    """FLOPs of a forward pass of `layers` layers over `tokens` tokens and of the head over `head_tokens` of them.

    `attended_tokens` is the sum over tokens of the keys attended to; decoding with a KV cache costs as much as one
    causal pass over the finished rows. `adapter_parameters` are those of all low-rank matrices together.
    """
    _check(architecture, layers, tokens, attended_tokens, head_tokens)
    layer = _matrix_flops(architecture, tokens) + _attention_flops(architecture, attended_tokens)
    return layers * layer + 2 * adapter_parameters * tokens + _head_flops(architecture, head, head_tokens)


def backward_flops(
    architecture: Architecture,
    *,
    layers: int,
    tokens: float,
    attended_tokens: float,
    head: Head,
    head_tokens: float,
    head_trained: bool,
    head_tokens_again: int = 0,
    adapter_parameters: int = 0,
    layers_again: int = 0,
    attentions_again: int = 0,
) -> float:
    """FLOPs of the backward pass through `layers` trained layers and the head.

    Each matrix product Y = X W of the forward pass has two in the backward one, dX = dY W^T and dW = X^T dY; a frozen
    head, or the base of adapters, needs dX only. `head_tokens_again` adds the head's forward pass of so many tokens,
    for a loss that keeps no logits; `layers_again` and `attentions_again` that of so many layers, or of their
    attention, which checkpointing has forgotten.
    """
    _check(architecture, layers, tokens, attended_tokens, head_tokens)
    products = 1 if adapter_parameters else 2
    matrices, attention = _matrix_flops(architecture, tokens), _attention_flops(architecture, attended_tokens)
    again = layers_again * (matrices + attention)
    again += attentions_again * (2 * architecture.attention_matrix_parameters * tokens + attention)
    return (
        layers * (products * matrices + 2 * attention)
        + again
        + 4 * adapter_parameters * tokens
        + _head_flops(architecture, head, (1 + int(head_trained)) * head_tokens + head_tokens_again)
    )


def classifier_flops(matrix_parameters: int, *, layers: int, hidden: int, tokens: int, attended_tokens: int) -> float:
    """FLOPs of a model of any family whose matrices all see every token: 2 a parameter, and attention.

    The head is among the matrices, though an encoder's sees one token a row.
    """
    return 2 * matrix_parameters * tokens + 4 * layers * hidden * attended_tokens


def _check(architecture: Architecture, layers: int, tokens: float, attended_tokens: float, head_tokens: float) -> None:
    assert 0 <= layers <= architecture.layers, f"{layers} layers of {architecture.layers}"
    assert tokens >= 0 and attended_tokens >= 0 and 0 <= head_tokens <= tokens, "counts of tokens contradict each other"

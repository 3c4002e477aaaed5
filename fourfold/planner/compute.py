"""FLOPs of a pass through consecutive decoder layers: two for each multiply-add of a matrix product.

Counted are the projections, the MLP or the router and the experts that a token is sent to, attention scores and values,
and the head (Kaplan et al. 2020, section 2.1, with attention by keys really attended to). Norms, activations, softmax,
rotary positions, look-ups and OPT-350M's two projections of the embedding are left out. Latent attention is counted as
it is trained, with keys and values of every head; an engine that decodes from the cached vectors multiplies otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fourfold.planner.architectures import Architecture
from fourfold.planner.number_head import NumberHead

Head = Literal["lm", "none"] | NumberHead


def causal_attended_tokens(lengths: Iterable[int], window: int = 0) -> int:
    """Sum over tokens of the keys that each attends to: sum over rows of n (n + 1) / 2; at most `window` of them."""
    pairs = 0
    for n in lengths:
        beyond = max(n - window, 0) if window else 0
        pairs += n * (n + 1) // 2 - beyond * (beyond + 1) // 2
    return pairs


def _attention_flops(architecture: Architecture, attended_tokens: float) -> float:
    """Scores q.k and the weighted sum of values: a multiply-add a number, for every head and attended key."""
    return 2 * architecture.heads * (architecture.key_dim + architecture.value_dim) * attended_tokens


def _matrix_flops(architecture: Architecture, layers: range, tokens: float) -> float:
    return 2 * architecture.matrices_of(layers.start, layers.stop, active=True) * tokens


def _head_flops(architecture: Architecture, head: Head, head_tokens: float) -> float:
    width = architecture.embedding_width or architecture.hidden
    if isinstance(head, NumberHead):
        return 2 * head.products(width) * head_tokens
    return 2 * width * (architecture.vocabulary if head == "lm" else 0) * head_tokens


def forward_flops(
    architecture: Architecture,
    *,
    layers: int,
    tokens: float,
    attended_tokens: float,
    head: Head,
    head_tokens: float,
    adapter_parameters: int = 0,
    start: int = 0,
) -> float:
    """FLOPs of a forward pass of `layers` layers over `tokens` tokens and of the head over `head_tokens` of them.

    `start` is the first of the layers, for models whose layers differ: those of a branch lie above its trunk's.
    `attended_tokens` is the sum over tokens of the keys attended to; decoding with a KV cache costs as much as one
    causal pass over the finished rows. `adapter_parameters` are those of all low-rank matrices together.
    """
    _check(architecture, range(start, start + layers), tokens, attended_tokens, head_tokens)
    matrices = _matrix_flops(architecture, range(start, start + layers), tokens)
    attention = layers * _attention_flops(architecture, attended_tokens)
    return matrices + attention + 2 * adapter_parameters * tokens + _head_flops(architecture, head, head_tokens)


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
    start: int = 0,
) -> float:
    """FLOPs of the backward pass through `layers` trained layers and the head.

    Each matrix product Y = X W of the forward pass has two in the backward one, dX = dY W^T and dW = X^T dY; a frozen
    head, or the base of adapters, needs dX only. `head_tokens_again` adds the head's forward pass of so many tokens,
    for a loss that keeps no logits; `layers_again` and `attentions_again` that of so many layers, or of their
    attention, which checkpointing has forgotten; where the layers differ, of as many average ones.
    """
    _check(architecture, range(start, start + layers), tokens, attended_tokens, head_tokens)
    products = 1 if adapter_parameters else 2
    matrices = _matrix_flops(architecture, range(start, start + layers), tokens)
    attention = _attention_flops(architecture, attended_tokens)
    again = layers_again * (matrices / max(layers, 1) + attention)
    again += attentions_again * (2 * architecture.attention_matrix_parameters * tokens + attention)
    return (
        products * matrices
        + layers * 2 * attention
        + again
        + 4 * adapter_parameters * tokens
        + _head_flops(architecture, head, (1 + int(head_trained)) * head_tokens + head_tokens_again)
    )


def classifier_flops(matrix_parameters: int, *, layers: int, hidden: int, tokens: int, attended_tokens: int) -> float:
    """FLOPs of a model of any family whose matrices all see every token: 2 a parameter, and attention.

    The head is among the matrices, though an encoder's sees one token a row.
    """
    return 2 * matrix_parameters * tokens + 4 * layers * hidden * attended_tokens


def _check(
    architecture: Architecture, layers: range, tokens: float, attended_tokens: float, head_tokens: float
) -> None:
    assert 0 <= layers.start <= layers.stop <= architecture.layers, f"{layers} of {architecture.layers} layers"
    assert tokens >= 0 and attended_tokens >= 0 and 0 <= head_tokens <= tokens, "counts of tokens contradict each other"

"""Draw tokens by inverting the distribution function in two steps: a block of the vocabulary, then a token in it.

One pass over the vocabulary in float32 gives the blocks' masses; what decides is summed in float64, so a draw differs
from that of one float64 sum over the vocabulary only where the random number lies within rounding (1e-6) of an edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

_BLOCK = 256


def row_uniforms(seeds: Sequence[int], tokens: int) -> Float64[Tensor, "rows tokens"]:
    """A number for each token of each row; a row's come of its seed alone, whatever is beside it."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(tokens, generator=each, dtype=torch.float64) for each in generators])


def draw_tokens(
    logits: Float32[Tensor, "rows vocab"], uniforms: Float64[Tensor, "rows"]
) -> tuple[Int64[Tensor, "rows"], Float32[Tensor, "rows"]] | None:
    """A token a row from softmax(logits) and its log-prob; None where the logits of a row are no distribution.

    `uniforms` lie in [0, 1). A token of probability 0 is never drawn.
    """
    top = logits.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        return None
    powers = (logits - top).exp_()
    edges = _block_masses(powers).double().cumsum(dim=1)
    block, left = _invert(edges, uniforms[:, None] * edges[:, -1:])
    columns = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = powers.gather(1, columns.clamp(max=logits.shape[1] - 1)).double()
    inside = torch.where(columns < logits.shape[1], inside, 0.0).cumsum(dim=1)
    # The block's mass is rounded: what is left of it is taken as a share, so that it falls inside.
    token = block * _BLOCK + _invert(inside, left * inside[:, -1:])[0]
    log_probs = logits.gather(1, token) - top - edges[:, -1:].log().float()
    return token[:, 0], log_probs[:, 0]


def _block_masses(powers: Float32[Tensor, "rows vocab"]) -> Float32[Tensor, "rows blocks"]:
    whole = powers.shape[1] // _BLOCK * _BLOCK
    masses = powers[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2)
    return masses if whole == powers.shape[1] else torch.cat([masses, powers[:, whole:].sum(1, keepdim=True)], dim=1)


def _invert(edges: Float64[Tensor, "rows n"], at: Float64[Tensor, "rows one"]) -> tuple[Tensor, Tensor]:
    """The interval between two edges that `at` falls into, and the share of it that lies below: both [rows, 1]."""
    # An interval without mass has no number right of its lower and left of its upper edge; the last one with mass ends
    # at the last edge, so a number that rounding has put there is moved below it.
    at = torch.minimum(at, torch.nextafter(edges[:, -1:], torch.zeros_like(at)))
    found = torch.searchsorted(edges, at, right=True)
    upper = edges.gather(1, found)
    lower = torch.where(found > 0, edges.gather(1, (found - 1).clamp(min=0)), 0.0)
    return found, ((at - lower) / (upper - lower)).clamp(0.0, 1.0)

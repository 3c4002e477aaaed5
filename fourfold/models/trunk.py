"""A trunk that is trained: one copy of its layers for actor and critic, beside the trunk as it was at step 0.

What it saves: of two models that are trained in full one copy of the lower layers, with its gradients and moments; one
pass over them serves actor and critic. What it costs: nothing below the branches can be cached in learn. Embedding and
learned positions stay frozen, as the language head does that is the embedding's own tensor in most models.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from fourfold.config.schema import MemorySection
from fourfold.models.flush_rows import FlushRows
from fourfold.models.products import hold_narrowly
from fourfold.models.roles import Activations, narrow_matrices, save_activations
from fourfold.models.split import Part


def hold_as_masters_compute(trunk: Part) -> None:
    """Hold a loaded trunk's vectors in float32, which autocast does not touch: so it computes what its masters will."""
    for layer in trunk.layers:
        narrow_matrices(layer.float(), trunk.compute_dtype)


def copy_trunk(trunk: Part) -> Part:
    """The trunk with decoder layers of its own; embedding and learned positions are the same tensors."""
    own = {id(tensor) for layer in trunk.layers for tensor in (*layer.parameters(), *layer.buffers())}
    memo: dict[int, Any] = {id(p): p for p in (*trunk.parameters(), *trunk.buffers()) if id(p) not in own}
    return copy.deepcopy(trunk, memo)


def layer_parameters(trunk: Part) -> list[nn.Parameter]:
    """What is trained of a trunk."""
    return [p for layer in trunk.layers for p in layer.parameters()]


def trainable_copy(trunk: Part, memory: MemorySection) -> Part:
    """A copy whose layers are float32 masters with gradients; it computes bit for bit what the frozen trunk does."""
    trained = copy_trunk(trunk)
    save_activations(trained, memory)
    for layer in trained.layers:
        layer.float().requires_grad_(True)
    return trained.train()


def hold_frozen_layers_narrowly(trunk: Part) -> None:
    """As `hold_narrowly`, without the embedding, which others read as well."""
    for layer in trunk.layers:
        hold_narrowly(layer)


@torch.no_grad()
def drift(trunk: Part, start: Part) -> float:
    """|weights - weights at step 0| / |weights at step 0|, over all trained ones."""
    moved = size = 0.0
    for now, then in zip(layer_parameters(trunk), layer_parameters(start), strict=True):
        before = then.float()
        moved += float((now - before).square().sum())
        size += float(before.square().sum())
    return math.sqrt(moved / size)


def above(trunk: Part, states: Activations, state: int) -> Activations:
    """What branches read: the trunk's output for ids, computed from the same columns as by a role that stands on it."""
    rows = FlushRows.of(states.mask, state)
    if rows is None:
        return Activations(trunk(states.inputs, states.mask), states.mask)
    out = trunk(rows.flush(states.inputs), rows.flush_mask(states.mask))
    return Activations(rows.put_back(out, states.mask.shape[1]), states.mask)

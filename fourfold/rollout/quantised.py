"""The policy that tokens are drawn from with its trained layers in fewer bits, made anew for every rollout.

What it saves: of the sampler's copy of what is trained half the bytes, or three quarters, and all of it while the
others compute. What it costs: rounding the weights once a rollout; slower products (on a CPU two to three times in
int8, see docs/log.md). What it changes: whom the responses come from. A frozen trunk stays as it is: its activations
are what every role learns from, so they are those of the training precision.
"""

from __future__ import annotations

import copy

import torch

from fourfold.memory.quantization import quantize
from fourfold.models.loading import Base
from fourfold.models.roles import Policy, freeze, narrow_matrices
from fourfold.models.split import Part
from fourfold.models.trunk import copy_trunk


@torch.no_grad()
def quantised_policy(policy: Policy, base: Base, kind: str) -> Policy:
    """A frozen copy of `policy` with the matrices of its decoder layers, and of a trained trunk's, in `kind`.

    The language head keeps the compute type.
    """
    # Together, so that a head that is the embedding's own tensor stays so.
    kept = {id(p): p for p in policy.head.parameters()} if base.shares_head else {}
    branch, head = copy.deepcopy((policy.branch, policy.head), kept)
    working = Policy(branch, head)
    freeze(working, with_language_head=not base.shares_head)
    _quantise_layers(working.branch, kind)
    if policy.trunk is not None:
        trunk = copy_trunk(policy.trunk)
        for layer in trunk.layers:
            narrow_matrices(layer.requires_grad_(False), trunk.compute_dtype)
        _quantise_layers(trunk, kind)
        working.stand_on(trunk)
    return working


def _quantise_layers(part: Part, kind: str) -> None:
    for layer in part.layers:
        quantize(layer, kind)

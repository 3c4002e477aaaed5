"""Activations that backward passes compute again instead of keeping them (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

What it saves: of every checkpointed module all but its input. What it costs: its forward pass once more. What it
changes: nothing, the same operations give the same bits. What it excludes: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Forgetting(nn.Module):
    """Mixed into a module's class: with gradients, its forward pass keeps its input only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Sampling (with a cache that must be written once) and scoring want no gradients, and nothing is kept there.
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


@cache
def _forgetting(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Forgetting{kind.__name__}", (_Forgetting, kind), {})


def checkpoint_modules(modules: Sequence[nn.Module], every: int = 1) -> int:
    """Let every `every`-th module, from the first on, forget what it computed; returns how many they are.

    The class of a module changes, its tensors stay the same objects, and copies do as it does.
    """
    chosen = modules[::every]
    for module in chosen:
        if not isinstance(module, _Forgetting):
            module.__class__ = _forgetting(type(module))
    return len(chosen)

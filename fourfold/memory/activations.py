"""Activations that backward passes compute again instead of keeping them (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

What it saves: of every checkpointed module all but its input. What it costs: its forward pass once more. What it
changes: nothing, the same operations give the same bits. What it excludes: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.memory.mixins import mix_in


class Forgetting(nn.Module):
    """Mixed into a module's class: with gradients, its forward pass keeps its input only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Sampling (with a cache that must be written once) and scoring want no gradients, and nothing is kept there.
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def checkpoint_modules(modules: Sequence[nn.Module], every: int = 1) -> int:
    """Let every `every`-th module, from the first on, forget what it computed; returns how many they are."""
    chosen = modules[::every]
    for module in chosen:
        mix_in(Forgetting, module)
    return len(chosen)

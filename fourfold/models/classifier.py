"""What runs a text classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float32
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Classifier(Protocol):
    """What runs the model."""

    def logits(self, inputs: Mapping[str, Tensor]) -> Float32[Tensor, "batch labels"]:
        """What the model says of each row, before any softmax."""
        ...


class TorchClassifier(nn.Module):
    """The model in torch."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that run one after the other; none where the architecture does not show them."""
        depth = getattr(self.model.config, "num_hidden_layers", None)
        stacks = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        return list(stacks[0]) if len(stacks) == 1 else []

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor]) -> Float32[Tensor, "batch labels"]:
        """On the device that the model is on."""
        return self.model(**{name: ids.to(self.model.device) for name, ids in inputs.items()}).logits.float()

"""Several value heads above the same features, whose mean is the value (Osband et al. 2016, "Deep Exploration via
Bootstrapped DQN", without the exploration): how far they differ says how sure the critic is.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from fourfold.models.heads import ScalarHead


class EnsembleHead(ScalarHead):
    """value = mean over heads of scale * (hidden . weight_k + bias_k) + shift, in float32."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__(hidden_size)
        self.linear = nn.Linear(hidden_size, heads, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    @torch.no_grad()
    def of(cls, head: ScalarHead, heads: int) -> EnsembleHead:
        """So many copies of one head: they part when they learn from different responses."""
        weight = head.linear.weight
        made = cls(weight.shape[1], heads).to(weight.device)
        made.linear.weight.copy_(weight.expand(heads, -1))
        made.linear.bias.copy_(head.linear.bias.expand(heads))
        made.scale.copy_(head.scale)
        made.shift.copy_(head.shift)
        return made

    def each(self, hidden: Float[Tensor, "*any hidden"]) -> Float32[Tensor, "*any heads"]:
        """What every head says."""
        return self.scale * self.linear(hidden.float()) + self.shift

    def forward(self, hidden: Float[Tensor, "*any hidden"]) -> Float32[Tensor, "*any"]:
        """One float32 number for every hidden state."""
        return self.each(hidden).mean(dim=-1)

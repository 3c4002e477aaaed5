"""The gradients of a trained trunk: the actor's and the critic's, one product for both or each by itself.

One product, h.backward(g_a + s g_c) with the gradients of both losses at the trunk's output h, is all that a step
needs. Their norms and cosine in the trunk's parameters take two products a micro-batch and two sets of gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fourfold.algorithms.decoupling import Agreement, agreement
from fourfold.memory.budget import tensor_bytes

Role = Literal["actor", "critic"]


class TrunkGradients:
    """Gradients of one trunk that are added up over the micro-batches of a mini-batch."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._aside: dict[Role, list[Tensor | None]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the gradients that are set aside."""
        return tensor_bytes(gradient for held in self._aside.values() for gradient in held)

    def add_both(self, hidden: Tensor, actor: Tensor, critic: Tensor, critic_scale: float) -> None:
        """One product. With a scale of 0 the critic's gradient is left out, so that no bit of it arrives."""
        hidden.backward(torch.add(actor, critic, alpha=critic_scale) if critic_scale else actor)

    def add_apart(self, hidden: Tensor, actor: Tensor, critic: Tensor) -> None:
        """Two products, the sums of both kept apart."""
        gradients: dict[Role, Tensor] = {"actor": actor, "critic": critic}
        for role, gradient in gradients.items():
            self._swap(role)
            hidden.backward(gradient, retain_graph=role == "actor")
            self._swap(role)

    def _swap(self, role: Role) -> None:
        """Exchange what lies at the parameters, where autograd adds, for what is set aside for a role."""
        held = self._aside.get(role, [None] * len(self._parameters))
        self._aside[role] = [p.grad for p in self._parameters]
        for p, gradient in zip(self._parameters, held, strict=True):
            p.grad = gradient

    def agreement(self) -> Agreement:
        """Norms and cosine of what was kept apart."""
        actor, critic = self._pairs()
        return agreement(actor, critic)

    @torch.no_grad()
    def join(self, critic_scale: float) -> None:
        """Bring actor + critic_scale x critic to the parameters."""
        for p, actor, critic in zip(self._parameters, *self._pairs(), strict=True):
            p.grad = actor.add_(critic, alpha=critic_scale) if critic_scale else actor
        self.release()

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        actor, critic = ([g for g in self._aside[role] if g is not None] for role in ("actor", "critic"))
        assert len(actor) == len(critic) == len(self._parameters), "every layer of the trunk takes part in both losses"
        return actor, critic

    def release(self) -> None:
        """Forget what is set aside."""
        self._aside.clear()

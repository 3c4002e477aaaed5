"""Actor and critic over one trunk: how far their gradients agree, how they are balanced, how their features part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn.functional import normalize


class Agreement(NamedTuple):
    """Norms of two gradients of the same parameters, and the cosine between them."""

    actor_norm: float
    critic_norm: float
    cosine: float


def agreement(actor: Iterable[Tensor], critic: Iterable[Tensor]) -> Agreement:
    """cos = <a, c> / (|a| |c|) over all tensors together; 0 where one of them is 0.

    Below 0 a step for one role is a step against the other (Yu et al. 2020, "Gradient Surgery for Multi-Task Learning",
    definition 1).
    """
    squared_a = squared_c = product = torch.zeros((), dtype=torch.float64)
    for a, c in zip(actor, critic, strict=True):
        squared_a, squared_c = squared_a + _dot(a, a), squared_c + _dot(c, c)
        product = product + _dot(a, c)
    norms = float(squared_a.sqrt()), float(squared_c.sqrt())
    both = norms[0] * norms[1]
    return Agreement(*norms, cosine=float(product) / both if both > 0 else 0.0)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """In float32 within a tensor, in float64 across tensors."""
    return torch.dot(x.flatten().float(), y.flatten().float()).double().cpu()


def balanced_scale(ratio: float, found: Agreement) -> float:
    """The factor s with |s c| = ratio |a|; 0 for a critic's gradient c that is 0.

    GradNorm (Chen et al. 2018) learns weights that bring the norms of tasks together; for two tasks and a ratio that is
    wanted they are known, so nothing is learned and no state is kept.
    """
    return ratio * found.actor_norm / found.critic_norm if found.critic_norm > 0 else 0.0


def squared_cosine_sum(x: Float[Tensor, "tokens hidden"], y: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, ""]:
    """sum over tokens of cos(x_t, y_t)^2: 0 where two heads read orthogonal features at every token.

    The difference loss of Bousmalis et al. 2016, "Domain Separation Networks", taken token by token: so it is a sum,
    which does not depend on the tokens that share a pass.
    """
    return (normalize(x.float(), dim=-1) * normalize(y.float(), dim=-1)).sum(dim=-1).square().sum()

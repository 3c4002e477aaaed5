"""What a backend does for one trained role; the algorithm does not know how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from fourfold.backends.scaling import LossScale


class RoleOptimizer(Protocol):
    """The optimizer of one trained role, with clipping and schedule."""

    name: str
    loss_scale: LossScale | None  # float16: what losses are scaled with, shared by the roles of a stage

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that is already divided by the global denominator."""
        ...

    @property
    def scaled(self) -> Optimizer:
        """Torch's optimizer, whose gradients a loss scale is taken off."""
        ...

    def step(self) -> float:
        """Clip, step, advance the schedule, free the gradients; returns the gradient norm before clipping."""
        ...

    def discard(self) -> None:
        """Drop the gradients collected so far."""
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        ...

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states that are in memory now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...

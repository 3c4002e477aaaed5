"""Loss scaling for float16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), one for all roles.

float16 has no numbers below 2^-24, where many gradients lie. The loss is multiplied by a scale before its backward pass
and the float32 gradients of the masters are divided by it before clipping and the step. Gradients that overflow are
dropped, and the scale halves; after GROWTH_INTERVAL steps without one it doubles. The arithmetic is torch's GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.backends.base import RoleOptimizer
from fourfold.config.schema import PrecisionSection

# A run of PPO takes hundreds of optimizer steps, not the hundred thousands that torch's default of 2,000 is made for: a
# scale that has fallen is tried again within it, and the trial costs one step.
GROWTH_INTERVAL = 200
# Below 1 scaling would lose small gradients for nothing: what is not finite there is no overflow that it can cure.
SMALLEST_SCALE = 1.0
# Smallest normal number of float16: below it digits are lost, and below 2^-24 everything.
SMALLEST_NORMAL = 2.0**-14


@dataclass
class Counts:
    """Since the last `take`."""

    skipped: int = 0
    lost: int = 0  # gradient entries below SMALLEST_NORMAL
    entries: int = 0


class LossScale:
    """The loss scale of a stage; all that is trained in it shares one."""

    def __init__(self, initial: float, device: torch.device, *, growth_interval: int = GROWTH_INTERVAL) -> None:
        self._scaler = torch.amp.GradScaler(device.type, init_scale=initial, growth_interval=growth_interval)
        self._scaler.scale(torch.zeros((), device=device))  # makes the scaler's own tensors
        self._counts = Counts()

    @classmethod
    def of(cls, precision: PrecisionSection, device: torch.device) -> LossScale | None:
        """As the settings give it: other types than float16 need none."""
        return cls(precision.loss_scale, device) if precision.compute == "float16" else None

    @property
    def scale(self) -> float:
        """What losses are multiplied by now."""
        return self._scaler.get_scale()

    @property
    def smallest(self) -> bool:
        """Whether it cannot be halved any more."""
        return self.scale <= SMALLEST_SCALE

    def scaled(self, loss: Tensor) -> Tensor:
        """scale * loss."""
        return self._scaler.scale(loss)

    def agree(self, optimizers: Sequence[RoleOptimizer]) -> bool:
        """Divide all gradients by the scale; False where one of them has overflowed: then all are dropped.

        At the smallest scale nothing is dropped, and the step itself says that its gradients are not finite.
        """
        before, smallest = self.scale, self.smallest
        for optimizer in optimizers:
            self._count(optimizer.scaled)
            self._scaler.unscale_(optimizer.scaled)
        self._scaler.update()
        if smallest or self.scale >= before:
            return True
        for optimizer in optimizers:
            optimizer.discard()
        self._counts.skipped += 1
        return False

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Entries of the scaled gradients of matrices that float16 has lost, in whole or in part.

        Rows that are all 0 do not count, for their gradient is 0 in every type: those of tokens that did not occur, and
        of what stands below a new head or adapter.
        """
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.ndim >= 2:
                rows = p.grad.flatten(1)
                reached = (rows != 0).any(dim=1)
                small = ((rows < SMALLEST_NORMAL) & (rows > -SMALLEST_NORMAL)).sum(dim=1)
                self._counts.lost += int(torch.where(reached, small, 0).sum())
                self._counts.entries += int(reached.sum()) * rows.shape[1]

    def metrics(self) -> dict[str, float]:
        """The scale, and what was counted since the last `take`; no fraction where no gradient was."""
        counts = self._counts
        found: dict[str, float] = {"loss_scale": self.scale, "steps_skipped_overflow": counts.skipped}
        if counts.entries:
            found["gradient_underflow_fraction"] = counts.lost / counts.entries
        return found

    def take(self) -> dict[str, float]:
        """The metrics; counting begins anew."""
        found, self._counts = self.metrics(), Counts()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as JSON."""
        return {"scaler": self._scaler.state_dict(), "counts": asdict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._scaler.load_state_dict(state["scaler"])
        self._counts = Counts(**state["counts"])


def step_unless_overflowed(optimizer: RoleOptimizer) -> None:
    """Step a role that is trained alone; gradients that have overflowed float16 are dropped instead."""
    if optimizer.loss_scale is None or optimizer.loss_scale.agree([optimizer]):
        optimizer.step()

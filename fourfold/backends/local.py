"""One process, one device: AdamW (Loshchilov & Hutter 2019) in float32, fused where torch has it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.schema import OptimizerSection
from fourfold.errors import RunFailed


class LocalOptimizer:
    """AdamW on the trainable parameters of one role, with clipping and a schedule over `total_steps`."""

    def __init__(self, name: str, module: nn.Module, settings: OptimizerSection, *, total_steps: int) -> None:
        self.name = name
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._max_norm = settings.max_grad_norm
        self._settings = settings
        self._total = max(total_steps, 1)
        self._steps_done = 0
        # Norms and biases are not decayed (PyTorch decays all it is given).
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self._make_moments()

    def _make_moments(self) -> None:
        """AdamW's state before the first step, which torch would make in that step.

        Made here it lies together, not in the holes that the first step's activations leave (55 MiB of peak memory for
        two models of 135M), and a machine that is too small says so at once.
        """
        for p in self._parameters:
            self._optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken."""
        return self._steps_done

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: warm-up, then the schedule."""
        s, done = self._settings, self._steps_done
        if done < s.warmup_steps:
            return s.learning_rate * (done + 1) / s.warmup_steps
        progress = min((done - s.warmup_steps) / max(self._total - s.warmup_steps, 1), 1.0)
        if s.schedule == "linear":
            return s.learning_rate * (1.0 - progress)
        if s.schedule == "cosine":
            return s.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        return s.learning_rate

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; a loss that is not finite stops the run."""
        if not bool(torch.isfinite(loss)):
            self.discard()
            raise RunFailed(
                f"learn: the {self.name}'s loss is {float(loss.detach())}; the last good checkpoint is kept; "
                "try a lower learning rate or ppo.score_clip"
            )
        loss.backward()

    def step(self) -> float:
        """One clipped AdamW step; returns the norm before clipping. A norm that is not finite stops the run."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._max_norm))
        if not math.isfinite(norm):
            self.discard()
            raise RunFailed(
                f"learn: the {self.name}'s gradient norm is {norm}; no step was taken, the last good checkpoint "
                "is kept; try a lower learning rate or ppo.score_clip"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        self._steps_done += 1
        self.discard()
        return norm

    def discard(self) -> None:
        """Free the gradients, so that the next role's have the room."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own state and the number of steps done."""
        return {"optimizer": self._optimizer.state_dict(), "steps_done": self._steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore AdamW's state, types included."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps_done = state["steps_done"]

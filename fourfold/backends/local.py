"""One process, one device: AdamW with clipping and a schedule, in a step of its own or within the backward pass."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.backends.scaling import LossScale
from fourfold.config.schema import MemorySection, OptimizerSection
from fourfold.errors import RunFailed
from fourfold.memory.budget import Budget
from fourfold.memory.optimizer_offload import Masters, OffloadedStates
from fourfold.memory.optimizers import States, make_adamw
from fourfold.models.roles import Policy, Scorer, narrowed


class LocalOptimizer:
    """AdamW on the trainable parameters of one role, with clipping and a schedule over `total_steps`.

    `memory` says where its states are and when it steps; parked states lie in `folder` where the device is the CPU.
    `budget` is what a step of one parameter keeps to.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        settings: OptimizerSection,
        *,
        total_steps: int,
        memory: MemorySection | None = None,
        folder: Path | None = None,
        loss_scale: LossScale | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name = name
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._max_norm = settings.max_grad_norm or math.inf
        self._settings = settings
        self._total = max(total_steps, 1)
        self._steps_done = 0
        self.loss_scale = loss_scale
        memory = memory or MemorySection()
        self._in_backward = memory.optimizer_in_backward
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._make_states(module, memory.optimizer_residency, folder, budget)
        if self._in_backward or memory.optimizer_residency == "offload":
            me = weakref.ref(self)  # a parameter that held its optimizer would keep the states of a finished stage

            def complete(p: Tensor) -> None:
                if (optimizer := me()) is not None:
                    assert isinstance(p, nn.Parameter)
                    optimizer._complete(p)

            for p in self._parameters:
                p.register_post_accumulate_grad_hook(complete)

    def _make_states(self, module: nn.Module, residency: str, folder: Path | None, budget: Budget | None) -> None:
        assert folder is not None or residency == "keep", "states that lie elsewhere need a folder"
        self.states: States
        if residency == "offload" and folder is not None:
            masters = Masters(self._parameters, *narrowed(module))
            self._optimizer = make_adamw(masters.stepped, self._settings)
            self.states = offloaded = OffloadedStates(self._optimizer, masters, folder, budget)
            if isinstance(module, Policy | Scorer):
                module.masters = offloaded  # what is saved of the role, and loaded into it
        else:
            self._optimizer = make_adamw(self._parameters, self._settings)
            self.states = States(self._optimizer, park_in=folder if residency == "park" else None, budget=budget)

    def _complete(self, p: nn.Parameter) -> None:
        """The gradient of a parameter is complete: autograd has added all its uses up."""
        if self._in_backward:
            self._step_in_backward(p)
        else:
            self.states.collect(p)

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

    @property
    def scaled(self) -> torch.optim.Optimizer:
        """Torch's optimizer, whose gradients a loss scale is taken off."""
        return self._optimizer

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; a loss that is not finite stops the run, or counts as an overflow of float16."""
        scale = self.loss_scale
        if not bool(torch.isfinite(loss)):
            if scale is not None and not scale.smallest:
                # Its gradients need not be infinite, where a clamp has cut them off: mark them.
                self._parameters[0].grad = torch.full_like(self._parameters[0], math.nan)
                return
            self.discard()
            raise RunFailed(
                f"learn: the {self.name}'s loss is {float(loss.detach())}; the last good checkpoint is kept; "
                "try a lower learning rate or ppo.score_clip"
            )
        if self._in_backward:
            assert not self._norms, "a second backward pass before the step that belongs to the first"
            self._use_learning_rate()
        (loss if scale is None else scale.scaled(loss)).backward()

    def _step_in_backward(self, p: nn.Parameter) -> None:
        assert p.grad is not None
        norm = p.grad.norm(dtype=torch.float32)
        if not bool(torch.isfinite(norm)):
            self.states.discard()
            raise RunFailed(
                f"learn: a gradient norm of the {self.name} is {float(norm)}, {len(self._norms)} of its parameters "
                "have been stepped already; the last good checkpoint is kept; try a lower learning rate or "
                "ppo.score_clip"
            )
        self._norms[p] = norm
        self.states.step_one(p)
        p.grad = None

    def _use_learning_rate(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate

    def step(self) -> float:
        """One clipped AdamW step; returns the norm before clipping. A norm that is not finite stops the run.

        Where the backward pass has taken it already, this ends it.
        """
        if self._in_backward:
            # In the order of the parameters: gradients come in another one.
            norms = [self._norms[p] for p in self._parameters if p in self._norms]
            self._norms.clear()
            self._steps_done += 1
            return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        norm = self.states.clip(self._parameters, self._max_norm)
        if not math.isfinite(norm):
            self.discard()
            raise RunFailed(
                f"learn: the {self.name}'s gradient norm is {norm}; no step was taken, the last good checkpoint "
                "is kept; try a lower learning rate or ppo.score_clip"
            )
        self._use_learning_rate()
        self.states.step()
        self._steps_done += 1
        self.discard()
        return norm

    def discard(self) -> None:
        """Free the gradients, so that the next role's have the room.

        Steps that a broken backward pass has taken already cannot be taken back: the run stops.
        """
        if self._norms:
            raise RunFailed(
                f"{len(self._norms)} of the {len(self._parameters)} parameters of the {self.name} had been stepped "
                "when its backward pass was broken off, so the run cannot go on from here; the last good checkpoint is "
                "kept"
            )
        self.states.discard()

    def state_bytes(self) -> int:
        """Bytes of the states that are in memory now; parked ones are not."""
        return self.states.resident_bytes()

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own state and the number of steps done."""
        return {"optimizer": self.states.state_dict(), "steps_done": self._steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore AdamW's state, types included."""
        self.states.load_state_dict(state["optimizer"])
        self._steps_done = state["steps_done"]

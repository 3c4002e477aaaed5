"""AdamW (Loshchilov & Hutter 2019) by several makers with the same numbers in, and where its states are.

What it saves: 8-bit moments (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization") hold 2 bytes a
parameter instead of 8; parked ones are in memory for one parameter at a time. What it costs: 8 bits another update,
within the bound in planner/levers.py, and slower steps on a CPU; parking a read and a write of all states a step.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.schema import OptimizerSection
from fourfold.memory.budget import Budget, tensor_bytes
from fourfold.memory.offload import Parked
from fourfold.memory.stores import layout_of, store_below
from fourfold.tensor_files import Unread, read

# The table between codes and numbers belongs to all parameters at once.
SHARED_STATES = ("qmap1", "qmap2")
# bitsandbytes puts a parameter's tensors into a dict of their own when it gives its state away.
WRAPPED = "__bnb_optimizer_quant_state__"


def make_adamw(parameters: list[nn.Parameter], settings: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that the settings name: the same learning rate, betas, epsilon and decay in all of them.

    Norms and biases are not decayed (the makers decay all they are given, by different defaults).
    """
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    given: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, **given, weight_decay=0.0, fused=True)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"optimizer = {settings.optimizer!r} needs the Python package bitsandbytes; try: pip install "
            "'fourfold[bitsandbytes]', or optimizer = 'adamw'"
        )
    paged = settings.optimizer.startswith("paged")
    if paged and any(p.device.type != "cuda" for p in parameters):
        raise ValueError(f"optimizer = {settings.optimizer!r} needs a CUDA device; on a CPU try 'adamw_8bit'")
    library: Any = importlib.import_module("bitsandbytes.optim")
    kind = library.AdamW8bit if settings.optimizer.endswith("8bit") else library.AdamW
    return kind(groups, **given, weight_decay=0.0, is_paged=paged)


class States:
    """An optimizer's states: made before the first step, stepped with, saved and loaded, in memory or parked."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, park_in: Path | None = None, budget: Budget | None = None
    ) -> None:
        self._optimizer = optimizer
        self._budget = budget or Budget()
        self._parked: dict[nn.Parameter, Parked] = {}
        self._group_of = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if park_in is None:
            for p in self._group_of:
                self._make(p)
        else:
            self._make_parked(park_in)

    def _make(self, p: nn.Parameter) -> None:
        """What the maker would make in the first step.

        Made before it the states lie together, not in the holes that the first step's activations leave (55 MiB of peak
        memory for two models of 135M), and a machine that is too small says so at once.
        """
        if isinstance(self._optimizer, torch.optim.AdamW):
            self._optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        else:
            maker: Any = self._optimizer
            index = self._group_of[p]
            group = maker.param_groups[index]
            maker.init_state(group, p, index, next(i for i, q in enumerate(group["params"]) if q is p))

    def _make_parked(self, folder: Path) -> None:
        """One parameter after the other, so that they are never all in memory."""
        if not self._group_of:
            return
        # Two float32 moments, and the weights where those are parked too; 8-bit moments with their scales are less.
        size = sum(3 * layout_of([p]).size for p in self._group_of)
        store, start = None, 0
        for p in self._group_of:
            self._make(p)
            if store is None:
                store = store_below(p.device, size, folder)
            self._parked[p] = Parked(self._movable(p), store, start)
            start += self._parked[p].size

    def _movable(self, p: nn.Parameter) -> list[Tensor]:
        state = self._optimizer.state[p]
        named = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
        return [value for name, value in named if value.ndim and name not in SHARED_STATES]

    def step(self) -> None:
        """Step every parameter that has a gradient."""
        if self._parked:
            for p in self._group_of:
                self.step_one(p)
        else:
            self._optimizer.step()

    def step_one(self, p: nn.Parameter) -> None:
        """Step one parameter; its states are in memory meanwhile, and what is resident then is held to the budget."""
        if p.grad is not None:
            with self._resident(p), self._only(p):
                self._optimizer.step()
                self._budget.check()

    def collect(self, p: nn.Parameter) -> None:
        """The gradient of a parameter is complete; it stays where it is."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients down to a global norm of `max_norm`; returns the norm before."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def discard(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _resident(self, p: nn.Parameter, buffer: Tensor | None = None) -> Iterator[None]:
        """Within, what is parked of a parameter is in memory; `buffer` holds its bytes already where it is given."""
        parked = self._parked.get(p)
        if parked is not None:
            parked.fetch(buffer)
        yield
        if parked is not None:
            parked.leave(changed=True)

    @contextlib.contextmanager
    def _only(self, p: nn.Parameter) -> Iterator[None]:
        """Within, the optimizer knows no other parameter."""
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        for index, group in enumerate(groups):
            group["params"] = [p] if index == self._group_of[p] else []
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def resident_bytes(self) -> int:
        """Bytes of the states that are in memory now."""
        states = self._optimizer.state.values()
        return tensor_bytes(t for state in states for t in state.values() if isinstance(t, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own; what is parked is `Unread`, to be read into the memory of the CPU one by one."""
        return self._with_numbers(self._optimizer.state_dict())

    def _with_numbers(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_numbers(inner) for key, inner in value.items()}
        if isinstance(value, Tensor):
            for parked in self._parked.values():
                if parked.holds(value):
                    return Unread(value.dtype, value.shape, partial(parked.read, value, torch.device("cpu")))
        return value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put saved numbers into the states where they are; another optimizer's are a ValueError.

        What is `Unread` is read when it is its turn, one tensor at a time.
        """
        groups = self._optimizer.param_groups
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in state["param_groups"]]:
            raise ValueError("the stored optimizer has other parameters; it belongs to another model")
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for index, p in enumerate(self._group_of):
            saved = dict(state["state"][index])
            saved |= saved.pop(WRAPPED, {})
            self._load(p, saved)

    def _load(self, p: nn.Parameter, saved: dict[str, Any]) -> None:
        state, parked = self._optimizer.state[p], self._parked.get(p)
        if state.keys() != saved.keys():
            raise ValueError(
                f"the stored optimizer holds {sorted(saved)}, this one {sorted(state)}; another `optimizer`?"
            )
        for name, source in saved.items():
            held = state[name]
            if not isinstance(held, Tensor):
                state[name] = source
                continue
            if (held.dtype, held.shape) != (source.dtype, source.shape):
                raise ValueError(
                    f"the stored optimizer's {name} is {source.dtype} {tuple(source.shape)}, this one's {held.dtype} "
                    f"{tuple(held.shape)}; another `optimizer`?"
                )
            if parked is not None and parked.holds(held):
                parked.overwrite(held, read(source))
            else:
                held.copy_(read(source))

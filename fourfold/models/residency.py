"""Where a frozen role's own weights are: kept, parked outside its phase, streamed layer by layer through it, or on the
CPU below a GPU, where the role computes then.

What several roles hold (a trunk with its language head, the base of adapters) stays where it is; a role on the CPU has
a copy of it there.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fourfold.memory.offload import Parked, Streamed
from fourfold.memory.stores import layout_of, store_below
from fourfold.models.external import External
from fourfold.models.roles import Policy, Scorer

Mode = Literal["keep", "park", "stream", "cpu"]
HOST = torch.device("cpu")


class RoleResidency:
    """Moves the own tensors of a role in for its phase and out after it."""

    def __init__(self, mode: Mode, role: Policy | Scorer | External, own: list[nn.Parameter], folder: Path) -> None:
        self.mode = mode
        device = own[0].device
        self.device = device
        layers = _layers(role) if mode == "stream" else []
        groups = [_of_module(layer, own) for layer in layers]
        streamed = {id(p) for group in groups for p in group}
        groups.append([p for p in own if id(p) not in streamed])
        store = store_below(device, sum(layout_of(group).size for group in groups), folder)
        self.tier = store.tier
        self._parts: list[Parked] = []
        start = 0
        for group in groups:
            self._parts.append(Parked(group, store, start))
            start += self._parts[-1].size
        self._rest = self._parts[-1]  # what is no decoder layer: embedding, norm, heads
        self._stream = Streamed(layers, self._parts[:-1], device) if layers else None
        self._depth = 0
        self._seconds = 0.0
        self._parked_bytes = 0

    @property
    def elsewhere(self) -> bool:
        """Its tensors are this process's own."""
        return False

    @property
    def computes_elsewhere(self) -> bool:
        """It computes where the other roles do."""
        return False

    @property
    def where(self) -> str:
        """For the table of roles."""
        return f"{self.device}, {'parked on' if self.mode == 'park' else 'streamed from'} {self.tier}"

    @property
    def peak_layers(self) -> int:
        """Most decoder layers that a stream had in memory at any moment."""
        return self._stream.peak_layers if self._stream is not None else 0

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Within, the role can compute."""
        if self._depth == 0:
            self._started = time.perf_counter()
            self._open()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._close()
                self._seconds += time.perf_counter() - self._started

    def _open(self) -> None:
        self._rest.fetch()
        self._parked_bytes += self._rest.size
        if self._stream is not None:
            self._stream.open()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # seconds are those of the work, not of queueing it
        self._rest.leave()

    def read(self, tensor: Tensor) -> Tensor:
        """The numbers of one of the role's tensors, in memory of their own where it is parked."""
        for part in self._parts:
            if part.holds(tensor):
                return part.read(tensor)
        return tensor

    def write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give one of the role's tensors other numbers, wherever it is."""
        for part in self._parts:
            if part.holds(tensor):
                return part.overwrite(tensor, numbers)
        tensor.detach().copy_(numbers)

    def take(self) -> dict[str, float]:
        """Seconds that the role was in use, moving included, and bytes moved in, since the last `take`."""
        moved = self._parked_bytes + (self._stream.bytes_moved if self._stream is not None else 0)
        taken = {"pass_seconds": self._seconds, "moved_bytes": float(moved)}
        self._seconds, self._parked_bytes = 0.0, 0
        if self._stream is not None:
            self._stream.bytes_moved = 0
        return taken


def _layers(role: Policy | Scorer | External) -> list[nn.Module]:
    return role.layers if isinstance(role, External) else role.branch.layers


def _of_module(module: nn.Module, own: list[nn.Parameter]) -> list[nn.Parameter]:
    mine = {id(p) for p in module.parameters()}
    return [p for p in own if id(p) in mine]


class HostResidency:
    """A role that lives and computes on the host: what it reads comes down to it, what it says goes up again."""

    device = HOST
    elsewhere = False
    computes_elsewhere = True

    def __init__(self, where: str = f"{HOST}, computes there") -> None:
        self.where = where
        self._depth = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """It always is; the seconds are counted."""
        started, outermost = time.perf_counter(), self._depth == 0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._seconds += (time.perf_counter() - started) * outermost

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give one of the role's tensors other numbers."""
        tensor.detach().copy_(numbers)

    def take(self) -> dict[str, float]:
        """Seconds that the role was in use; its weights never move."""
        seconds, self._seconds = self._seconds, 0.0
        return {"pass_seconds": seconds, "moved_bytes": 0.0}


def _move_to_host(role: Policy | Scorer | External) -> None:
    """Deep copies whose tensors are on the host already; the modules that other roles hold too stay as they are."""
    memo: dict[int, Any] = {id(t): _on_host(t) for _, t in (*role.named_parameters(), *role.named_buffers())}
    for name, module in list(role.named_children()):
        setattr(role, name, copy.deepcopy(module, memo))


def _on_host(tensor: Tensor) -> Tensor:
    moved = tensor.detach().to(HOST)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def place(role: Policy | Scorer | External, mode: Mode, own: list[nn.Parameter], folder: Path) -> None:
    """Hold a frozen role as `mode` says from now on; `own` are the tensors that nobody else holds."""
    if mode == "cpu":
        _move_to_host(role)
        role.residency = HostResidency()
    elif mode != "keep" and own:
        role.residency = RoleResidency(mode, role, own, folder)

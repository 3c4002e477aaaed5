"""Masters, moments and the update below the device (Ren et al. 2021, "ZeRO-Offload", sections 4 and 5).

What it saves: on the device a trained matrix is held in the compute type only; its float32 master, its gradient and
Adam's moments lie in host memory (below a GPU) or in a file (below a CPU). What it costs: a gradient goes down as soon
as it is made and a new weight comes up after its step, and the CPU steps. What it changes: nothing where the CPU would
have stepped anyway, since autocast multiplies by the rounded master in any case; below a GPU the rounding of Adam.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.memory.offload import Parked
from fourfold.memory.optimizers import States
from fourfold.memory.stores import layout_of, store_below

# Gradients that may wait for their sums: more would keep the memory that taking them down is to free.
WAITING = 2
HOST = torch.device("cpu")


class Masters:
    """The float32 numbers that an optimizer steps for the parameters of a role, all on the CPU.

    A parameter in `narrow` is put into `dtype`, and its numbers become the master. Any other one is float32 where it is
    used: on a CPU it is its own master, a GPU's has a copy that a step renews first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], narrow: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._narrow = {id(p) for p in narrow if p.dtype != dtype}
        self.all: dict[nn.Parameter, nn.Parameter] = {}
        for p in parameters:
            narrowed = id(p) in self._narrow
            self.all[p] = nn.Parameter(p.data.to(HOST)) if narrowed or p.device != HOST else p
            if narrowed:
                p.data = p.data.to(dtype)

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What the optimizer gets, in the order of the parameters."""
        return list(self.all.values())

    @property
    def used(self) -> list[nn.Parameter]:
        """What the passes use."""
        return list(self.all)

    def of(self, tensor: Tensor) -> nn.Parameter | None:
        """The master of a parameter that is held narrowly; None for any other tensor."""
        return self.all[tensor] if id(tensor) in self._narrow and isinstance(tensor, nn.Parameter) else None

    def begin(self, p: nn.Parameter) -> nn.Parameter:
        """The master of a parameter, with the numbers that the step starts from."""
        master = self.all[p]
        if id(p) not in self._narrow and master is not p:
            master.data.copy_(p.data)
        return master


class _Sum:
    """The gradient of one parameter over the micro-batches of a step: float32, on disk where the device is the CPU."""

    def __init__(self, p: nn.Parameter) -> None:
        self.total = torch.empty(p.shape, dtype=torch.float32)
        self.parked: Parked | None = None
        self.norm: Tensor | None = None  # of the sum so far; None where nothing has come

    def add(self, gradient: Tensor, arrived: Any) -> None:
        """Add a gradient, once its copy has `arrived`."""
        if arrived is not None:
            arrived.synchronize()
        if self.norm is None:
            first = gradient.float()
            self.parked.overwrite(self.total, first) if self.parked else self.total.copy_(first)
            self.norm = torch.linalg.vector_norm(first)
            return
        if self.parked:
            self.parked.fetch()
        self.norm = torch.linalg.vector_norm(self.total.add_(gradient))
        if self.parked:
            self.parked.leave(changed=True)

    def read(self) -> Tensor:
        """The sum in host memory; may be overwritten."""
        return self.parked.read(self.total) if self.parked else self.total


class Gradients:
    """Takes gradients down as they are made and adds them up on a thread, while the backward pass goes on."""

    def __init__(self, parameters: Sequence[nn.Parameter], folder: Path) -> None:
        self._device = parameters[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._sums = {p: _Sum(p) for p in parameters}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self._coming: deque[Future[None]] = deque()
        if self._device == HOST:
            totals = [each.total for each in self._sums.values()]
            layout = layout_of(totals)
            store = store_below(HOST, layout.size, folder)
            for each, start in zip(self._sums.values(), layout.offsets, strict=True):
                each.parked = Parked([each.total], store, start)

    def take(self, p: nn.Parameter) -> None:
        """Free a complete gradient here, and add it below."""
        gradient, p.grad = p.grad, None
        assert gradient is not None
        while len(self._coming) >= WAITING:
            self._coming.popleft().result()
        self._coming.append(self._pool.submit(self._sums[p].add, *self._down(gradient)))

    def _down(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """A copy in host memory and the event of its arrival; on a CPU the gradient itself."""
        if self._stream is None:
            return gradient, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(gradient, non_blocking=True)
            arrived = self._stream.record_event()
        gradient.record_stream(self._stream)  # its memory must not be used again before the copy is made
        return host, arrived

    def norms(self) -> list[Tensor]:
        """Of the sums, once the last gradient is there."""
        while self._coming:
            self._coming.popleft().result()
        return [each.norm for each in self._sums.values() if each.norm is not None]

    def taken(self) -> list[nn.Parameter]:
        """Parameters that have got a gradient."""
        return [p for p, each in self._sums.items() if each.norm is not None]

    def read(self, p: nn.Parameter) -> Tensor:
        """The sum of a parameter's gradients in host memory; may be overwritten."""
        return self._sums[p].read()

    def discard(self) -> None:
        """Forget all of them, those on their way too."""
        wait(self._coming)
        self._coming.clear()
        for p, each in self._sums.items():
            p.grad = None
            each.norm = None


class OffloadedStates(States):
    """States of an optimizer over masters, with the gradients and the way of new weights back to the device.

    While one parameter is stepped, what the next one's step needs is read and what the last one's made goes up.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters, folder: Path) -> None:
        self._masters = masters
        self._gradients = Gradients(masters.used, folder)
        self._device = masters.used[0].device
        self._up = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="state-reader")
        self._narrow = {id(m) for p in masters.used if (m := masters.of(p)) is not None}
        self._coefficient = torch.ones(())
        super().__init__(optimizer, park_in=folder if self._device == HOST else None)

    @property
    def where(self) -> str:
        """Device and tier, for the table of roles."""
        return f"{self._device}, masters on {'disk' if self._device == HOST else 'host'}"

    def _movable(self, p: nn.Parameter) -> list[Tensor]:
        return [*([p] if id(p) in self._narrow else []), *super()._movable(p)]

    def collect(self, p: nn.Parameter) -> None:
        """Take the gradient down."""
        self._gradients.take(p)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """min(1, max_norm / (norm + 1e-6)) is what the coming step multiplies by, as torch's clip does."""
        norms = self._gradients.norms()
        if not norms:
            return 0.0
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self._coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return float(norm)

    def discard(self) -> None:
        """Forget the gradients."""
        self._gradients.discard()

    def step(self) -> None:
        """Step every parameter that has got a gradient."""
        todo = self._gradients.taken()
        coming = self._read_ahead(todo[0]) if todo else None
        for p, following in itertools.zip_longest(todo, todo[1:]):
            assert coming is not None
            gradient, buffer = coming.result()
            coming = self._read_ahead(following) if following is not None else None
            self._update(p, gradient.mul_(self._coefficient), buffer)
        self._wait_for_weights()

    def step_one(self, p: nn.Parameter) -> None:
        """Step one parameter with the gradient that it has on the device."""
        assert p.grad is not None
        self._update(p, p.grad.to(HOST, torch.float32), None)
        self._wait_for_weights()

    def _read_ahead(self, p: nn.Parameter) -> Future[tuple[Tensor, Tensor | None]]:
        """The gradient of a parameter, and the bytes of what is parked with it, in memory soon."""

        def load() -> tuple[Tensor, Tensor | None]:
            parked, buffer = self._parked.get(self._masters.all[p]), None
            if parked is not None:
                parked.load(buffer := parked.new_buffer())
            return self._gradients.read(p), buffer

        return self._reader.submit(load)

    @torch.no_grad()
    def _update(self, p: nn.Parameter, gradient: Tensor, buffer: Tensor | None) -> None:
        master = self._masters.begin(p)
        master.grad = gradient
        with self._resident(master, buffer):
            with self._only(master):
                self._optimizer.step()
            master.grad = None
            if master is not p:
                self._to_device(p, master)

    def _to_device(self, p: nn.Parameter, master: nn.Parameter) -> None:
        """The new weight, rounded to what the device holds; on a GPU the copy goes on during the next step."""
        if self._up is None:
            p.copy_(master)
            return
        rounded = torch.empty(p.shape, dtype=p.dtype, pin_memory=True).copy_(master)
        # What has been queued may still read the old weight.
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            p.copy_(rounded, non_blocking=True)

    def _wait_for_weights(self) -> None:
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def resident_bytes(self) -> int:
        """Bytes of the states that are in the device's memory now."""
        return super().resident_bytes() if self._device == HOST else 0

    def read(self, tensor: Tensor) -> Tensor:
        """The float32 numbers of one of the role's tensors, wherever they are."""
        master = self._masters.of(tensor)
        if master is None:
            return tensor.detach()
        parked = self._parked.get(master)
        return parked.read(master) if parked is not None else master.detach()

    @torch.no_grad()
    def write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give one of the role's tensors, and its master, other numbers."""
        master = self._masters.of(tensor)
        if master is not None:
            parked = self._parked.get(master)
            parked.overwrite(master, numbers) if parked is not None else master.copy_(numbers)
        tensor.copy_(numbers)

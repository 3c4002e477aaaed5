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

from fourfold.memory.budget import Budget, give_back
from fourfold.memory.optimizers import States
from fourfold.memory.stores import as_bytes, layout_of, store_below

# Gradients that may wait for their sums: more would keep the memory that taking them down is to free.
WAITING = 2
HOST = torch.device("cpu")
# Lets a narrow weight have a float32 gradient (models/split.py); an older torch would take it for any attribute.
WIDE_GRADIENTS = "grad_dtype"


class Masters:
    """The float32 numbers that an optimizer steps for the parameters of a role, all on the CPU.

    A parameter in `narrow` is put into `dtype`, and its numbers become the master. Any other one is float32 where it is
    used: on a CPU it is its own master, a GPU's has a copy that a step renews first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], narrow: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._narrow = {id(p) for p in narrow if p.dtype != dtype}
        if self._narrow and not hasattr(torch.Tensor, WIDE_GRADIENTS):
            raise ValueError(
                f"memory.optimizer_residency: 'offload' needs torch.Tensor.{WIDE_GRADIENTS} for embeddings in the "
                f"compute type, which torch {torch.__version__} has not (2.13 has); update torch, or try 'park'"
            )
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


class Gradients:
    """Takes gradients down as they are made and adds them up on a thread, while the backward pass goes on.

    Sums are float32: in host memory below a GPU, in a file below a CPU. There every sum passes through one buffer:
    memory that one thread takes and another gives back stays with the process (800 MiB for 51M parameters).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], folder: Path) -> None:
        self._device = parameters[0].device
        self._parameters = list(parameters)
        self._norms: dict[nn.Parameter, Tensor] = {}  # of the sums so far
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self._coming: deque[Future[None]] = deque()
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._buffer = torch.empty(0)
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            self._sums = {p: torch.empty(p.shape, dtype=torch.float32) for p in parameters}
            return
        layout = layout_of([torch.empty(p.shape, dtype=torch.float32, device="meta") for p in parameters])
        self._store = store_below(HOST, layout.size, folder)
        self._starts = dict(zip(parameters, layout.offsets, strict=True))

    @property
    def largest(self) -> int:
        """Numbers of the largest parameter."""
        return max(p.numel() for p in self._parameters)

    def take(self, p: nn.Parameter) -> None:
        """Free a complete gradient here, and add it below."""
        gradient, p.grad = p.grad, None
        assert gradient is not None
        if not self._sums and not len(self._buffer):
            # Here, not on the thread: what counts live tensors sees those of the thread that it was entered on.
            self._buffer = torch.empty(self.largest, dtype=torch.float32)
        while len(self._coming) >= WAITING:
            self._coming.popleft().result()
        self._coming.append(self._pool.submit(self._add, p, *self._down(gradient)))

    def _down(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """A copy in host memory and the event of its arrival; on a CPU the gradient itself."""
        if self._device.type != "cuda":
            return gradient, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(gradient, non_blocking=True)
            arrived = self._stream.record_event()
        gradient.record_stream(self._stream)  # its memory must not be used again before the copy is made
        return host, arrived

    def _add(self, p: nn.Parameter, gradient: Tensor, arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        if p in self._norms:
            total = self.read(p, self._buffer).add_(gradient)
        else:
            total = self._room(p, self._buffer).copy_(gradient)
        self._norms[p] = torch.linalg.vector_norm(total)
        if not self._sums:
            self._store.write(self._starts[p], as_bytes(total))

    def _room(self, p: nn.Parameter, buffer: Tensor) -> Tensor:
        return self._sums[p] if self._sums else buffer[: p.numel()].view(p.shape)

    def read(self, p: nn.Parameter, buffer: Tensor) -> Tensor:
        """The sum of a parameter's gradients in host memory, in `buffer` (float32) where it lies in the file."""
        total = self._room(p, buffer)
        if not self._sums:
            self._store.read(self._starts[p], as_bytes(total))
        return total

    def norms(self) -> list[Tensor]:
        """Of the sums, in the order of the parameters, once the last gradient is there."""
        while self._coming:
            self._coming.popleft().result()
        return [self._norms[p] for p in self.taken()]

    def taken(self) -> list[nn.Parameter]:
        """Parameters that have got a gradient."""
        return [p for p in self._parameters if p in self._norms]

    def discard(self) -> None:
        """Forget all of them, those on their way too."""
        wait(self._coming)
        self._coming.clear()
        self._norms.clear()
        self._buffer = torch.empty(0)
        for p in self._parameters:
            p.grad = None


class OffloadedStates(States):
    """States of an optimizer over masters, with the gradients and the way of new weights back to the device.

    While one parameter is stepped, what the next one's step needs is read and what the last one's made goes up.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Masters, folder: Path, budget: Budget | None = None
    ) -> None:
        self._masters = masters
        self._gradients = Gradients(masters.used, folder)
        self._device = masters.used[0].device
        self._up = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="state-reader")
        self._narrow = {id(m) for p in masters.used if (m := masters.of(p)) is not None}
        self._coefficient = torch.ones(())
        super().__init__(optimizer, park_in=folder if self._device == HOST else None, budget=budget)
        give_back()  # what the masters have left

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
        slots = [self._new_slot() for _ in todo[:2]]
        coming = self._read_ahead(todo[0], slots[0]) if todo else None
        for index, (p, following) in enumerate(itertools.zip_longest(todo, todo[1:])):
            assert coming is not None
            gradient, parked = coming.result()
            if following is not None:
                coming = self._read_ahead(following, slots[(index + 1) % 2])
            self._update(p, gradient.mul_(self._coefficient), parked)
        self._wait_for_weights()

    def _new_slot(self) -> tuple[Tensor, Tensor]:
        """Room for any parameter's gradient and parked bytes; none where both are in host memory."""
        if not self._parked:
            return torch.empty(0), torch.empty(0)
        size = max(parked.size for parked in self._parked.values())
        return torch.empty(self._gradients.largest), torch.empty(size, dtype=torch.uint8)

    def _read_ahead(self, p: nn.Parameter, slot: tuple[Tensor, Tensor]) -> Future[tuple[Tensor, Tensor | None]]:
        """The gradient of a parameter, and the bytes of what is parked with it, in the slot soon."""

        def load() -> tuple[Tensor, Tensor | None]:
            parked = self._parked.get(self._masters.all[p])
            if parked is not None:
                parked.load(slot[1])
            return self._gradients.read(p, slot[0]), None if parked is None else slot[1]

        return self._reader.submit(load)

    def step_one(self, p: nn.Parameter) -> None:
        """Step one parameter with the gradient that it has on the device."""
        assert p.grad is not None
        self._update(p, p.grad.to(HOST, torch.float32), None)
        self._wait_for_weights()

    @torch.no_grad()
    def _update(self, p: nn.Parameter, gradient: Tensor, buffer: Tensor | None) -> None:
        master = self._masters.begin(p)
        master.grad = gradient
        with self._resident(master, buffer):
            with self._only(master):
                self._optimizer.step()
                self._budget.check()
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

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The type of what `read` gives."""
        return tensor.dtype if self._masters.of(tensor) is None else torch.float32

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

"""Tensors that are out of memory except while they are used: parked as a whole, or streamed layer by layer.

What it saves: the parked bytes while other phases run; streamed layers but for two also in their own phase. What it
costs: reading them once a phase (parked) or once a pass (streamed, while the layer before computes). What it changes:
nothing, the same bytes come back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fourfold.memory.stores import Store, as_bytes, layout_of

Module = TypeVar("Module", bound=nn.Module)


def absent(tensor: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """What stands for a tensor that is away: its type and shape over one number, NaN, so that no use goes unnoticed."""
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=dtype or tensor.dtype, device=device or tensor.device).expand(tensor.shape)


def copy_with_absent(module: Module) -> Module:
    """A deep copy in which tensors that are away are so as well; deepcopy alone would give them memory."""
    away = [p for p in module.parameters() if p.numel() > 1 and not any(p.stride())]
    memo: dict[int, Any] = {id(p): nn.Parameter(absent(p), requires_grad=p.requires_grad) for p in away}
    return copy.deepcopy(module, memo)


class Parked:
    """Tensors whose numbers lie in a store from `start` on, and in memory between `fetch` and `leave` only."""

    def __init__(self, tensors: Iterable[Tensor], store: Store, start: int = 0) -> None:
        self._tensors = list({id(t): t for t in tensors}.values())
        self._layout = layout_of(self._tensors)
        self._places = {id(t): start + at for t, at in zip(self._tensors, self._layout.offsets, strict=True)}
        self._store = store
        self._start = start
        self._resident = True
        self.leave(changed=True)

    @property
    def size(self) -> int:
        """Bytes in the store."""
        return self._layout.size

    @property
    def resident(self) -> bool:
        """Whether the numbers are in memory."""
        return self._resident

    def holds(self, tensor: Tensor) -> bool:
        """Whether this very tensor is one of them."""
        return id(tensor) in self._places

    def fetch(self, into: Tensor | None = None) -> None:
        """Bring the numbers into memory; `into` (uint8, with the store's bytes already in it) is used where given."""
        if into is None:
            into = self.new_buffer()
            self._store.read(self._start, into)
        for tensor, at in zip(self._tensors, self._layout.offsets, strict=True):
            length = tensor.numel() * tensor.element_size()
            tensor.data = into[at : at + length].view(tensor.dtype).view(tensor.shape)
        self._resident = True

    def new_buffer(self) -> Tensor:
        """Memory for all of them, where they are used."""
        device = self._tensors[0].device if self._tensors else "cpu"
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def load(self, into: Tensor) -> None:
        """Copy the store's bytes into a buffer, for a `fetch` to come."""
        self._store.read(self._start, into[: self.size])

    def leave(self, *, changed: bool = False) -> None:
        """Free the memory, after writing the numbers back where they have `changed`."""
        assert self._resident
        for tensor in self._tensors:
            if changed:
                self._store.write(self._places[id(tensor)], as_bytes(tensor))
            tensor.data = absent(tensor)
        self._resident = False

    def read(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """The numbers of one of them in memory of their own, on their own device where no other is given."""
        device = device or tensor.device
        if self._resident:
            return tensor.detach().to(device, copy=True)
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._store.read(self._places[id(tensor)], found.reshape(-1).view(torch.uint8))
        return found

    def overwrite(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give one of them other numbers, without bringing it into memory."""
        if self._resident:
            tensor.detach().copy_(numbers)
        else:
            self._store.write(self._places[id(tensor)], as_bytes(numbers.to(tensor.dtype)))


class _Loader(Protocol):
    """Fills buffers while the layer before computes."""

    def start(self, parked: Parked, slot: int, buffer: Tensor) -> None: ...

    def wait(self) -> None: ...

    def used(self, slot: int) -> None: ...

    def close(self) -> None: ...


class _Reader:
    """A thread that reads from the disk; torch's kernels and reads both run without Python's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="layer-reader")
        self._loading: Future[None] | None = None

    def start(self, parked: Parked, slot: int, buffer: Tensor) -> None:
        self._loading = self._pool.submit(parked.load, buffer)

    def wait(self) -> None:
        assert self._loading is not None
        self._loading.result()

    def used(self, slot: int) -> None:
        """A layer's work on a CPU is done when its call returns."""

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _Copier:
    """A CUDA stream of its own: a copy waits until the layer that used the buffer before has been computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: dict[int, Any] = {}
        self._loaded: Any = None

    def start(self, parked: Parked, slot: int, buffer: Tensor) -> None:
        # The buffers were made on the computing stream: the first copies must not overtake what was there before.
        free = self._free.get(slot) or torch.cuda.current_stream(self._device).record_event()
        self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            parked.load(buffer)
            self._loaded = self._stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded)

    def used(self, slot: int) -> None:
        self._free[slot] = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Streamed:
    """Layers that run one after the other and of which at most two are in memory: one computes, the next is loaded.

    While open, a layer's call waits for its numbers and starts to load the next layer's into the other of two buffers;
    after the last comes the first, for the next pass.
    """

    def __init__(self, layers: Sequence[nn.Module], parts: Sequence[Parked], device: torch.device) -> None:
        self._layers = list(layers)
        self._parts = list(parts)
        self._device = device
        self._buffers: list[Tensor] = []
        self._hooks: list[Any] = []
        self._coming: int | None = None  # the layer that is being loaded
        self._loads = 0
        self._slot_of: dict[int, int] = {}
        self.bytes_moved = 0
        self.peak_layers = 0

    def open(self) -> None:
        """Make the two buffers and load the first layer."""
        size = max(part.size for part in self._parts)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._loader: _Loader = _Reader() if self._device.type == "cpu" else _Copier(self._device)
        for index, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: self._before(index)))
            # Also when the layer raises: a failed pass must not leave its numbers behind.
            after = layer.register_forward_hook(lambda *_, index=index: self._after(index), always_call=True)
            self._hooks.append(after)
        self._load(0)

    def close(self) -> None:
        """Free everything."""
        if self._coming is not None:
            self._loader.wait()
            self._coming = None
        self._loader.close()
        for hook in self._hooks:
            hook.remove()
        for part in self._parts:
            if part.resident:
                part.leave()
        self._hooks, self._buffers, self._slot_of = [], [], {}

    def _load(self, index: int) -> None:
        slot = self._loads % 2
        self._loads += 1
        self._slot_of[index] = slot
        self._coming = index
        self._loader.start(self._parts[index], slot, self._buffers[slot])
        self.bytes_moved += self._parts[index].size
        self.peak_layers = max(self.peak_layers, 1 + sum(part.resident for part in self._parts))

    def _before(self, index: int) -> None:
        if self._coming != index:  # a pass that was given up left another layer on its way
            if self._coming is not None:
                self._loader.wait()
            self._load(index)
        self._loader.wait()
        self._coming = None
        self._parts[index].fetch(self._buffers[self._slot_of[index]])
        if (following := (index + 1) % len(self._layers)) != index:
            self._load(following)

    def _after(self, index: int) -> None:
        if self._parts[index].resident:
            self._loader.used(self._slot_of[index])
            self._parts[index].leave()


class Residency(Protocol):
    """How a module's tensors are held that are not always in memory, or not on the run's device."""

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether another process holds them: here are stand-ins, and `read` has nothing to read."""
        ...

    @property
    def computes_elsewhere(self) -> bool:
        """Whether it is not computed on the run's device, so that other kernels may round otherwise."""
        ...

    @property
    def where(self) -> str:
        """Device and tier, for the table of roles."""
        ...

    def resident(self) -> contextlib.AbstractContextManager[None]:
        """Within, the module can compute."""
        ...

    def read(self, tensor: Tensor) -> Tensor:
        """The numbers of one of its tensors, wherever they are."""
        ...

    def take(self) -> dict[str, float]:
        """Seconds in use and bytes moved in (of a role elsewhere: to and fro) since the last `take`."""
        ...


def residency_of(owner: Any) -> Residency | None:
    """How a role, or a source that scores with one, is held; None where it is simply kept."""
    return getattr(owner, "residency", None)


def is_elsewhere(owner: Any) -> bool:
    """Whether a role (or the role of a reward source) is held by another process."""
    held = residency_of(owner)
    return held is not None and held.elsewhere


def computes_elsewhere(owner: Any) -> bool:
    """Whether a role (or the role of a reward source) is computed on another device or by another process."""
    held = residency_of(owner)
    return held is not None and held.computes_elsewhere


def resident(owner: Any) -> contextlib.AbstractContextManager[None]:
    """Within, a role (or the role of a reward source) can compute, wherever it is held otherwise."""
    held = residency_of(owner)
    return contextlib.nullcontext() if held is None else held.resident()

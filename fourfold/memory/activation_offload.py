"""Saved activations wait for their backward pass outside the device's memory (compare torch's save_on_cpu).

On CUDA they go to pinned host memory by copies that the stream orders, so nobody waits for them. On the CPU they go to
a file in the temporary folder (TMPDIR; a folder that is itself kept in memory saves nothing) and come back by mmap.
What it saves: of a role's layers all activations but those of the operation at work. What it costs: the copies. What it
changes: nothing; a storage comes back with the same bytes and strides, so every kernel is the same. What it excludes:
nothing; under checkpointing the layers' inputs are what is left to move.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.memory.mixins import mix_in

# Below this a copy costs more than it saves (torchtune's OffloadActivations takes the same number).
SMALL_BYTES = 1024

Fetch = Callable[[], torch.UntypedStorage]


class _Moved:
    """A saved tensor whose storage lies elsewhere."""

    def __init__(self, fetch: Fetch, tensor: Tensor) -> None:
        self._fetch = fetch
        self._like = (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride())

    def back(self) -> Tensor:
        """The tensor as it was saved, strides included."""
        dtype, device, offset, size, stride = self._like
        return torch.empty(0, dtype=dtype, device=device).set_(self._fetch(), offset, size, stride)


class _Mover:
    """Moves the storages that one forward pass saves, each once; weights stay where they are."""

    def __init__(self, module: nn.Module) -> None:
        tensors = (*module.parameters(), *module.buffers())
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, Fetch]] = {}
        self._file: _File | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Moved:
        """What autograd holds instead of the tensor."""
        storage = tensor.untyped_storage()
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if not plain or storage.nbytes() < SMALL_BYTES or storage.data_ptr() in self._stay:
            return tensor
        reference = StorageWeakRef(storage)
        # A weak reference keeps the address from being given away; a write in place raises the version.
        key = (reference.cdata, tensor._version)
        if key not in self._known or self._known[key][0].expired():
            self._known[key] = (reference, self._move(storage))
        return _Moved(self._known[key][1], tensor)

    @staticmethod
    def unpack(held: Tensor | _Moved) -> Tensor:
        """The tensor again."""
        return held.back() if isinstance(held, _Moved) else held

    def _move(self, storage: torch.UntypedStorage) -> Fetch:
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if storage.device.type == "cuda":
            return _to_host(content)
        if self._file is None:
            self._file = _File()
        return _to_file(content, self._file)


class _File:
    """A file without a name, which is gone when nothing reads from it any more."""

    def __init__(self) -> None:
        self.descriptor, name = tempfile.mkstemp(prefix="fourfold-activations-")
        os.unlink(name)
        weakref.finalize(self, os.close, self.descriptor)


def _to_host(content: Tensor) -> Fetch:
    device = content.device
    host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(content, non_blocking=True)
    return lambda: host.to(device, non_blocking=True).untyped_storage()


def _to_file(content: Tensor, file: _File) -> Fetch:
    grain, size = mmap.ALLOCATIONGRANULARITY, content.numel()
    start = -(-os.fstat(file.descriptor).st_size // grain) * grain
    array: Any = content.numpy()
    left = memoryview(array)
    while len(left):  # one call writes 2 GiB at most
        left = left[os.pwrite(file.descriptor, left, start + size - len(left)) :]

    def fetch() -> torch.UntypedStorage:
        # A private mapping: what is written to it stays in memory. The tensor holds it.
        pages = mmap.mmap(file.descriptor, size, access=mmap.ACCESS_COPY, offset=start)
        return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()

    return fetch


class Offloading(nn.Module):
    """Mixed into a module's class: with gradients, what its forward pass saves is moved out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        mover = _Mover(self)
        with torch.autograd.graph.saved_tensors_hooks(mover.pack, mover.unpack):
            return super().forward(*args, **kwargs)


def offload_activations(module: nn.Module) -> None:
    """Move what a module's backward pass needs out of the device's memory; its copies do so too."""
    mix_in(Offloading, module)

"""Bytes of the tensors that are alive, counted operation by operation: exact where resident memory is not.

Resident memory on the CPU holds what the allocator keeps for later and what libraries take; this counts the storages of
tensors alone, on every device, as torch.cuda.max_memory_allocated does on one. It costs a call a tensor operation.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Within, every storage counts from the operation that makes it to its end; those that exist, from the start."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> LiveTensors:
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter):
                self._see(thing)
        self.reset()
        super().__enter__()
        return self

    def reset(self) -> None:
        """Forget the peak: from here on it is what is alive now."""
        self.peak_bytes = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        if tensor.is_mkldnn:  # oneDNN's own bytes, which are no storage
            return self._count(tensor, id(tensor), tensor.numel() * tensor.element_size())
        if tensor.device.type == "meta" or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            return  # a wrapper (torchao's) has a size and no bytes; the tensors inside are seen by themselves
        storage = tensor.untyped_storage()
        self._count(storage, storage._cdata, storage.nbytes())

    def _count(self, thing: Tensor | torch.UntypedStorage, key: int, size: int) -> None:
        if size and key not in self._alive:
            self._alive[key] = weakref.ref(thing, partial(self._gone, key, size))
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _gone(self, key: int, size: int, reference: Any) -> None:
        del self._alive[key]
        self.bytes -= size

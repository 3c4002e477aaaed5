"""Where the bytes of tensors lie while nobody uses them: pinned host memory below a GPU, the disk below a CPU."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.errors import RunFailed

# CUDA's own allocations start at multiples of it, and a product's last bits may depend on where its operands start.
ALIGNMENT = 256


class Layout(NamedTuple):
    """Where each of several tensors begins in one run of bytes, and how long that is."""

    offsets: tuple[int, ...]
    size: int


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """One after the other, each at a multiple of ALIGNMENT."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(offsets), end)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, as uint8 [bytes]; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Store(Protocol):
    """A run of bytes outside the memory that the tensors are used in."""

    tier: str

    def write(self, start: int, source: Tensor) -> None:
        """Put the bytes of `source` (uint8) at `start`; done when it returns."""
        ...

    def read(self, start: int, target: Tensor) -> None:
        """Fill `target` (uint8) from `start` on; on a GPU queued on the current stream."""
        ...


class HostStore:
    """Page-locked memory of the host, which a GPU reads and writes while it computes."""

    tier = "host"

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def write(self, start: int, source: Tensor) -> None:
        """From the device; blocks, so that the source may be freed."""
        self._bytes[start : start + source.numel()].copy_(source)

    def read(self, start: int, target: Tensor) -> None:
        """To the device, without waiting for it."""
        target.copy_(self._bytes[start : start + target.numel()], non_blocking=True)


class DiskStore:
    """A file without a name in `folder`: it goes with the process, also when that is killed.

    Read and written by offset, not memory-mapped: pages of a mapping count as resident memory beside the tensor that
    they are copied to, and a product may depend on how a tensor is aligned, which a mapping does not choose.
    """

    tier = "disk"

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(prefix=".offload-", dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        try:
            if size:
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise RunFailed(
                f"load: offloaded tensors need {size:,} bytes in {folder} ({error.strerror}); free some room, move "
                'output, or set the residency to "keep"'
            ) from error

    def write(self, start: int, source: Tensor) -> None:
        """pwrite(2)."""
        array: Any = source.cpu().numpy()
        rest = memoryview(array)
        while rest:
            done = os.pwrite(self._file, rest, start)
            start, rest = start + done, rest[done:]

    def read(self, start: int, target: Tensor) -> None:
        """preadv(2), straight into the tensor's memory; other threads run meanwhile."""
        array: Any = target.numpy()
        rest = memoryview(array)
        while rest:
            done = os.preadv(self._file, [rest], start)
            if done <= 0:
                raise OSError(errno.EIO, "a file of offloaded tensors ends before what was written to it")
            start, rest = start + done, rest[done:]


def store_below(device: torch.device, size: int, folder: Path) -> Store:
    """The tier below a device: host memory below a GPU, a file in `folder` below a CPU."""
    return DiskStore(size, folder) if device.type == "cpu" else HostStore(size)

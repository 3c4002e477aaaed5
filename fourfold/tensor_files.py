"""Named tensors in a safetensors file, written and read one at a time: the file may be larger than the free memory.

The library's own writer takes all tensors at once. The format is its (https://github.com/huggingface/safetensors):
eight bytes with the length of a header, the header as JSON padded to a multiple of eight, the bytes of the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# The names of the format.
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


@dataclass(frozen=True)
class Unread:
    """A tensor whose numbers lie out of memory: its type and shape, and what brings a copy of them."""

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]


Source = Tensor | Unread


def read(source: Source) -> Tensor:
    """The numbers, wherever they are."""
    return source.read() if isinstance(source, Unread) else source.detach()


def size_of(source: Source) -> int:
    """Bytes of the numbers."""
    return math.prod(source.shape) * source.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Source]) -> None:
    """A new file, durable when this returns; of what is unread or on a GPU one tensor at a time is in memory.

    A tensor that cannot be stored is a ValueError before anything is written; a full disk an OSError with the file's
    name.
    """
    # As the library orders them: the widest first, so that each begins at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name in names:
        source = tensors[name]
        if source.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} is {source.dtype}, which a safetensors file cannot hold")
        start, end = end, end + size_of(source)
        header[name] = {"dtype": _NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(path, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(_bytes_of(name, tensors[name]))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Errors of write and fsync do not say which file they are about.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _bytes_of(name: str, source: Source) -> memoryview:
    numbers = read(source)
    # What is read may not be what was promised: the header is written by then.
    assert (numbers.dtype, numbers.shape) == (source.dtype, source.shape), name
    array: Any = numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read when it is asked for: memory goes when the last user lets go of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with safe_open(str(path), framework="pt") as file:
            self._names = tuple(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        # A mapping of the file for each tensor: pages that were read are resident as long as their mapping is.
        with safe_open(str(self._path), framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

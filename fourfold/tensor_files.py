"""Named tensors in a safetensors file, written and read one at a time: the file may be larger than the free memory.

The library's own writer takes all tensors at once. The format is its (https://github.com/huggingface/safetensors):
eight bytes with the length of a header, the header as JSON padded to a multiple of eight, the bytes of the tensors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.errors import RunFailed

# The names of the format.
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
}
METADATA = "__metadata__"  # a key of the header that is no tensor
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


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
    name; numbers that cannot be read from where they lie a RunFailed.
    """
    # As the library orders them: the widest first, so that each begins at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name in names:
        source = tensors[name]
        if source.dtype not in _NAMES or name == METADATA:
            raise ValueError(
                f"tensor {name!r} is {source.dtype}: neither this type nor a name {METADATA!r} can be stored"
            )
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
    try:
        numbers = read(source)
    except OSError as error:  # of another file: this one's disk is not to blame
        raise RunFailed(
            f"save: tensor {name!r} could not be read from where it is parked or offloaded: {error}; what was saved "
            "before is intact; look at the disk of the run's folder, and give the same command again"
        ) from error
    if (numbers.dtype, numbers.shape) != (source.dtype, source.shape):  # the header is written by then
        raise RuntimeError(f"tensor {name!r} is {numbers.dtype} {tuple(numbers.shape)}, and said to be another")
    array: Any = numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read into memory of its own when it is asked for.

    The file stays open, so that all of them are of the same one, whatever happens to its name meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(str(path), framework="pt"):
                pass  # a file that is damaged is refused by the library
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}); write it again") from error
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = bytearray(length)
        self._fill(memoryview(header), 8, "header")
        self._header = json.loads(header)
        self._header.pop(METADATA, None)
        self._start = 8 + length

    def unread(self) -> dict[str, Unread]:
        """All of them, to be read one by one."""
        return {
            name: Unread(self._type(name), torch.Size(about["shape"]), partial(self.__getitem__, name))
            for name, about in self._header.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        about = self._header[name]
        found = torch.empty(about["shape"], dtype=self._type(name), device="cpu")
        array: Any = found.reshape(-1).view(torch.uint8).numpy()
        self._fill(memoryview(array), self._start + about["data_offsets"][0], f"tensor {name!r}")
        return found

    def _type(self, name: str) -> torch.dtype:
        held = self._header[name]["dtype"]
        if held not in _TYPES:
            raise ValueError(f"{self._path}: tensor {name!r} is {held}; allowed: {', '.join(_TYPES)}")
        return _TYPES[held]

    def _fill(self, rest: memoryview, at: int, what: str) -> None:
        """Read the file from `at` on, which may take several calls."""
        while rest:
            done = os.preadv(self._file, [rest], at)
            if done <= 0:
                raise OSError(errno.EIO, f"the file ends within {what}", str(self._path))
            at, rest = at + done, rest[done:]

    def __reduce__(self) -> Any:
        raise TypeError("an open file cannot be copied: its number may be another file's by the time it is read")

    def __contains__(self, name: object) -> bool:
        return name in self._header

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)

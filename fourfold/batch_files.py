"""The data contract on disk: one Parquet file a batch, one row a sequence, zstd.

Columns bear the names of the contract's fields; a `[batch, time]` tensor is a column of lists, padding included, so a
batch comes back bit for bit. Stage, schema version, shapes, range of policy versions and a sha256 of the columns are in
the file's metadata, so any Parquet reader can tell what a file is without reading it whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from fourfold.batch import Experience, Rollout, ScoredRollout
from fourfold.files import write_atomically

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 3
_METADATA_KEY = b"fourfold"
_STAGES: dict[str, type[Rollout]] = {stage.__name__: stage for stage in (Rollout, ScoredRollout, Experience)}


def write_batch(path: str | Path, batch: Rollout) -> None:
    """Write a batch of any stage; the file is there whole or not at all.

    A batch with a NaN or infinite number is refused: whoever reads it would learn from it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tensors = {f.name: getattr(batch, f.name).detach().cpu().contiguous() for f in fields(batch)}
    _check_numbers(path, tensors)
    versions = tensors["policy_version"]
    header = {
        "schema_version": SCHEMA_VERSION,
        "stage": type(batch).__name__,
        "policy_version_range": [int(versions.min()), int(versions.max())],
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    header["sha256"] = _checksum(header, tensors)
    table = pa.table({name: _to_column(tensor) for name, tensor in tensors.items()})
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(header).encode()})
    floats = [_leaf(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]
    others = [_leaf(name, tensor) for name, tensor in tensors.items() if not tensor.is_floating_point()]
    sink = pa.BufferOutputStream()
    # Splitting floats by byte puts their exponents side by side, which is what zstd can shorten; not for dictionaries.
    # The stubs know only the bool forms of these two options.
    options: dict[str, Any] = {"use_dictionary": others, "use_byte_stream_split": floats}
    pq.write_table(table, sink, compression="zstd", **options)
    write_atomically(Path(path), sink.getvalue().to_pybytes())


def read_batch(path: str | Path) -> Rollout:
    """The batch in a file, as the stage that it was written as: Rollout, ScoredRollout or Experience."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = Path(path).read_bytes()
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()  # pq.read_table imports pandas
    # A damaged file fails in whichever part of the decoder meets the damage first.
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error}); {_ADVICE}") from error
    header = _header(path, table)
    stage = _STAGES[header["stage"]]
    names = [f.name for f in fields(stage)]
    if table.column_names != names or sorted(header["shapes"]) != sorted(names):
        raise ValueError(f"{path}: has columns {table.column_names}, a {stage.__name__} has {names}; {_ADVICE}")
    try:
        tensors = {name: _from_column(table.column(name), header["shapes"][name]) for name in names}
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: the columns do not have the shapes of its header ({error}); {_ADVICE}") from error
    expected = header.pop("sha256", None)
    if _checksum(header, tensors) != expected:
        raise ValueError(f"{path}: the columns do not give the sha256 of its header; {_ADVICE}")
    return stage(**tensors)


_ADVICE = "the file is damaged or was changed; delete it and make the batch again"


def _header(path: str | Path, table: pa.Table) -> dict[str, Any]:
    """The batch's own metadata, checked as far as is needed to know what the columns are."""
    raw = (table.schema.metadata or {}).get(_METADATA_KEY)
    try:
        header = json.loads(raw) if raw is not None else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(
            f"{path}: a Parquet file, but not a batch: its metadata lack {_METADATA_KEY.decode()!r}; "
            "try a file made by write_batch"
        )
    if header.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema version {header.get('schema_version')}, this program reads version {SCHEMA_VERSION}; "
            "try the version of the program that wrote it, or make the batch again"
        )
    if header.get("stage") not in _STAGES or not isinstance(header.get("shapes"), dict):
        raise ValueError(f"{path}: stage {header.get('stage')!r}, allowed are {', '.join(_STAGES)}; {_ADVICE}")
    return header


def _check_numbers(path: str | Path, tensors: dict[str, Tensor]) -> None:
    if len(tensors["sequences"]) == 0:
        raise ValueError(f"{path}: the batch has no rows; at least one is needed; try skipping empty batches")
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise ValueError(
                f"{path}: {name} has {bad} NaN or infinite numbers among {tensor.numel()}; only finite ones are "
                "written; try dropping those rows, and find the phase that made them"
            )


def _checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """sha256 over the header (shapes, names, stage) and the raw bytes of the columns in the order of the fields."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for tensor in tensors.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _leaf(name: str, tensor: Tensor) -> str:
    """The Parquet path of a column's numbers."""
    return name if tensor.dim() == 1 else f"{name}.list.element"


def _to_column(tensor: Tensor) -> pa.Array:
    import pyarrow as pa

    flat = _flat(tensor)
    if tensor.dim() == 1:
        return flat
    width = math.prod(tensor.shape[1:])
    offsets = _flat(torch.arange(0, len(flat) + 1, width, dtype=torch.int32))
    return pa.ListArray.from_arrays(offsets, flat)


def _flat(tensor: Tensor) -> pa.Array:
    """The numbers of a tensor by its own bytes: `pa.array` would import pandas, where it is installed, to look at one.

    That takes seconds in a process that has not imported it.
    """
    import pyarrow as pa

    numbers = tensor.numpy().reshape(-1)
    bits = numpy.packbits(numbers, bitorder="little") if numbers.dtype == numpy.bool_ else numbers
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(bits)])


def _from_column(column: pa.ChunkedArray, shape: list[int]) -> Tensor:
    flat = column.combine_chunks()
    if len(shape) > 1:
        flat = flat.flatten()
    return _numbers(flat).reshape(shape)


def _numbers(flat: pa.Array) -> Tensor:
    """The inverse of `_flat`, without pandas too."""
    if flat.null_count:
        raise ValueError(f"{flat.null_count} of {len(flat)} numbers are null")
    bits, start, count = flat.buffers()[1], flat.offset, len(flat)
    if str(flat.type) == "bool":
        return torch.from_numpy(
            numpy.unpackbits(numpy.frombuffer(bits, numpy.uint8), bitorder="little")[start : start + count] > 0
        )
    dtype = numpy.dtype({"float": "float32", "double": "float64"}.get(str(flat.type), str(flat.type)))
    return torch.from_numpy(numpy.frombuffer(bits, dtype, count, start * dtype.itemsize).copy())

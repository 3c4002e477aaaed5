"""Files of tensors, beside what the format's own library reads and writes; and how much of one is in memory."""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.errors import RunFailed
from fourfold.tensor_files import Source, TensorFile, Unread, read, size_of, write_tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@st.composite
def tensors(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Tensor:
    """Any bits of any type and shape, some of them a transposed view."""
    dtype, shape = draw(dtypes), draw(SHAPES)
    count = torch.Size(shape).numel() * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    numbers = torch.tensor(list(content), dtype=torch.uint8)
    if dtype == torch.bool:
        numbers = numbers % 2
    found = numbers.view(dtype).reshape(shape)
    return found.mT if len(shape) > 1 and draw(st.booleans()) else found


def named(dtypes: st.SearchStrategy[torch.dtype]) -> st.SearchStrategy[dict[str, Tensor]]:
    return st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), tensors(dtypes), max_size=5)


@given(given=named(st.sampled_from(DTYPES)), unread=st.booleans())
def test_the_library_reads_what_is_written(given: dict[str, Tensor], unread: bool) -> None:
    given.pop("__metadata__", None)
    sources: dict[str, Source] = dict(given)
    if unread:
        sources = {name: Unread(t.dtype, t.shape, partial(torch.clone, t)) for name, t in given.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_tensors(path, sources)
        found = safetensors.torch.load(path.read_bytes())
        expected = {name: bits(tensor) for name, tensor in given.items()}
        assert {name: bits(tensor) for name, tensor in found.items()} == expected
        ours = TensorFile(path)
        assert len(ours) == len(given) and {name: bits(tensor) for name, tensor in ours.items()} == expected
        total = sum(size_of(source) for source in sources.values())
        assert total == sum(t.numel() * t.element_size() for t in given.values()) <= path.stat().st_size


@given(data=st.data())
def test_files_of_one_type_are_the_librarys_byte_for_byte(data: st.DataObject) -> None:
    """Of several types the library orders equally wide ones by a list of its own, which no reader asks for."""
    given = data.draw(named(st.just(data.draw(st.sampled_from(DTYPES)))))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_tensors(path, given)
        assert path.read_bytes() == safetensors.torch.save({name: t.contiguous() for name, t in given.items()})


def test_of_what_is_unread_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def bring(value: float) -> Tensor:
        assert not any(each() is not None for each in alive), "the one before is gone"
        found = torch.full((1000,), value)
        alive.append(weakref.ref(found))
        return found

    given = {str(index): Unread(torch.float32, torch.Size([1000]), partial(bring, float(index))) for index in range(5)}
    write_tensors(tmp_path / "file", given)
    assert len(alive) == 5
    assert [float(tensor[-1]) for tensor in TensorFile(tmp_path / "file").values()] == [0, 1, 2, 3, 4]


def test_all_tensors_are_of_one_file_whatever_happens_to_its_name(tmp_path: Path) -> None:
    """A checkpoint may be replaced, or deleted, while somebody reads it."""
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.ones(3), "b": torch.zeros(2)})
    file = TensorFile(path)
    assert "a" in file and "c" not in file and list(file) == ["a", "b"]
    path.unlink()
    write_tensors(path, {"a": torch.full((3,), 7.0), "b": torch.full((2,), 7.0)})
    assert file["a"].tolist() == [1, 1, 1] and file["b"].tolist() == [0, 0]
    with pytest.raises(KeyError):
        file["c"]


def test_what_is_read_is_a_copy_and_the_file_is_closed_with_its_object(tmp_path: Path) -> None:
    def opened() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))

    path = tmp_path / "file"
    write_tensors(path, {"a": torch.ones(3)})
    file = TensorFile(path)
    unread = file.unread()["a"]
    assert (unread.dtype, unread.shape) == (torch.float32, torch.Size([3])) and opened() == 1
    read(unread).add_(1)
    assert file["a"].tolist() == [1, 1, 1]
    del file
    assert opened() == 1, "what is unread is still to be read"
    del unread
    assert opened() == 0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.ones(300)})
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:40], whole[:-4], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"file is no whole safetensors file \(.*write it again"):
            TensorFile(path)
    path.write_bytes(whole)
    file = TensorFile(path)
    os.truncate(path, len(whole) - 4)
    with pytest.raises(OSError, match="the file ends within tensor 'a'"):
        file["a"]


def test_types_that_are_not_ours_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    safetensors.torch.save_file({"a": torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)}, path)
    with pytest.raises(ValueError, match="file: tensor 'a' is F8_E8M0; allowed: F64, F32"):
        TensorFile(path).unread()


def test_an_open_file_is_not_copied(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.ones(2)})
    unread = TensorFile(tmp_path / "file").unread()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an open file cannot be copied"):
            copied(unread)
    with torch.device("meta"):
        assert read(unread["a"]).device.type == "cpu"


def test_an_error_of_a_source_is_not_taken_for_one_of_the_file(tmp_path: Path) -> None:
    """Where moments are parked a read can fail as well, and another disk is to be looked at."""

    def fails() -> Tensor:
        raise OSError(5, "Input/output error", "/below")

    with pytest.raises(RunFailed, match=r"tensor 'a' could not be read from where it is parked .*/below"):
        write_tensors(tmp_path / "file", {"a": Unread(torch.float32, torch.Size([2]), fails)})


def test_tied_tensors_are_written_twice(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    write_tensors(tmp_path / "file", {"a": tied, "b": tied, "c": tied.view(2, 3).mT})
    found = safetensors.torch.load_file(tmp_path / "file")
    assert (
        torch.equal(found["a"], tied) and torch.equal(found["b"], tied) and torch.equal(found["c"], tied.view(2, 3).mT)
    )


def test_what_cannot_be_stored_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'a' is torch\.complex128: neither this type nor"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="nor a name '__metadata__' can be stored"):
        write_tensors(tmp_path / "file", {"__metadata__": torch.zeros(2)})
    assert not os.listdir(tmp_path)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError) as error:
        write_tensors(tmp_path / "file", {"a": torch.zeros(2)})
    assert error.value.filename == str(tmp_path / "file") and (tmp_path / "file").read_text() == "mine"


def test_a_source_that_reads_something_else_than_it_says_is_an_error(tmp_path: Path) -> None:
    wrong = Unread(torch.float32, torch.Size([2]), lambda: torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"tensor 'a' is torch\.float32 \(3,\), and said to be another"):
        write_tensors(tmp_path / "file", {"a": wrong})
    assert torch.equal(read(wrong), torch.zeros(3))

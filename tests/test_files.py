"""Atomic writes: the old contents or the new, never a part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fourfold.files import require_empty, write_atomically, write_durably


def test_replaces_text_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "grün")
    assert path.read_bytes() == "grün".encode()
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="a"):
        write_atomically(path, "new")
    assert os.listdir(tmp_path) == ["a"]


def test_leftovers_of_a_killed_process_do_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / f".partial-a.txt-{os.getpid()}").write_text("half")
    write_atomically(tmp_path / "a.txt", "whole")
    assert os.listdir(tmp_path) == ["a.txt"]


def test_new_files_never_overwrite(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", "1")
    with pytest.raises(FileExistsError, match="a"):
        write_durably(tmp_path / "a", "2")
    assert (tmp_path / "a").read_text() == "1"


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", "1")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_empty(tmp_path / "new" / "folder")
    (tmp_path / "file").write_text("here")
    with pytest.raises(ValueError, match=r"file is a file, and no folder can be made below it"):
        require_empty(tmp_path / "file" / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # the tests may run as root
    with pytest.raises(ValueError, match=r"nothing can be written to .* \(no permission\)"):
        require_empty(tmp_path / "new" / "folder")

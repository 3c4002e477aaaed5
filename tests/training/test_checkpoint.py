"""Checkpoints: whole or not there, verified, kept and deleted by the rules, restored bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.errors import RunFailed
from fourfold.tensor_files import Unread
from fourfold.training.checkpoint import (
    CheckpointStore,
    Schema,
)


def content(step: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and state that say which step they belong to."""
    weights = torch.arange(40, dtype=torch.float32).reshape(5, 8) * step
    return {"actor": {"w": weights, "b": torch.full((3,), step, dtype=torch.bfloat16)}}, {
        "progress": {"step": step, "kl_coef": 0.1}
    }


def save(store: CheckpointStore, step: int, *, is_best: bool = False) -> Path:
    return store.save(step, *content(step), is_best=is_best)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def assert_is(checkpoint: Any, step: int) -> None:
    tensors, state = content(step)
    assert checkpoint.step == step and checkpoint.state == state
    loaded = checkpoint.tensors("actor")
    assert loaded.keys() == tensors["actor"].keys()
    for name, tensor in tensors["actor"].items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_save_then_latest_gives_the_same_back(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path / "new" / "checkpoints", 2), 12)
    assert path.name == "step-00000012"
    assert sorted(p.name for p in path.iterdir()) == ["actor.safetensors", "manifest.json", "state.json"]
    reopened = CheckpointStore(tmp_path / "new" / "checkpoints", 2)
    assert_is(reopened.latest(), 12)
    assert reopened.warnings == []


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "absent", 1)
    assert store.latest() is None and store.load_best() is None
    assert not (tmp_path / "absent").exists(), "reading makes no folder"


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in range(1, 8):
        save(store, step, is_best=step in (1, 3))
    assert steps_in(tmp_path) == [3, 6, 7]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 3, "folder": "step-00000003"}
    best = store.load_best()
    assert best is not None
    assert_is(best, 3)
    save(store, 8, is_best=True)
    assert steps_in(tmp_path) == [7, 8], "the old best goes when there is a new one"


def test_a_step_saved_again_replaces_itself_and_stays_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    save(store, 4, is_best=True)
    tensors, state = content(4)
    store.save(4, tensors, {**state, "again": True})
    latest, best = store.latest(), store.load_best()
    assert latest is not None and latest.state["again"] is True
    assert best is not None and best.step == 4
    save(store, 5)
    assert steps_in(tmp_path) == [4, 5]


def damage(path: Path, kind: str) -> None:
    size = path.stat().st_size
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        os.truncate(path, size - 1)
    elif kind == "longer":
        path.write_bytes(path.read_bytes() + b" ")
    else:
        raw = bytearray(path.read_bytes())
        raw[{"first bit": 0, "middle bit": size // 2, "last bit": size - 2}[kind]] ^= 1
        path.write_bytes(bytes(raw))


@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "longer", "first bit", "middle bit", "last bit"])
@pytest.mark.parametrize("file", ["actor.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, file: str, kind: str) -> None:
    store = CheckpointStore(tmp_path, 3)
    save(store, 1)
    damage(save(store, 2, is_best=True) / file, kind)
    reopened = CheckpointStore(tmp_path, 3)
    latest = reopened.latest()
    if (file, kind) == ("manifest.json", "longer"):
        assert_is(latest, 2)  # a blank after the JSON says the same
        return
    assert latest is not None
    assert_is(latest, 1)
    assert len(reopened.warnings) == 1
    assert "step-00000002" in reopened.warnings[0] and file in reopened.warnings[0]


def test_every_bit_of_every_file_is_guarded(tmp_path: Path) -> None:
    """Whatever single bit is flipped, what is loaded is equal to what was saved, or is the checkpoint before."""
    store = CheckpointStore(tmp_path, 2)
    save(store, 1)
    path = save(store, 2)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for position in random.Random(0).sample(range(len(good) * 8), 60):
            raw = bytearray(good)
            raw[position // 8] ^= 1 << position % 8
            file.write_bytes(bytes(raw))
            latest = CheckpointStore(tmp_path, 2).latest()
            assert latest is not None
            assert_is(latest, latest.step)
            assert latest.step == 1 or file.name == "manifest.json"
        file.write_bytes(good)
    assert_is(store.latest(), 2)


def test_damaged_ones_do_not_push_out_intact_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (8, 10, 12):
        save(store, step)
    save(store, 8)  # put back what the rule has deleted
    damage(tmp_path / "step-00000010" / "actor.safetensors", "cut")
    damage(tmp_path / "step-00000012" / "state.json", "cut")
    reopened = CheckpointStore(tmp_path, 2)
    assert_is(reopened.latest(), 8)
    save(reopened, 9)
    assert {8, 9} <= set(steps_in(tmp_path))
    save(reopened, 10)
    assert_is(reopened.latest(), 10)
    save(reopened, 12)
    assert steps_in(tmp_path) == [10, 12]
    assert_is(reopened.latest(), 12)


def test_a_damaged_one_is_not_counted_among_the_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (1, 2, 3):
        save(store, step)
    damage(tmp_path / "step-00000003" / "state.json", "cut")
    reopened = CheckpointStore(tmp_path, 2)
    assert_is(reopened.latest(), 2)
    save(reopened, 4)
    assert steps_in(tmp_path) == [2, 4], "the one to fall back to stays, the damaged one goes"


def test_all_damaged_is_none_and_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (1, 2):
        damage(save(store, step) / "state.json", "empty")
    assert store.latest() is None
    assert [w.split(" is passed over")[0] for w in store.warnings] == [
        str(tmp_path / f"step-0000000{n}") for n in (2, 1)
    ]


def test_a_folder_under_another_name_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    shutil.copytree(save(store, 1), tmp_path / "step-00000009")
    latest = store.latest()
    assert latest is not None and latest.step == 1


def test_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced before the rename, the folder after it, and only then is anything deleted."""
    calls: list[tuple[str, str]] = []
    real_sync, real_rename, real_rmtree = os.fsync, os.rename, shutil.rmtree

    def note(kind: str, name: str) -> None:
        calls.append((kind, name))

    def fsync(descriptor: int) -> None:
        note("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        note("rename", Path(target).name)
        real_rename(source, target)

    def rmtree(path: Path) -> None:
        note("delete", Path(path).name)
        real_rmtree(path)

    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(store, 2)
    renamed = calls.index(("rename", "step-00000002"))
    synced_before = [name for kind, name in calls[:renamed] if kind == "sync"]
    assert synced_before[-4:] == ["actor.safetensors", "state.json", "manifest.json", ".partial-step-00000002"]
    assert calls[renamed + 1] == ("sync", tmp_path.name)
    assert calls.index(("delete", ".partial-step-00000001")) > renamed + 1


HERE = Path(__file__).parent


def run_script(name: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("which", ["new", "again"])
def test_kill_at_every_moment(tmp_path: Path, which: str) -> None:
    """After SIGKILL anywhere in a save, the newest intact checkpoint is the one before or the new one, whole."""
    count = int(run_script("kill_while_saving.py", str(tmp_path), which))
    assert count >= 12, "the save was not interrupted"
    outcomes = set()
    for k in range(count):
        root = tmp_path / f"killed-{k}"
        store = CheckpointStore(root, 1)
        latest, best = store.latest(), store.load_best()
        assert latest is not None and best is not None and store.warnings == []
        assert_is(latest, latest.step)
        assert_is(best, best.step)
        outcomes.add((latest.step, best.step))
        assert not list(root.glob(".partial-*")) and not list(root.glob(".replaced-*"))
        # The run goes on from there: saving works and the rules hold again.
        save(store, 4)
        assert steps_in(root) == sorted({best.step, 4})
    assert outcomes == ({(2, 1)} if which == "again" else {(2, 1), (3, 3)})


def test_disk_full_in_the_middle(tmp_path: Path) -> None:
    """The error names file, bytes needed and free; the half is gone and the checkpoint before is intact."""
    tensors, state = run_script("fill_disk_while_saving.py", str(tmp_path)).splitlines()
    assert "File too large" in tensors and ".partial-step-00000002/actor.safetensors" in tensors
    assert (
        f"{30_000 * 4 + (1 << 20):,} bytes" in tensors and "are free" in tensors and "checkpoint.keep_last" in tensors
    )
    assert ".partial-step-00000002" in state
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]
    assert_is(CheckpointStore(tmp_path, 1).latest(), 1)


def test_no_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    huge = torch.zeros(1).expand(10**15)  # four petabytes that take four bytes of memory
    with pytest.raises(RunFailed, match=r"No space left .* needs 4,000,000,001,048,576 bytes"):
        store.save(2, {"actor": {"w": huge}}, {})
    assert_is(store.latest(), 1)


def test_two_writers_are_refused_and_a_reader_leaves_a_save_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    (tmp_path / ".partial-step-00000002").mkdir()
    with store._lock():
        with pytest.raises(RunFailed, match="another process"):
            save(CheckpointStore(tmp_path, 1), 2)
        assert (tmp_path / ".partial-step-00000002").is_dir()
    CheckpointStore(tmp_path, 1)
    assert not (tmp_path / ".partial-step-00000002").exists()


def test_an_older_schema_is_filled_in_with_a_warning(tmp_path: Path) -> None:
    """FAULTS K4."""
    save(CheckpointStore(tmp_path, 1, schema=Schema(1)), 5)
    newer = Schema(2, {2: {"controller": "fixed", "progress.kl_coef": 9.0, "progress.horizon": 100}})
    store = CheckpointStore(tmp_path, 1, schema=newer)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.state == {"controller": "fixed", "progress": {"step": 5, "kl_coef": 0.1, "horizon": 100}}
    assert len(store.warnings) == 1 and store.warnings[0].endswith("set to defaults: controller, progress.horizon")


def test_a_newer_schema_stops_instead_of_losing_steps(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, 1, schema=Schema(3)), 5)
    with pytest.raises(ValueError, match=r"newer version of fourfold \(schema 3; this one reads up to 2\)"):
        CheckpointStore(tmp_path, 1).latest()


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": float("inf")}])
def test_state_that_would_come_back_changed_is_refused(tmp_path: Path, state: dict[Any, Any]) -> None:
    with pytest.raises(ValueError):
        CheckpointStore(tmp_path, 1).save(1, {}, state)
    assert not steps_in(tmp_path)


def test_tied_strided_and_empty_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    group = {
        "whole": base,
        "tied": base,
        "view": base[1:],
        "across": base.t(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(7),
    }
    store = CheckpointStore(tmp_path, 1)
    store.save(1, {"actor": group}, {})
    checkpoint = store.latest()
    assert checkpoint is not None
    loaded = checkpoint.tensors("actor")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in group.items())
    with pytest.raises(ValueError, match="no tensors 'critic'; allowed: actor"):
        checkpoint.tensors("critic")


def test_numbers_that_cannot_be_read_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    """Where moments are parked another disk fails; the checkpoint before is intact."""

    def fails() -> torch.Tensor:
        raise OSError(5, "Input/output error")

    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    away = Unread(torch.float32, torch.Size([2]), fails)
    with pytest.raises(RunFailed, match=r"save: tensor 'moments' could not be read from where it is"):
        store.save(2, {"optimizer": {"moments": away}}, {})
    assert_is(CheckpointStore(tmp_path, 1).latest(), 1)

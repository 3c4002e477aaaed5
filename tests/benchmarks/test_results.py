"""Results files: complete, readable again, and every committed one in order."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import (
    FOLDER,
    Figure,
    Result,
    commit,
    hardware,
    processor,
    read_result,
    read_results,
    slug,
    write_result,
)

KEYS = {"hardware", "versions", "commit", "config", "figures"}
FIGURE_KEYS = {"name", "value", "unit", "spread", "against", "target"}


def figure(**changes: Any) -> dict[str, Any]:
    plain = {"name": "seconds", "value": 2.0, "unit": "s", "spread": [1.5, 3.0], "against": None, "target": None}
    return plain | changes


def content(**changes: Any) -> dict[str, Any]:
    plain = {
        "name": "speed",
        "date": "2026-01-31",
        "hardware": "2 x Some CPU, 24 GiB, no GPU",
        "versions": {"python": "3.11.7"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "config": {"batch": 16},
        "figures": [figure()],
    }
    return plain | changes


def parse(tree: dict[str, Any]) -> Result:
    return Result.model_validate_json(json.dumps(tree))


def test_a_result_is_written_under_date_hardware_and_name_and_reads_back_the_same(tmp_path: Path) -> None:
    result = parse(content())
    path = write_result(result, tmp_path / "results")
    assert path.name == "2026-01-31-2-x-some-cpu-24-gib-no-gpu-speed.json"
    assert read_result(path) == result
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_written_file_carries_every_key_of_the_format(tmp_path: Path) -> None:
    tree = json.loads(write_result(parse(content()), tmp_path).read_text())
    assert tree.keys() >= KEYS
    assert all(one.keys() == FIGURE_KEYS for one in tree["figures"])


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_result_without_a_key_is_refused(key: str) -> None:
    tree = content()
    del tree[key]
    with pytest.raises(ValueError, match=key):
        parse(tree)


@pytest.mark.parametrize("key", sorted(FIGURE_KEYS))
def test_a_figure_without_a_key_is_refused(key: str) -> None:
    one = figure()
    del one[key]
    with pytest.raises(ValueError, match=key):
        parse(content(figures=[one]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "main"}, "commit"),
        ({"date": "31.1.2026"}, "date"),
        ({"figures": []}, "figures"),
        ({"figures": [figure(), figure()]}, "more than once: seconds"),
        ({"figures": [figure(value=4.0)]}, "4.0 lies outside its spread"),
        ({"figures": [figure(target="about 3")]}, "'about 3' cannot be read"),
        ({"figures": [figure(value="2.0")]}, "value"),
        ({"remark": "fast"}, "remark"),
    ],
)
def test_a_wrong_result_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(content(**changes))


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(0.8, "<= 0.8", True), (0.81, "<= 0.8", False), (0.8, "< 0.8", False), (0.4, ">= 0.4", True), (0.4, None, None)],
)
def test_a_target_is_met_or_missed(value: float, target: str | None, met: bool | None) -> None:
    one = Figure(name="a", value=value, unit="ratio", spread=None, against="b", target=target)
    assert one.met is met


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_result(parse(content()), tmp_path)
    moved = path.rename(tmp_path / "2026-01-31-mine.json")
    with pytest.raises(ValueError, match=f"belongs into {path.name}"):
        read_result(moved)


def test_the_commit_is_named_and_changes_of_measured_files_are_said(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "note.md").write_text("one\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path, ["*.py"]) == head
    (tmp_path / "note.md").write_text("two\n")
    assert commit(tmp_path, ["*.py"]) == head
    (tmp_path / "code.py").write_text("x = 2\n")
    assert commit(tmp_path, ["*.py"]) == f"{head}-dirty"


def test_outside_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results name the commit"):
        commit(tmp_path)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", "AMD EPYC (avx512_bf16)"),
        ("model name\t: AMD EPYC\nflags\t\t: fpu sse avx2\n", "AMD EPYC (avx2)"),
        ("model name\t: Old CPU\nflags\t\t: fpu sse\n", "Old CPU"),
    ],
)
def test_processors_of_one_name_with_other_instructions_have_other_names(about: str, expected: str) -> None:
    assert processor(about) == expected


def test_a_processor_without_a_name_is_called_by_its_architecture() -> None:
    assert processor("Features\t: fp asimd sve\n") == f"{platform.machine()} (sve)"


def test_this_machine_has_a_name_for_a_file() -> None:
    assert slug(hardware()).endswith("-gib-no-gpu")
    assert slug("  A (b)--C, 1.5 ") == "a-b-c-1-5"


def test_every_committed_result_is_complete() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    for path in paths:
        tree = json.loads(path.read_text(encoding="utf-8"))
        assert tree.keys() >= KEYS, path.name
        assert all(one.keys() == FIGURE_KEYS for one in tree["figures"]), path.name
    assert len(read_results()) == len(paths)

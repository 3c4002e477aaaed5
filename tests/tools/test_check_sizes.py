"""The length check must let allowed lengths pass and name what is one line too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_sizes import too_long


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function_of(lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("fourfold/a.py", 400),
        ("tests/a/test_b.py", 400),
        ("benchmarks/c.py", 400),
        ("fourfold/training/trainer.py", 200),
    ],
)
def test_a_file_may_have_so_many_lines_and_not_one_more(tmp_path: Path, name: str, allowed: int) -> None:
    write(tmp_path, name, "x = 1\n" * allowed)
    assert too_long(tmp_path) == []
    write(tmp_path, name, "x = 1\n" * (allowed + 1))
    (problem,) = too_long(tmp_path)
    assert problem.startswith(f"{name}:1: {allowed + 1} lines, allowed {allowed}")


def test_a_function_may_have_60_lines_and_not_one_more(tmp_path: Path) -> None:
    write(tmp_path, "fourfold/a.py", function_of(60))
    assert too_long(tmp_path) == []
    write(tmp_path, "fourfold/a.py", "\n" + function_of(61))
    (problem,) = too_long(tmp_path)
    assert problem.startswith("fourfold/a.py:2: long has 61 lines, allowed 60")


def test_nested_and_async_functions_and_methods_count(tmp_path: Path) -> None:
    body = "".join(f"        {line}\n" for line in ["x = 1"] * 60)
    write(tmp_path, "fourfold/a.py", f"class A:\n    async def long(self):\n{body}")
    (problem,) = too_long(tmp_path)
    assert "long has 61 lines" in problem

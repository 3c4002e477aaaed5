"""Fail on files and functions that have grown too long to be read at once: `python -m tools.check_sizes`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
# The loop is what a newcomer reads first.
SHORTER_FILES = {"fourfold/training/trainer.py": 200}
FOLDERS = ("fourfold", "tests", "benchmarks", "tools")
FOLDERS_WITH_FUNCTION_LIMIT = ("fourfold", "benchmarks", "tools")


def too_long(root: Path) -> list[str]:
    """Every file and function over its limit, as 'path:line: what, how long, what is allowed'."""
    found: list[str] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            lines, limit = len(text.splitlines()), SHORTER_FILES.get(name, FILE_LINES)
            if lines > limit:
                found.append(f"{name}:1: {lines} lines, allowed {limit}; split the file by what it is about")
            if folder in FOLDERS_WITH_FUNCTION_LIMIT:
                found.extend(f"{name}:{problem}" for problem in _long_functions(text, name))
    return found


def _long_functions(text: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text, filename=name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, allowed {FUNCTION_LINES}; split it into steps"


def main() -> int:
    """Print what is too long; 1 when there is anything."""
    found = too_long(Path(__file__).resolve().parent.parent)
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""What pytest collects here."""

from __future__ import annotations

from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out helpers and programs that tests start: --doctest-modules would import each of them as a test."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None

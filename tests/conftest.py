"""What pytest collects here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a CUDA device is skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out helpers and programs that tests start: --doctest-modules would import each of them as a test."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None

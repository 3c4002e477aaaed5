"""What pytest collects here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
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


def pytest_collection_finish() -> None:
    """See `_set_aside`."""
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Between two files, when what was made for the first one's tests is gone; see `_set_aside`."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _set_aside()


def _set_aside() -> None:
    """The collector leaves alone what is there now: modules, their caches, the tests.

    Runs with a budget, with an offloaded optimizer or with ONNX call gc.collect(), which went through all of it each
    time: 15 % of the seconds of test_levers.py's first half.
    """
    gc.collect()
    gc.freeze()

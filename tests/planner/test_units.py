"""Sizes read and written."""

from __future__ import annotations

import pytest

from fourfold.planner.units import parse_bytes, quantity, seconds, size


@pytest.mark.parametrize(
    ("text", "count"), [("40GiB", 40 * 2**30), ("80 GB", 80 * 10**9), ("1.5gib", 3 * 2**29), ("512MiB", 2**29)]
)
def test_sizes_are_read_with_their_unit(text: str, count: int) -> None:
    assert parse_bytes(text, "--budget") == count


@pytest.mark.parametrize("text", ["40", "GiB", "-1GiB", "0GiB", "40 apples", "1e3GB", "0.0001B", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--budget .*40GiB"):
        parse_bytes(text, "--budget")


def test_numbers_for_people() -> None:
    assert [size(n) for n in (2**20, 600 * 2**20, 3 * 2**29, 0)] == ["1.0 MiB", "600 MiB", "1.5 GiB", "0.0 MiB"]
    assert [seconds(n) for n in (0.0001, 0.5, 61.24, 300, 7200)] == ["0.1 ms", "0.5 s", "61.2 s", "5.0 min", "2.0 h"]
    assert [quantity(n) for n in (3.2e15, 1e9, 12)] == ["3.2 P", "1 G", "12 "]

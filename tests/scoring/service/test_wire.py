"""The JSON of a service: rows and numbers come back as they went."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.scoring.service import wire
from fourfold.scoring.service.wire import BadMessage, Rows
from tiny_roles import tiny_rollout

FLOATS = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0])


@given(st.lists(FLOATS.filter(lambda x: x == x and abs(x) != float("inf")), min_size=1, max_size=50))
def test_float32_numbers_come_back_as_the_same_bits(numbers: list[float]) -> None:
    """-0.0, subnormal and largest numbers among them; bits are read by struct, not by what is tested."""
    content = wire.encode({"scores": torch.tensor(numbers, dtype=torch.float32).tolist()})
    found = wire.float32(wire.decode(content)["scores"], len(numbers), "scores")
    assert struct.pack(f"<{len(numbers)}f", *found.tolist()) == struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"scores": [NaN]}', "NaN"),
        ('{"scores": [-Infinity]}', "-Infinity"),
        ('{"scores": [1e999]}', "not finite"),
        ('{"scores": [3.5e38]}', "not finite as float32"),
        ('{"scores": [1' + "0" * 400 + "]}", "not finite"),
        ('{"scores": [null]}', "None is no number"),
        ('{"scores": ["1"]}', "no number"),
        ('{"scores": [true]}', "no number"),
        ('{"scores": [1, 2]}', "1 numbers are wanted, given 2"),
        ('{"scores": 1}', "given int"),
        ("[1]", "a list, not an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_finite_number_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        wire.float32(wire.decode(text.encode())["scores"], 1, "scores")


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError):
        wire.encode({"scores": [float("nan")]})


def test_rows_are_padded_as_they_were() -> None:
    rollout = tiny_rollout([(3, 4), (6, 1), (1, 5)])
    rows = wire.rows_of(rollout)
    assert [len(row) for row in rows.prompts] == [3, 6, 1] and [len(row) for row in rows.responses] == [4, 1, 5]
    assert rows.prompts[0] + rows.responses[0] == rollout.sequences[0, 3:10].tolist()
    again = wire.rollout_of(rows, pad_id=int(rollout.sequences[0, 0]), device=torch.device("cpu"))
    for name in ("sequences", "prompt_mask", "response_mask"):
        assert torch.equal(getattr(again, name), getattr(rollout, name))
    assert wire.rollout_of(Rows([[]], [[5]]), 0, torch.device("cpu")).sequences.tolist() == [[0, 5]]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"prompts": [[1]], "responses": [[]]}, r"responses\[0\] is empty"),
        ({"prompts": [[1]], "responses": [[7]]}, r"responses\[0\] holds 7; allowed: token ids from 0 to 6"),
        ({"prompts": [[-1]], "responses": [[1]]}, r"prompts\[0\] holds -1"),
        ({"prompts": [[True]], "responses": [[1]]}, r"prompts\[0\] holds True"),
        ({"prompts": [[1.0]], "responses": [[1]]}, r"prompts\[0\] holds 1.0"),
        ({"prompts": [[1], [2]], "responses": [[1]]}, "2 prompts and 1 responses"),
        ({"prompts": [], "responses": []}, "prompts: allowed is a list of one or more lists of token ids"),
        ({"responses": [[1]]}, "prompts: allowed"),
        ({"prompts": ["a"], "responses": [[1]]}, "prompts: allowed"),
    ],
)
def test_bad_rows_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        wire.token_rows(message, vocabulary=7)

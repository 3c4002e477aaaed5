"""What travels: rows as lists of token ids, answers as JSON numbers.

A float32 goes into JSON as the shortest decimal of its double, and comes back as the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.batch import Rollout

# Both sides must speak the same; a change of the format changes it.
PROTOCOL = 1
LOG_PROBS, SCORES, DESCRIBE, HEALTH = "/v1/log_probs", "/v1/scores", "/v1/describe", "/health"
ROLE_PATHS = {"reference": LOG_PROBS, "reward": SCORES}
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class BadMessage(ValueError):
    """What came is not what was agreed on."""


@dataclass(frozen=True)
class Rows:
    """Prompts and responses without padding; a response holds the tokens that the policy chose, its EOS included."""

    prompts: list[list[int]]
    responses: list[list[int]]

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, piece: slice) -> Rows:
        return Rows(self.prompts[piece], self.responses[piece])


def rows_of(rollout: Rollout) -> Rows:
    """The rows of a rollout; which tokens are real says its masks."""
    ids, start = rollout.sequences.tolist(), rollout.prompt_length
    before, after = rollout.prompt_mask.sum(dim=1).tolist(), rollout.lengths.tolist()
    return Rows(
        [row[start - length : start] for row, length in zip(ids, before, strict=True)],
        [row[start : start + length] for row, length in zip(ids, after, strict=True)],
    )


def rollout_of(rows: Rows, pad_id: int, device: torch.device) -> Rollout:
    """The same rows, padded as the data contract says; what a sampler would know about them is 0."""
    return Rollout.of_tokens(rows.prompts, rows.responses, pad_id).to(device)


def encode(message: dict[str, Any]) -> bytes:
    """JSON without NaN and infinities, which JSON has no words for."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode()


def decode(content: bytes) -> dict[str, Any]:
    """The object in a JSON text; BadMessage where it is none."""

    def refuse(word: str) -> float:
        raise BadMessage(f"it holds {word}, which is no JSON number")

    try:
        message = json.loads(content, parse_constant=refuse)
    except BadMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"it is not JSON ({error})") from error
    if not isinstance(message, dict):
        raise BadMessage(f"it is a {type(message).__name__}, not an object")
    return message


def float32(numbers: Any, count: int, what: str) -> Tensor:
    """`count` finite float32 numbers from JSON."""
    if not isinstance(numbers, list) or len(numbers) != count:
        given = f"{len(numbers)}" if isinstance(numbers, list) else type(numbers).__name__
        raise BadMessage(f"{what}: {count} numbers are wanted, given {given}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise BadMessage(f"{what}: {number!r} is no number")
        if not abs(number) <= FLOAT32_MAX:  # NaN too, and integers beyond every float
            raise BadMessage(f"{what}: {number!r} is not finite as float32")
    return torch.tensor(numbers, dtype=torch.float32)


def scores_or_none(numbers: Any, count: int) -> list[float | None]:
    """`count` scores from JSON, null or a number beyond float32 where a row has none."""
    if not isinstance(numbers, list) or len(numbers) != count:
        given = f"{len(numbers)}" if isinstance(numbers, list) else type(numbers).__name__
        raise BadMessage(f"scores: {count} numbers are wanted, given {given}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float, type(None))):
            raise BadMessage(f"scores: {number!r} is neither a number nor null")
    return [None if number is None or not abs(number) <= FLOAT32_MAX else float(number) for number in numbers]


def token_rows(message: dict[str, Any], vocabulary: int) -> Rows:
    """The rows of a request."""
    prompts, responses = _lists(message, list)
    for name, rows in (("prompts", prompts), ("responses", responses)):
        for number, row in enumerate(rows):
            bad = [i for i in row if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocabulary]
            if bad:
                raise BadMessage(f"{name}[{number}] holds {bad[0]!r}; allowed: token ids from 0 to {vocabulary - 1}")
    if empty := [number for number, row in enumerate(responses) if not row]:
        raise BadMessage(f"responses[{empty[0]}] is empty; allowed: one token or more")
    return Rows(prompts, responses)


def text_rows(message: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Prompts and responses of a request that are texts."""
    return _lists(message, str)


def is_text(message: dict[str, Any]) -> bool:
    """Whether the rows of a request are texts."""
    responses = message.get("responses")
    return isinstance(responses, list) and bool(responses) and isinstance(responses[0], str)


def _lists(message: dict[str, Any], kind: type) -> tuple[list[Any], list[Any]]:
    found: list[list[Any]] = []
    for name in ("prompts", "responses"):
        rows = message.get(name)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, kind) for row in rows):
            what = "texts" if kind is str else "lists of token ids"
            raise BadMessage(f"{name}: allowed is a list of one or more {what}")
        found.append(rows)
    if len(found[0]) != len(found[1]):
        raise BadMessage(f"{len(found[0])} prompts and {len(found[1])} responses; allowed: as many of each")
    return found[0], found[1]


def positive(message: dict[str, Any], name: str, default: float, kind: type[int] | type[float]) -> float:
    """A number above 0 of a request, or the default where it is not there."""
    value = message.get(name, default)
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not 0 < value <= FLOAT32_MAX:
        raise BadMessage(f"{name}: given {value!r}; allowed: {'an integer' if kind is int else 'a number'} above 0")
    return value


def refuse_unknown_keys(message: Collection[str], known: Collection[str]) -> None:
    """Refuse what nothing would read."""
    if surplus := sorted(set(message) - set(known)):
        raise BadMessage(f"unknown key {surplus[0]!r}; allowed: {', '.join(known)}")

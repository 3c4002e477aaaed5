"""Texts, preference pairs and prompts out of rows; every bad row is counted and reported before anything trains."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fourfold.config.schema import DatasetSection
from fourfold.data.sources import BadRow, BadRowsError, Row, Table, kind, read_table

__all__ = [
    "BadRow", "BadRowsError", "Content", "Message", "PairRecord", "PromptRecord", "TextRecord",
    "read_pairs", "read_prompts", "read_texts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


# A plain text, or the turns of a conversation that the chat template writes out.
Content = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text to learn from as it stands."""

    text: Content


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What a response is sampled for."""

    prompt: Content


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Two answers to one prompt, the first preferred: three texts, or three lists of messages, never a mixture."""

    prompt: Content
    chosen: Content
    rejected: Content


Record = TypeVar("Record", TextRecord, PromptRecord, PairRecord)
Columns = Mapping[str, str]


def read_texts(section: DatasetSection) -> list[TextRecord]:
    """Texts from a column `text` or `messages`."""
    return _read(section, (("text", "messages"),), _text_record)


def read_prompts(section: DatasetSection) -> list[PromptRecord]:
    """Prompts from a column `prompt` or `messages`."""
    return _read(section, (("prompt", "messages"),), _prompt_record)


def read_pairs(section: DatasetSection) -> list[PairRecord]:
    """Pairs from columns `prompt` (or `messages`), `chosen` and `rejected`; answers may repeat the prompt."""
    return _read(section, (("prompt", "messages"), ("chosen",), ("rejected",)), _pair_record)


def _read(
    section: DatasetSection, wanted: tuple[tuple[str, ...], ...], make: Callable[[Row, Columns], Record]
) -> list[Record]:
    _refuse_unknown_keys(section, [key for keys in wanted for key in keys])
    table = read_table(section)
    if len(table.unreadable) == len(table.rows):
        raise BadRowsError(table, table.unreadable)
    columns = {keys[0]: _choose_column(section, table, keys) for keys in wanted}
    records, bad = [], []
    for row in table.rows:
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            records.append(make(row, columns))
        except ValueError as error:
            bad.append(BadRow(row.number, str(error)))
    if bad:
        raise BadRowsError(table, bad)
    return records


def _refuse_unknown_keys(section: DatasetSection, allowed: list[str]) -> None:
    for key in section.columns:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{section.path}: columns names {key!r}, which is not read here; {hint}allowed on the left: "
                f"{', '.join(allowed)} (on the right stands the name in the file)"
            )


def _choose_column(section: DatasetSection, table: Table, keys: tuple[str, ...]) -> str:
    """The column that holds one of `keys`: the mapped one, else the one of that name."""
    there = f"columns: {', '.join(table.columns) or 'none'}"
    mapped = [key for key in keys if key in section.columns]
    if len(mapped) > 1:
        raise ValueError(f"{section.path}: columns names both {' and '.join(mapped)}, and one is read; leave one out")
    if mapped:
        column = section.columns[mapped[0]]
        if column not in table.columns:
            near = difflib.get_close_matches(column, table.columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{table.name}: no column {column!r}, which columns.{mapped[0]} names; {there}{hint}")
        return column
    found = [key for key in keys if key in table.columns]
    if not found:
        raise ValueError(
            f"{table.name}: no column {' or '.join(map(repr, keys))}; {there}; "
            f"name the right one, such as columns = {{ {keys[0]} = {(table.columns or ('...',))[0]!r} }}"
        )
    if len(found) > 1:
        raise ValueError(
            f"{table.name}: holds {' and '.join(map(repr, found))}, and one is read; "
            f"say which, such as columns = {{ {found[0]} = {found[0]!r} }}"
        )
    return found[0]


def _text_record(row: Row, columns: Columns) -> TextRecord:
    return TextRecord(_content(row, columns["text"]))


def _prompt_record(row: Row, columns: Columns) -> PromptRecord:
    return PromptRecord(_prompt(row, columns))


def _pair_record(row: Row, columns: Columns) -> PairRecord:
    prompt = _prompt(row, columns)
    chosen, rejected = (_content(row, columns[key]) for key in ("chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)):
        if isinstance(prompt, str):
            prompt = (Message("user", prompt),)
        chosen = _answer(prompt, chosen, columns["chosen"])
        rejected = _answer(prompt, rejected, columns["rejected"])
    if chosen == rejected:
        raise ValueError(f"{columns['chosen']!r} and {columns['rejected']!r} are the same: nothing is preferred")
    return PairRecord(prompt, chosen, rejected)


def _prompt(row: Row, columns: Columns) -> Content:
    prompt = _content(row, columns["prompt"])
    if not isinstance(prompt, str) and prompt[-1].role == "assistant":
        raise ValueError(
            f"{columns['prompt']!r} ends with the role 'assistant', so there is nothing to answer; "
            "leave that message out of prompts"
        )
    return prompt


def _answer(prompt: tuple[Message, ...], answer: Content, column: str) -> tuple[Message, ...]:
    """The answer's own messages: many data sets repeat the prompt in front of each answer."""
    if isinstance(answer, str):
        return (Message("assistant", answer),)
    if answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]
        if not answer:
            raise ValueError(f"{column!r} repeats the prompt and holds no answer")
    if answer[0].role != "assistant":
        raise ValueError(
            f"{column!r} begins with the role {answer[0].role!r}; "
            "allowed: 'assistant', or the prompt's own messages first"
        )
    return answer


def _content(row: Row, column: str) -> Content:
    if column not in row.values:
        raise ValueError(f"no column {column!r}; this row has {', '.join(map(repr, row.values)) or 'none'}")
    value = row.values[column]
    if isinstance(value, str):
        return _text(value, repr(column))
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{column!r} is an empty list of messages")
        return tuple(_message(message, f"{column!r}, message {i}") for i, message in enumerate(value, start=1))
    raise ValueError(f"{column!r} is {kind(value)}; allowed: a text, or a list of messages with role and content")


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {kind(value)}; allowed: an object with role and content")
    for key in ("role", "content"):
        if not isinstance(value.get(key), str):
            given = kind(value[key]) if key in value else "missing"
            raise ValueError(f"{place}: {key!r} is {given}; allowed: a text")
    # Columnar files fill the keys of other rows with nulls; anything else would be left out of the text in silence.
    unused = [key for key, item in value.items() if key not in ("role", "content") and item is not None]
    if unused:
        raise ValueError(f"{place}: {', '.join(map(repr, unused))} would be ignored; allowed: role and content")
    role = _text(value["role"], f"{place}: 'role'")
    if role == "system" and not value["content"]:  # data sets write "no system prompt" so
        return Message(role, "")
    return Message(role, _text(value["content"], f"{place}: 'content'"))


def _text(value: str, place: str) -> str:
    if not value.strip():
        raise ValueError(f"{place} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} holds what is not UTF-8, at character {error.start + 1}") from None
    return value

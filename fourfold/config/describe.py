"""The settings as a list: key, what is allowed, default and meaning, read off the schema.

Error messages, `fourfold init` and docs/configuration.md are made from this list, so they cannot disagree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fourfold.config.schema import RunConfig

# Stands in keys for a name that the user chooses, as in [reward.parts.NAME].
NAME = "NAME"


@dataclass(frozen=True)
class Setting:
    """One key of a configuration: `default` is None with `required` False where nothing is given by default."""

    key: str
    allowed: str
    required: bool
    default: Any
    description: str

    @property
    def name(self) -> str:
        """The key inside its table."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class Table:
    """One table and the keys in it; an `optional` table is absent unless it is given."""

    key: str
    optional: bool
    description: str
    settings: tuple[Setting, ...]


def tables(
    model: type[BaseModel] = RunConfig, key: str = "", optional: bool = False, text: str = ""
) -> Iterator[Table]:
    """Every table of the schema in its order, the top level (key '') first."""
    inner: list[Table] = []
    settings: list[Setting] = []
    for name, field in model.model_fields.items():
        dotted = f"{key}.{name}" if key else name
        section = section_of(field.annotation)
        if section is not None:
            named = get_origin(field.annotation) is dict
            absent = named or NoneType in get_args(field.annotation)
            inner += tables(section, f"{dotted}.{NAME}" if named else dotted, absent, field.description or "")
        else:
            settings.append(_setting(dotted, field))
    yield Table(key, optional, text, tuple(settings))
    yield from inner


def _setting(key: str, field: FieldInfo) -> Setting:
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    return Setting(
        key=key,
        allowed=describe_type(field.annotation, field.metadata),
        required=field.is_required(),
        default=None if default is PydanticUndefined else default,
        description=field.description or "",
    )


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its full dotted key."""
    return {setting.key: setting for table in tables() for setting in table.settings}


def described(key: str) -> str:
    """The key under which a setting is described: what the user has named is NAME there."""
    found: list[str] = []
    for part in key.split("."):
        found.append(NAME if ".".join(found) in _named_by_users() else part)
    return ".".join(found)


@functools.cache
def _named_by_users() -> frozenset[str]:
    """Keys of the tables whose tables have names of the user's."""
    return frozenset(table.key.removesuffix(f".{NAME}") for table in tables() if table.key.endswith(f".{NAME}"))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation (`Section`, `Section | None`, dict of sections) names, or None for a value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a value may be, in words: 'integer > 0', "'a' or 'b'", 'list of text'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [limit for m in arguments[1:] for limit in (m.metadata if isinstance(m, FieldInfo) else [m])]
        return describe_type(arguments[0], [*inner, *metadata])
    if origin in (Union, UnionType):
        return _join([describe_type(a, metadata) for a in arguments if a is not NoneType])
    if origin is Literal:
        return _join([repr(a) for a in arguments])
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {describe_type(arguments[0])}"
        return f"list of {len(arguments)}: {', '.join(describe_type(a) for a in arguments)}"
    if origin is dict:
        return f"table of {describe_type(arguments[1])}"
    kinds = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "anything"}
    return kinds[annotation] + _range(metadata)


def _range(metadata: Sequence[Any]) -> str:
    limits = []
    for limit in metadata:
        if isinstance(limit, Gt):
            limits.append(f"> {limit.gt}")
        elif isinstance(limit, Ge):
            limits.append(f">= {limit.ge}")
        elif isinstance(limit, Lt):
            limits.append(f"< {limit.lt}")
        elif isinstance(limit, Le):
            limits.append(f"<= {limit.le}")
    return f" {' and '.join(limits)}" if limits else ""


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

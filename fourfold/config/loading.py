"""From a TOML file and overrides to a checked `RunConfig`, and back to TOML."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fourfold.config.checks import ignored_keys, is_given
from fourfold.config.describe import all_settings, described, tables
from fourfold.config.paths import missing_packages, missing_paths
from fourfold.config.schema import RunConfig

# The key of a file, not of a run: the saved configuration holds what came of it.
EXTENDS = "extends"
# The settings of a run, resolved, in its folder.
CONFIG = "config.toml"


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds every reason, one a line."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


class Contradiction(ConfigError):
    """Settings that are each allowed, but not beside each other."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a configuration; `overrides` are 'ppo.kl_coef=0.1' and come last. Files are not looked at."""
    tree = read_extended(Path(path))
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, source=str(path))


def saved_config(root: Path) -> RunConfig:
    """The settings of the run in a folder."""
    path = root / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{str(root)!r} is not the folder of a run: it has no {CONFIG}; give the `output` of a configuration"
        )
    return load_config(path)


def read_extended(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file on top of those of the file that its `extends` names, relative to its own folder."""
    tree = read_toml(path)
    if EXTENDS not in tree:
        return tree
    named = tree.pop(EXTENDS)
    if not isinstance(named, str) or not named:
        raise ConfigError(
            str(path),
            [f"extends: given {_shown(named)}; allowed: the path of another file, seen from this one's folder"],
        )
    chain = (*below, path.resolve())
    other = path.parent / named
    if other.resolve() in chain:
        raise ConfigError(str(path), [f"extends: {named!r} comes back to itself; allowed: files in a line"])
    if not other.is_file():
        raise ConfigError(
            str(path), [f"extends: no file {str(other)!r}; its path is seen from the folder of {path.name}"]
        )
    return _on_top(read_extended(other, chain), tree)


def _on_top(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `changes` put in, table by table."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _on_top(result[key], value) if both else value
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a file that is missing or not TOML is a `ConfigError` that names the line."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(str(path), ["no such file; `fourfold init` writes one to start from"]) from None
    except IsADirectoryError:
        own = f", such as {path / CONFIG}" if (path / CONFIG).is_file() else ""
        raise ConfigError(str(path), [f"a folder; allowed: a TOML file of settings{own}"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"byte {error.start} is not UTF-8; save the file as UTF-8"]) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"not valid TOML: {error}{_line_shown(text, str(error))}"]) from error


def _line_shown(text: str, message: str) -> str:
    found = re.search(r"at line (\d+)", message)
    lines = text.split("\n")
    return f": {lines[int(found[1]) - 1].strip()}" if found and int(found[1]) <= len(lines) else ""


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Put one 'a.b=value' into the tables; the value is read as TOML, and as plain text where it is not TOML."""
    key, equals, raw = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}", ["allowed: KEY=VALUE with a dotted key, such as ppo.kl_coef=0.1"])
    table = tree
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}", [f"{'.'.join(parts[:depth])} is {table!r}, not a table"])
    table[parts[-1]] = _override_value(raw.strip())


def _override_value(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def parse_config(tree: Mapping[str, Any], source: str) -> RunConfig:
    """Validate tables as strict JSON would be ("4" is not 4), listing everything that is wrong."""
    found = list(_not_json(tree, ""))
    try:
        config = RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        if not found and {details["type"] for details in error.errors(include_url=False)} == {"value_error"}:
            raise Contradiction(source, _problems(error)) from None
        known = {problem.partition(":")[0] for problem in found}
        found += [p for p in _problems(error) if p.partition(":")[0] not in known]
        raise ConfigError(source, found) from None
    if found:
        raise ConfigError(source, found)
    return config


def _not_json(value: Any, key: str) -> Iterator[str]:
    """TOML values that no setting takes: dates, nan and inf; JSON has no word for them, so pydantic never sees them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _not_json(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: given {value}; allowed: finite numbers only"
    elif not isinstance(value, str | int | float | bool):
        yield (
            f"{key}: given the {type(value).__name__} {value}; no setting is a date or time; a text stands "
            "between quotes"
        )


def _problems(error: ValidationError) -> list[str]:
    """One line for each thing wrong, by full dotted key; the branches of a union make one line."""
    settings = all_settings()
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key = _setting_key(details["loc"])
        known = described(key)
        if details["type"] == "value_error":
            for number, line in enumerate(details["msg"].removeprefix("Value error, ").splitlines()):
                lines[f"{key}#{number}"] = f"{key}: {line}" if key else line
        elif details["type"] == "missing" and isinstance(details["loc"][-1], str):
            what = settings[known].allowed if known in settings else "a table"
            lines[key] = f"{key}: not given, and there is no default; allowed: {what}"
        elif details["type"] == "extra_forbidden":
            lines[key] = f"{key}: unknown key (given {_shown(details['input'])}); {_nearest(key)}"
        elif known in settings:
            lines.setdefault(key, f"{key}: given {_given(details)}; allowed: {settings[known].allowed}")
        elif details["type"] == "model_type":
            keys = [k.rpartition(".")[2] for k in settings if k.rpartition(".")[0] == known]
            lines[key] = f"{key}: given {_given(details)}; allowed: a table with the keys {', '.join(keys)}"
        else:
            lines[key] = f"{key}: given {_given(details)}; {details['msg']}"
    return list(lines.values())


def _setting_key(location: tuple[int | str, ...]) -> str:
    """The setting that a pydantic location lies in: list indexes and union branches are left off."""
    settings = all_settings()
    parts = [str(part) for part in location]
    for end in range(1, len(parts)):
        if described(".".join(parts[:end])) in settings:
            return ".".join(parts[:end])
    return ".".join(parts)


def _given(details: ErrorDetails) -> str:
    inside = [part for part in details["loc"] if isinstance(part, int) and details["type"] != "missing"]
    where = f" at place {inside[0] + 1} of the list" if inside else ""
    return _shown(details["input"]) + where


def _shown(value: Any) -> str:
    """A value with its TOML type, so that \"4\" and 4 can be told apart."""
    kinds = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "table"}
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kinds.get(type(value), type(value).__name__)})"


def _nearest(key: str) -> str:
    """The known key that an unknown one was most likely meant to be: in the same table first, then anywhere."""
    table, _, name = key.rpartition(".")
    prefix = f"{table}." if table else ""
    general = described(prefix)
    known = [prefix + k.removeprefix(general) if k.startswith(general) else k for k in all_settings()]
    known += [t.key for t in tables() if t.key]
    siblings = {k.removeprefix(prefix): k for k in known if k.startswith(prefix) and "." not in k.removeprefix(prefix)}
    anywhere = {k.rpartition(".")[2]: k for k in known}
    for candidates in (siblings, anywhere):
        found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
        if found:
            return f"nearest known key: {candidates[found[0]]}"
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    return f"nearest known key: {nearest}; known here: {', '.join(siblings)}"


def given_settings(config: RunConfig) -> dict[str, Any]:
    """The tables of what was written down, without the defaults: `parse_config` makes the same settings of them."""
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The settings with these put in, by dotted key, as if they stood in the file; None takes a key out.

    Raises `Contradiction` where they are refused beside the others.
    """
    tree = given_settings(config)
    for key, value in settings.items():
        *path, name = key.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    return parse_config(tree, source=", ".join(settings))


def check_paths(config: RunConfig) -> None:
    """Refuse data files, models and folders that are not there, before anything is loaded; all are listed."""
    found = missing_paths(config)
    if found:
        raise ConfigError("paths in the configuration", found)


def check_packages(config: RunConfig) -> None:
    """Refuse settings that need a Python package which is not installed."""
    found = missing_packages(config)
    if found:
        raise ConfigError("packages that the configuration needs", found)


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration with its defaults; it loads to an equal one. What nothing reads is left out."""
    ignored = set(ignored_keys(config))
    if "sft" not in config.stages and not is_given(config, "reward.init"):
        ignored.add("reward.init")  # written down, "sft" would be refused where there is none
    tree = _without(config.model_dump(mode="json"), "", ignored)
    return tomli_w.dumps(tree)


def _without(tree: Mapping[str, Any], prefix: str, ignored: set[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if value is None or key in ignored:
            continue
        kept[name] = _without(value, f"{key}.", ignored) if isinstance(value, Mapping) else value
    return {name: value for name, value in kept.items() if value != {}}

"""What a search may choose between: options of levers that the user has left free, as settings that a run accepts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from fourfold.config.checks import is_given
from fourfold.config.checks.memory import needs_cuda
from fourfold.config.checks.precision import precision
from fourfold.config.loading import Contradiction, with_settings
from fourfold.config.schema import RunConfig
from fourfold.planner.lever import Lever
from fourfold.planner.levers import LEVERS
from fourfold.planner.scene import WIDTHS, Scene


@dataclass(frozen=True)
class Option:
    """A lever with the settings that switch it on; one that takes a part of rows or layers has one for each part."""

    lever: Lever
    settings: Mapping[str, Any]
    halvings: int = 0  # of the rows that are taken at a time, of the layers that it acts on

    def __hash__(self) -> int:
        return hash((self.lever.name, self.halvings))

    def beside(self, other: Option) -> bool:
        """Whether the two are no contradiction by what the levers declare."""
        apart = self.settings.keys().isdisjoint(other.settings)
        return apart and other.lever.name not in self.lever.excludes

    def is_on(self, config: RunConfig) -> bool:
        """Whether the settings have it already."""
        return all(value_of(config, key) == value for key, value in self.settings.items())


# Options of which at most one is taken: levers that set the same keys, or halve the same rows.
Dimension = tuple[Option, ...]


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def lever_keys() -> list[str]:
    """Every key that a plan may set."""
    levers = [lever for lever in LEVERS if not lever.not_planned]
    keys = [key for lever in levers for key in (*lever.switches, *(lever.halves or ())[:1], lever.every) if key]
    return list(dict.fromkeys(keys))


def allowed_keys(allowed: Iterable[str]) -> list[str]:
    """The keys that a plan may set by these names: of keys, or of tables for all that it may set in them."""
    keys, found = lever_keys(), list[str]()
    for name in allowed:
        meant = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not meant:
            raise ValueError(f"--allow {name}: a plan sets no such key; allowed: {', '.join(keys)}, or their tables")
        found += meant
    return found


def without(config: RunConfig, keys: Iterable[str]) -> RunConfig:
    """The settings without these keys, where they are given; rows at a time become all of them."""
    settings: dict[str, Any] = {key: None for key in keys if is_given(config, key)}
    for lever in LEVERS:
        if lever.halves and lever.halves[0] in settings and not lever.switches:
            settings[lever.halves[0]] = value_of(config, lever.halves[1])
    return with_settings(config, settings) if settings else config


def dimensions(scene: Scene, fixed: AbstractSet[str], levers: Iterable[Lever]) -> list[Dimension]:
    """The options that the user has left free, by the first key that they set, in each the one that saves most last.

    None are those that are on already, and those that are refused even alone.
    """
    groups: dict[object, list[Option]] = {}
    for lever in levers:
        for option in _options(lever, scene.config):
            open_to_choice = fixed.isdisjoint(option.settings) and not _changes_nothing(option, scene)
            if open_to_choice and with_options(scene, [option]) is not None:
                groups.setdefault(lever.halves or next(iter(option.settings)), []).append(option)
    return [tuple(options) for options in groups.values()]


def _options(lever: Lever, config: RunConfig) -> Iterator[Option]:
    if lever.halves is None:
        if lever.every:
            yield Option(lever, {**lever.switches, lever.every: 2}, 1)
        yield Option(lever, lever.switches)
        return
    key, whole = lever.halves
    rows, halvings = int(value_of(config, whole)), 0
    if value_of(config, key) and not lever.switches:  # 0 means all of them already
        yield Option(lever, {key: rows})
    while rows > 1:
        rows, halvings = (rows // 2 if rows % 2 == 0 else 1), halvings + 1
        yield Option(lever, {**lever.switches, key: rows}, halvings)


def _changes_nothing(option: Option, scene: Scene) -> bool:
    computes = option.settings.get("precision.compute", "")
    same = computes in WIDTHS and WIDTHS[computes] == WIDTHS[scene.compute]  # bfloat16 where float16 would save as much
    return option.is_on(scene.config) or same


def with_options(scene: Scene, options: Iterable[Option]) -> Scene | None:
    """The scene with these options; None where its settings would be refused, by themselves or on this hardware."""
    settings = {key: value for option in options for key, value in option.settings.items()}
    try:
        config = with_settings(scene.config, settings) if settings else scene.config
    except Contradiction:
        return None
    changed = replace(scene, config=config)
    resolved = config.model_copy(update={"precision": config.precision.model_copy(update={"compute": changed.compute})})
    refused = any(precision(resolved)) or (scene.on_cpu and any(needs_cuda(config)))
    return None if refused else changed

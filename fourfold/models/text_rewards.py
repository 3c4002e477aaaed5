"""Reward models of other families, as the settings want them: the run's only one, or those of a combined reward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fourfold.config.checks import roles_at_a_service
from fourfold.config.schema import ClassifierSection, RunConfig
from fourfold.memory.budget import Budget
from fourfold.models.external import External, check_external, load_external, placed, weight_bytes
from fourfold.models.onnx import run_by_onnx
from fourfold.models.residency import HostResidency
from fourfold.models.room import Room


def check_text_rewards(config: RunConfig) -> None:
    """ValueError where the settings ask of a reward model of another family what it cannot do. No weights are read.

    Those at a service are the service's.
    """
    if config.reward.source == "model" and "reward" not in roles_at_a_service(config):
        check_external(config)
    for key, others in _held(config):
        with _named(key, others):
            check_external(config.with_reward(key), others)


def text_reward(config: RunConfig, room: Room, others: Mapping[str, ClassifierSection] | None = None) -> External:
    """A reward model of another family, run by the engine of the settings."""
    with room.role("reward", weight_bytes(config.reward.model)):
        return external_reward(config, room.budget, others)


def classifiers_of(config: RunConfig, room: Room) -> dict[str, External]:
    """Those of a combined reward, each loaded as if it were the run's only reward model.

    Parts that differ in label alone have one: it stands under the key of the first.
    """
    found: dict[str, External] = {}
    for key, others in _held(config):
        with _named(key, others):
            found[key] = text_reward(config.with_reward(key), room, others)
    return found


def external_reward(
    config: RunConfig, budget: Budget, others: Mapping[str, ClassifierSection] | None = None
) -> External:
    """`reward.model`, where the settings want it; `others` read its logits by labels of their own."""
    external = load_external(config, budget, others)
    if config.reward.engine != "torch":
        run_by_onnx(external, Path(config.model.cache).expanduser(), config.reward.engine, budget)
    elif placed(config)[0].type != budget.device.type:
        external.residency = HostResidency()
    return external


def _held(config: RunConfig) -> Iterator[tuple[str, dict[str, ClassifierSection]]]:
    """The key of each classifier of a combined reward, and the parts that read its logits otherwise."""
    for key, keys in config.reward.held_classifiers.items() if config.reward.source == "combined" else ():
        yield key, {other: config.reward.classifiers[other] for other in keys[1:]}


@contextlib.contextmanager
def _named(key: str, others: Mapping[str, ClassifierSection]) -> Iterator[None]:
    """Within, an error that names none of the others' keys is told as one of `key`."""
    try:
        yield
    except ValueError as error:
        if any(str(error).startswith(f"{other}.") for other in others):
            raise
        raise ValueError(f"{key}: {error}") from error

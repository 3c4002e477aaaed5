"""Every declared lever, and every pair, on one whole step of PPO: bit-equal, within its bound, or refused."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import ConfigError
from fourfold.planner.levers import LEVERS, Lever, lever
from training.runs import (
    by_function,
    by_model,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    weights_of,
)

SHARING = {each.name for each in LEVERS if each.change == "other parameters"}
MECHANISMS = [each for each in LEVERS if each.change != "other parameters"]
PAIRS = list(itertools.combinations(LEVERS, 2))
# Settings that a lever cannot stand beside without being the same setting.
Weights = dict[str, torch.Tensor]


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def tree_with(folder: Path, levers: Iterable[Lever], compared: Iterable[Lever]) -> dict[str, Any]:
    """A tiny run of one PPO step with `levers`, on the baselines that the `compared` ones need."""
    given: dict[str, Any] = {}
    for each in compared:
        given |= each.baseline if each in MECHANISMS else {}
    for each in levers:
        given |= each.settings
    tree = settings(folder, by_function("pays_by_hash", entropy_coef=0.01, steps=1))
    mode = given.get("sharing.mode", "trunk")
    if mode != "trunk":
        tree = merged(tree, {"trunk": None})
    if mode == "adapters":
        tree = merged(tree, {"adapters": {"rank": 4, "alpha": 8.0}})
    if any({"reward.residency", "precision.reward"} & each.settings.keys() for each in compared):
        shared = {key: value for key, value in given.items() if key.startswith(("sharing", "adapters"))}
        stored = by_model(merged(tree, nested(shared)), folder / "reward")
        tree = merged(tree, {"reward": stored["reward"] | {"function": None}})
    return merged(tree, nested(given))


def moved(folder: Path, levers: Iterable[Lever], compared: Iterable[Lever]) -> tuple[Weights, Weights]:
    """Actor and critic before and after one step, as one mapping each."""
    trainer = make_trainer(make_config(tree_with(folder, levers, compared)))
    give_value_head(trainer.models)
    roles = {"actor": trainer.models.actor, "critic": trainer.models.critic}
    before = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
    trainer.step()
    after = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
    return before, after


def difference(base: tuple[Weights, Weights], other: tuple[Weights, Weights]) -> float:
    """|difference of the moves| / |move|, over all weights."""
    gap = move = 0.0
    for name, before in base[0].items():
        ours, theirs = base[1][name] - before, other[1][name] - other[0][name]
        gap += float((ours - theirs).double().square().sum())
        move += float(ours.double().square().sum())
    assert move > 0
    return (gap / move) ** 0.5


def check(folder: Path, without: list[Lever], having: list[Lever]) -> None:
    """`having` is `without` and mechanisms: exact ones change no bit, bounded ones no more than their bounds."""
    base, other = moved(folder, without, having), moved(folder, having, having)
    added = [each for each in having if each not in without]
    if all(each.change == "exact" for each in added):
        for a, b in zip(base, other, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    else:
        assert difference(base, other) <= sum(each.bound for each in added)


@pytest.mark.parametrize("each", MECHANISMS, ids=lambda each: each.name)
def test_a_lever_changes_what_it_declares(tmp_path: Path, each: Lever) -> None:
    check(tmp_path, [], [each])


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda each: each.name)
def test_a_pair_changes_what_both_declare_or_is_refused(tmp_path: Path, one: Lever, other: Lever) -> None:
    if other.name in one.excludes:
        assert one.name in other.excludes
        same = one.settings.keys() & other.settings.keys()
        if not same:
            with pytest.raises(ConfigError):
                make_config(tree_with(tmp_path, [one, other], [one, other]))
        return
    check(tmp_path, [each for each in (one, other) if each.name in SHARING], [one, other])


def test_levers_are_declared_once_and_lie_where_they_say() -> None:
    names = [each.name for each in LEVERS]
    assert len(names) == len(set(names))
    for each in LEVERS:
        importlib.import_module(each.where)
        assert (each.change == "bounded") == (each.bound > 0)
        for name in each.excludes:
            assert each.name in lever(name).excludes

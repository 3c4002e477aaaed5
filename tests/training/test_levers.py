"""Every declared lever and every pair, on whole steps of PPO: bit-equal, within its bound, or refused.

A run for each pair would grow with the square of the list. Exact levers promise that no bit of the update changes,
whatever else is on, so they are tried many at a time: `together` makes sets of levers in which every pair occurs that
is not refused, and a set is held to all that its members promise:

* the run with all of the set is bit for bit the run with only those that are not exact (at most two);
* that run lies within the sum of their bounds of the run without them (levers that train other parameters stay), where
  nothing but these levers says what the runs stand on: a bound for float32 is none for bfloat16. Both learn from the
  responses of the run without them. Where weights are held in fewer bits, it is the run of the same rounded weights in
  float32 that has to be so near, and that one within the sum of `rounding` of the run of the weights as they were.

A set proves a pair only on the pair's own baseline: nothing is in the set that asks for other settings beside it, and
nothing inexact but the pair itself. So a set is one choice of baseline and of inexact levers, and as many exact ones as
allow each other. When a set fails, `culprits` finds the lever or the pair. Runs with the same settings are made once
in a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.replay import Replay
from fourfold.config import ConfigError
from fourfold.memory.quantization import dequantize
from fourfold.models.assembly import FourModels
from fourfold.planner.lever import ORDER_OF_SUMS, Lever
from fourfold.planner.levers import LEVERS, lever
from tiny import tiny_classifier
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
from training.served import at_service, hosted_roles, listening

SHARING = {each.name for each in LEVERS if each.change == "other parameters"}
# Without those whose package is not installed.
INSTALLED = [each for each in LEVERS if not each.package or importlib.util.find_spec(each.package)]
MECHANISMS = [each for each in INSTALLED if each.change != "other parameters"]
ALONE = [pytest.param(each, id=each.name, marks=pytest.mark.gpu if each.only_on else ()) for each in MECHANISMS]
EXACT = [each for each in MECHANISMS if each.change == "exact" and not each.only_on]
# What runs on a GPU only is tried alone there.
HERE = [each for each in INSTALLED if not each.only_on]
PAIRS = list(itertools.combinations(HERE, 2))
# Settings are refused on any machine.
EXCLUDED = [(one, other) for one, other in itertools.combinations(LEVERS, 2) if other.name in one.excludes]
# What the folder of runs on a GPU is called, of levers that need none.
ON_CUDA = "cuda"
Weights = dict[str, torch.Tensor]
Set = tuple[Lever, ...]


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def baseline(levers: Iterable[Lever]) -> dict[str, Any]:
    """The settings that the comparisons of all these levers stand on."""
    given: dict[str, Any] = {}
    for each in levers:
        given |= each.baseline if each.change != "other parameters" else {}
    return given


def inexact(levers: Iterable[Lever]) -> list[Lever]:
    """Those that change the update, or what is trained; and those that do so over a trunk."""
    return [each for each in levers if each.change != "exact" or each.trunk_bound > 0]


def context(levers: Sequence[Lever]) -> tuple[dict[str, Any], list[Lever]]:
    """What a comparison of these levers stands on, besides exact levers."""
    return baseline(levers), inexact(levers)


def shown(having: Sequence[Lever]) -> set[frozenset[str]]:
    """The pairs that a comparison of these levers proves: those that stand on the same as all of them."""
    pairs = itertools.combinations(having, 2)
    return {frozenset(each.name for each in pair) for pair in pairs if context(pair) == context(having)}


def together() -> list[Set]:
    """Sets of levers that show every pair that is not refused, each made greedily around a pair that is left."""
    left = {frozenset((one.name, other.name)) for one, other in PAIRS if (one, other) not in EXCLUDED}
    sets: list[Set] = []
    for pair in PAIRS:
        if shown(pair) <= left:
            chosen = pair
            for each in HERE:
                wider = tuple(other for other in HERE if other in chosen or other is each)
                allowed = all(each.name not in other.excludes for other in chosen)
                if allowed and context(wider) == context(pair) and (shown(wider) - shown(chosen)) & left:
                    chosen = wider
            left -= shown(chosen)
            sets.append(chosen)
    # Those that share a baseline stand side by side, so that one process makes its runs.
    return sorted(sets, key=lambda having: [each.name for each in inexact(having)])


@cache
def tiny_run(folder: Path) -> dict[str, Any]:
    """One step of PPO on a tiny model of the family that the folder's name begins with, paid by a function."""
    family = folder.name.partition("-")[0]
    return settings(folder, by_function("pays_by_hash", entropy_coef=0.01, steps=1), family=family)


@cache
def reward_stored(folder: Path, tree: str) -> Path:
    """A reward model of the sharing that the tree has."""
    stored = folder / f"reward-{reward_stored.cache_info().misses}"
    by_model(json.loads(tree), stored)
    return stored


@cache
def judge(folder: Path) -> Path:
    """A reward model of another family."""
    return tiny_classifier(folder / "judge", seed=2)


class Services:
    """A service for each way to share and hold weights, started when it is first asked for."""

    def __init__(self) -> None:
        self.open = contextlib.ExitStack()
        self._urls: dict[tuple[Any, ...], str] = {}

    def url(self, tree: Mapping[str, Any], roles: tuple[str, ...]) -> str:
        """Of one with these roles of this run; the models of all tests are made from one seed."""
        held = (str(tree.get(name)) for name in ("model", "sharing", "adapters", "trunk", "precision", "reward"))
        key = (*roles, *held, tree.get("memory", {}).get("attention"))
        if key not in self._urls:
            self._urls[key] = self.open.enter_context(listening(hosted_roles(dict(tree), *roles))).url
        return self._urls[key]


SERVICES = Services()


@pytest.fixture(scope="module", autouse=True)
def services() -> Iterator[None]:
    with SERVICES.open:
        yield


def over_a_trunk(tree: Mapping[str, Any]) -> bool:
    mode = tree.get("sharing", {}).get("mode", "trunk")
    return mode == "trunk" or (mode == "adapters" and tree["adapters"].get("layers", 0) > 0)


def tree_with(folder: Path, levers: Iterable[Lever], compared: Iterable[Lever]) -> dict[str, Any]:
    """A tiny run of one PPO step with `levers`, on the baselines that the `compared` ones need."""
    given = baseline(compared)
    for each in levers:
        given |= each.settings
    tree = tiny_run(folder)
    mode = given.get("sharing.mode", "trunk")
    if mode != "trunk":
        tree = merged(tree, {"trunk": None})
    if mode == "adapters":
        tree = merged(tree, {"adapters": {"rank": 4, "alpha": 8.0}})
    if given.get("reward.source") == "model":
        tree = merged(tree, {"reward": {"model": str(judge(folder)), "function": None}})
    elif any({"reward.residency", "precision.reward"} & each.settings.keys() for each in compared):
        shared = {key: value for key, value in given.items() if key.startswith(("sharing", "adapters"))}
        stored = reward_stored(folder, json.dumps(merged(tree, nested(shared))))
        tree = merged(tree, {"reward": {"source": "checkpoint", "checkpoint": str(stored), "function": None}})
    away = tuple(role for role in ("reference", "reward") if given.get(f"{role}.residency") == "service")
    if away:
        elsewhere = ("reference.residency", "reward.residency", "reference.engine")
        kept = merged(tree, nested({key: value for key, value in given.items() if key not in elsewhere}))
        tree = at_service(tree, SERVICES.url(kept, away), *away)
    if any(each.only_on == "cuda" for each in compared) or ON_CUDA in folder.name:
        tree = merged(tree, {"system": {"device": "cuda"}})
    return merged(tree, nested(given))


def moved(folder: Path, levers: Iterable[Lever], compared: Iterable[Lever]) -> tuple[Weights, Weights]:
    """Actor and critic, and a trained trunk, before and after one step, as one mapping each."""
    return moved_by(json.dumps(tree_with(folder, levers, compared)))


def responses_of(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Where the responses lie that a run with these settings draws, once it has."""
    return folder / f"{hashlib.sha256(json.dumps(tree).encode()).hexdigest()}.parquet"


@cache
def moved_by(tree: str, responses: Path | None = None, *, widened: bool = False) -> tuple[Weights, Weights]:
    """`moved` by these settings: on the responses in a file, and `widened` by weights that are no more held in fewer
    bits than in float32, where their numbers stay the rounded ones."""
    trainer = make_trainer(make_config(json.loads(tree)))
    give_value_head(trainer.models)
    if responses is not None:
        trainer.sampler = Replay(trainer, responses)
    if widened:
        widen(trainer.models)
    roles: dict[str, nn.Module] = {"actor": trainer.models.actor, "critic": trainer.models.critic}
    if trainer.models.trunk is not None:
        roles["trunk"] = trainer.models.trunk
    before = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
    trainer.step()
    after = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
    return before, after


def widen(models: FourModels) -> None:
    """Every quantised layer becomes a plain one with the numbers that its codes stand for."""
    for module in (models.base.trunk, models.actor, models.critic, models.reference, models.reward):
        if isinstance(module, nn.Module):
            dequantize(module)


def difference(base: tuple[Weights, Weights], other: tuple[Weights, Weights]) -> float:
    """|difference of the moves| / |move|, over all weights; what only one of the two holds in fewer bits stays."""
    gap = move = 0.0
    for name, before in base[0].items():
        if name not in other[0]:
            assert torch.equal(base[1][name], before)
            continue
        ours, theirs = base[1][name] - before, other[1][name] - other[0][name]
        gap += float((ours - theirs).double().square().sum())
        move += float(ours.double().square().sum())
    assert move > 0
    return (gap / move) ** 0.5


def bit_equal(base: tuple[Weights, Weights], other: tuple[Weights, Weights]) -> bool:
    """Whether the same weights have moved to the same places."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(base, other, strict=True)
    )


def culprits(folder: Path, rest: Sequence[Lever], exact: Sequence[Lever], compared: Sequence[Lever]) -> str:
    """The fewest of the exact levers that change the run with `rest`: one, two, or no fewer than all."""
    base = moved(folder, rest, compared)
    for several in itertools.chain(itertools.combinations(exact, 1), itertools.combinations(exact, 2)):
        if not bit_equal(base, moved(folder, [*rest, *several], compared)):
            return " with ".join(each.name for each in several)
    return "only all together"


def check(folder: Path, having: Sequence[Lever]) -> None:
    """The exact ones change no bit of the run without them; the others no more than their bounds allow."""
    rest = inexact(having)
    exact = [each for each in having if each not in rest]
    bounded = [each for each in rest if each in MECHANISMS]
    if exact:
        without = moved(folder, rest, having)
        assert bit_equal(without, moved(folder, having, having)), (
            f"not exact beside {[each.name for each in rest]}: {culprits(folder, rest, exact, having)}"
        )
    if bounded and baseline(having) == baseline(bounded):
        check_bounds(folder, having, rest, bounded)


def check_bounds(folder: Path, having: Sequence[Lever], rest: Sequence[Lever], bounded: Sequence[Lever]) -> None:
    """The `bounded` of `rest` change an update on the same responses no more than they declare."""
    plain = tree_with(folder, [each for each in rest if each.name in SHARING], having)
    responses = responses_of(folder, plain)
    base, ours = moved_by(json.dumps(plain), responses), json.dumps(tree_with(folder, rest, having))
    rounding = [each for each in bounded if each.rounding]
    if rounding:
        kept = [each for each in rest if each in rounding or each.name in SHARING]
        rounded = moved_by(json.dumps(tree_with(folder, kept, having)), responses, widened=True)
        assert 0 < difference(base, rounded) <= sum(each.rounding for each in rounding)
        base = rounded
    bound = sum(each.bound_over(trunk=over_a_trunk(json.loads(ours))) for each in bounded)
    changed = moved_by(ours, responses)
    assert difference(base, changed) <= bound if bound else bit_equal(base, changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs find the same model and data; nothing of a run but its log is written there."""
    return tmp_path_factory.mktemp("llama-")


@pytest.mark.parametrize("each", ALONE)
def test_a_lever_changes_what_it_declares(folder: Path, each: Lever) -> None:
    check(folder, [each])


@pytest.mark.parametrize("each", EXACT, ids=lambda each: each.name)
def test_an_exact_lever_is_exact_on_learned_positions_and_transposed_matrices(
    tmp_path_factory: pytest.TempPathFactory, each: Lever
) -> None:
    """GPT-2, whose linear layers are transposed and whose positions are an embedding."""
    check(tmp_path_factory.getbasetemp() / "gpt2-levers", [each])


@pytest.mark.gpu
@pytest.mark.parametrize("each", [each for each in MECHANISMS if not each.only_on], ids=lambda each: each.name)
def test_a_lever_keeps_its_promise_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, each: Lever) -> None:
    folder = tmp_path_factory.getbasetemp() / f"llama-{ON_CUDA}"
    if each.name == "offload optimizer":  # the CPU steps, which rounds otherwise
        without, having = (moved(folder, levers, [each]) for levers in ([], [each]))
        assert difference(without, having) <= ORDER_OF_SUMS
    else:
        check(folder, [each])


@pytest.mark.parametrize("having", together(), ids=lambda having: "+".join(each.name for each in having))
def test_levers_change_what_all_of_them_declare(folder: Path, having: Set) -> None:
    check(folder, having)


@pytest.mark.parametrize(("one", "other"), EXCLUDED, ids=lambda each: each.name)
def test_a_pair_that_excludes_each_other_is_refused(folder: Path, one: Lever, other: Lever) -> None:
    """By the settings, or because two ask for different values of one key, or one is a strength of the other."""
    assert one.name in other.excludes
    mine, others = one.settings, other.settings
    opposed = any(mine[key] != others[key] for key in mine.keys() & others.keys())
    if not (opposed or mine.items() <= others.items() or others.items() <= mine.items()):
        with pytest.raises(ConfigError):
            make_config(tree_with(folder, [one, other], [one, other]))


def test_every_pair_is_shown_or_refused() -> None:
    shown_by_a_set = set().union(*(shown(having) for having in together()))
    for one, other in PAIRS:
        assert (frozenset((one.name, other.name)) in shown_by_a_set) != ((one, other) in EXCLUDED)


def test_levers_are_declared_once_and_lie_where_they_say() -> None:
    names = [each.name for each in LEVERS]
    assert len(names) == len(set(names))
    for each in LEVERS:
        importlib.import_module(each.where)
        assert (each.change == "bounded") == (each.bound > 0)
        assert not each.rounding or each.bound < each.rounding < 2**0.5  # that of updates with nothing in common
        for name in each.excludes:
            assert each.name in lever(name).excludes

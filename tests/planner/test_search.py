"""The search against trying everything, and what must hold of every plan."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import ConfigError
from fourfold.config.checks import is_given
from fourfold.config.loading import with_settings
from fourfold.planner.bill import Footprint, Item, Phase
from fourfold.planner.candidates import WORTH_ROUNDING, Candidate, Candidates, Evaluate, estimate
from fourfold.planner.choices import allowed_keys, dimensions, lever_keys, value_of, without
from fourfold.planner.hardware.machine import GIB
from fourfold.planner.levers import LEVERS, lever
from fourfold.planner.scene import Scene
from fourfold.planner.search import search
from fourfold.planner.work import Costs
from planner.searched import scene, simple

# Sections that leave a space small enough to be tried as a whole.
KEPT: dict[str, Any] = {"residency": "keep"}
EXACT: dict[str, Any] = {
    "precision": {"compute": "bfloat16", "frozen": "bfloat16", "reference": "auto", "reward": "auto"}
}
SPACES: dict[str, dict[str, Any]] = {
    "activations": {
        "sharing": {"mode": "trunk"},
        "reference": KEPT,
        "reward": KEPT,
        **EXACT,
        "memory": {"optimizer_residency": "keep"},
    },
    "frozen roles": {
        "sharing": {"mode": "trunk"},
        "ppo": {"micro_batch_size": 32, "optimizer": "adamw"},
        "sampling": {"batch_size": 8},
        "memory": {"activation_offload": False, "checkpointing": "none"},
    },
    "adapters": {
        "sharing": {"mode": "adapters"},
        "reference": KEPT,
        "reward": KEPT,
        "sampling": {"batch_size": 8},
        "memory": {"activation_offload": False, "checkpointing": "layers"},
    },
    "separate models": {
        "sharing": {"mode": "none"},
        "sampling": {"batch_size": 8},
        "memory": {"checkpointing": "none"},
        "precision": {"reference": "auto", "reward": "auto"},
        "ppo": {"micro_batch_size": 8},
    },
}


def everything(start: Scene, evaluate: Evaluate = simple) -> list[Candidate]:
    """Every combination of what the search may choose, the best first."""
    candidates = Candidates(start, 10**15, 0, evaluate)
    fixed = {key for key in lever_keys() if is_given(start.config, key)}
    mechanisms = [each for each in LEVERS if each.change != "other parameters" and not each.not_planned]
    free = dimensions(start, fixed, mechanisms)
    assert 100 < math.prod(1 + len(dimension) for dimension in free) < 5000
    for chosen in itertools.product(*((None, *dimension) for dimension in free)):
        options = [option for option in chosen if option is not None]
        if all(one.beside(other) for one, other in itertools.combinations(options, 2)):
            candidates.get(options)
    return candidates.fitting


@pytest.mark.parametrize("space", SPACES)
def test_the_best_of_all_is_found(space: str) -> None:
    start = scene(**SPACES[space])
    every = everything(start)
    for budget, host_budget in itertools.product((3, 6, 9, 12, 15, 20, 30, 45, 60), (0, 6)):
        plan = search(start, budget * GIB, host_budget * GIB, simple)[0]
        fitting = (
            each
            for each in every
            if each.peak <= budget * GIB and (not host_budget or each.host_peak <= host_budget * GIB)
        )
        best = next(fitting, None)
        assert plan.fits == (best is not None)
        if best is not None:
            (found,) = (each for each in every if each.scene.config == plan.scene.config)
            assert found.rank == best.rank, (budget, host_budget)


@pytest.mark.parametrize("mode", ["none", "trunk", "adapters"])
def test_the_best_of_all_is_found_by_the_planners_own_arithmetic(mode: str) -> None:
    """What the search takes for granted holds of it, or does no harm."""
    start = scene(
        sharing={"mode": mode},
        reference=KEPT,
        reward=KEPT,
        sampling={"batch_size": 8},
        precision={"compute": "bfloat16", **({} if mode == "none" else {"frozen": "auto"})},
        ppo={"rollout_batch_size": 32, "mini_batch_size": 32, "optimizer": "adamw"},
    )
    every = everything(start, estimate)
    peaks = sorted(each.peak for each in every)
    for part in (0.0, 0.02, 0.1, 0.3, 0.6):
        budget = peaks[int(part * (len(peaks) - 1))]
        plan = search(start, budget, 0)[0]
        best = next(each for each in every if each.peak <= budget)
        (found,) = (each for each in every if each.scene.config == plan.scene.config)
        assert found.rank[1] <= best.rank[1] * (1 + 1e-9), (budget, plan.steps)


counted = st.integers(min_value=1, max_value=90)


@settings(max_examples=12, deadline=None)
@given(
    budget=counted, more=counted, host=st.integers(min_value=0, max_value=40), mode=st.sampled_from(["none", "trunk"])
)
def test_every_plan_fits_and_more_room_is_never_slower(budget: int, more: int, host: int, mode: str) -> None:
    start = scene(sharing={"mode": mode})
    small, large = (search(start, size * GIB, host * GIB, simple) for size in (budget, budget + more))
    for plans in (small, large):
        assert len(plans) == 1 or all(plan.fits for plan in plans)
        for plan in plans:
            assert plan.fits == (plan.missing == 0)
            assert plan.steps[0].lever == "" and plan.steps[-1].peak_bytes == plan.peak[1]
            assert plan.steps[-1].step_seconds == plan.costs.step_seconds
            rebuilt = with_settings(start.config, {k: v for step in plan.steps for k, v in step.settings.items()})
            assert rebuilt == plan.scene.config
    if small[0].fits:
        roundings = 1 + len(small[0].steps)
        assert large[0].fits
        assert large[0].costs.step_seconds <= small[0].costs.step_seconds * WORTH_ROUNDING**roundings
        if not any(lever(step.lever).rounds for plan in (small[0], large[0]) for step in plan.steps[1:]):
            assert large[0].costs.step_seconds <= small[0].costs.step_seconds * 1.02


def test_what_the_user_has_written_is_kept_unless_it_is_freed() -> None:
    given: dict[str, Any] = {"memory": {"checkpointing": "none"}, "ppo": {"micro_batch_size": 8}}
    start = scene(sharing={"mode": "none"}, **given)
    tight = 14 * GIB
    for plan in search(start, tight, 0, simple):
        assert value_of(plan.scene.config, "memory.checkpointing") == "none"
        assert value_of(plan.scene.config, "ppo.micro_batch_size") == 8
    free = allowed_keys(["memory", "ppo.micro_batch_size"])
    freely = Scene(without(start.config, free), start.models, start.cluster, start.lengths)
    assert freely.config.ppo.micro_batch_size == 32
    (plan, *_) = search(freely, tight, 0, simple, free=free)
    assert value_of(plan.scene.config, "ppo.micro_batch_size") < 8
    with pytest.raises(ValueError, match=r"--allow ppo\.kl_coef: a plan sets no such key; allowed: sharing\.mode"):
        allowed_keys(["ppo.kl_coef"])


def test_other_parameters_are_trained_only_where_nothing_else_fits() -> None:
    start = scene()
    assert start.config.sharing.mode == "trunk"
    for budget in (3, 8, 14, 40):
        kept = search(scene(sharing={"mode": "trunk"}), budget * GIB, 0, simple)
        for plan in search(start, budget * GIB, 0, simple):
            others = [step.lever for step in plan.steps[1:] if lever(step.lever).change == "other parameters"]
            assert bool(others) == (not kept[0].fits and plan.fits)
    exact = search(start, 8 * GIB, 0, simple, changes=("exact",))
    assert not any(lever(step.lever).rounds for plan in exact for step in plan.steps[1:])


def test_a_rounding_lever_must_be_worth_it() -> None:
    """Of two that save the same, the exact one is taken while it is not 5 % slower."""

    def priced(exact_seconds: float) -> list[str]:
        def evaluate(given: Scene) -> tuple[Footprint, Costs]:
            bill, costs = simple(scene(sharing={"mode": "none"}))
            narrow = given.config.ppo.optimizer == "adamw_8bit" or given.config.memory.optimizer_residency == "park"
            seconds: dict[Phase, float] = {
                **costs.seconds,
                "score": exact_seconds * (given.config.memory.optimizer_residency == "park"),
            }
            items = [item for item in bill.items if item.kind != "optimizer" or not narrow]
            return Footprint(tuple(items)), Costs(costs.work, (), seconds, 0.0, 0.0, 0.3)

        return [step.lever for step in search(scene(sharing={"mode": "none"}), 65 * GIB, 0, evaluate)[0].steps[1:]]

    assert priced(2.0) == ["park optimizer"]
    assert priced(4.0) == ["adamw_8bit"]


def test_every_second_layer_is_made_again_where_that_is_enough() -> None:
    """3.2 GiB of activations at 32 rows are over the budget by no more than half of what checkpointing saves."""
    memory: dict[str, Any] = {"optimizer_residency": "keep", "activation_offload": False}
    start = scene(sharing={"mode": "trunk"}, reference=KEPT, reward=KEPT, **EXACT, memory=memory)
    most = max(each.peak for each in everything(start))
    budget = round(most - 5 * GIB)
    refused = ["micro-batches", "checkpointing attention", "adamw_8bit", "sampling batches", "overlap scoring"]
    taken = search(start, budget, 0, simple, refused=refused)[0].steps[1:]
    assert [dict(step.settings) for step in taken] == [{"memory.checkpointing": "layers", "memory.checkpoint_every": 2}]


def test_a_host_without_room_is_soon_known() -> None:
    """Nothing fits, and not because of the device: no need to try every combination."""
    tried = 0

    def counted(given: Scene) -> tuple[Footprint, Costs]:
        nonlocal tried
        tried += 1
        bill, costs = simple(given)
        framework = Item("run", "framework", GIB, frozenset(bill.moments), "host", "interpreter")
        return bill.with_items([framework]), costs

    (nearest,) = search(scene(sharing={"mode": "none"}), 80 * GIB, GIB // 2, counted)
    assert not nearest.fits and tried < 200


def test_alternatives_offer_something() -> None:
    best, *others = search(scene(sharing={"mode": "none"}), 30 * GIB, 0, simple)
    assert len(others) == 2
    assert all(other.costs.step_seconds >= best.costs.step_seconds for other in others)
    for number, other in enumerate(others):
        before = (best, *others[:number])
        roomier = all(other.peak[1] < each.peak[1] for each in before)
        names = {step.lever for step in other.steps}
        assert roomier or all(names != {step.lever for step in each.steps} for each in before)


def test_a_mistake_in_a_lever_is_not_taken_for_a_refusal() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        with_settings(scene().config, {"memory.no_such_key": 1})


def test_each_lever_says_what_a_search_may_set() -> None:
    known = {key for key in lever_keys()}
    assert {
        "memory.checkpointing",
        "memory.checkpoint_every",
        "ppo.micro_batch_size",
        "sharing.mode",
        "sampling.overlap_scoring",
    } <= known
    assert "service" not in {value for each in LEVERS if not each.not_planned for value in each.switches.values()}
    for each in LEVERS:
        assert each.not_planned or each.switches or each.halves
        if each.halves:
            assert isinstance(value_of(scene().config, each.halves[0]), int)
            assert value_of(scene().config, each.halves[1]) > 1

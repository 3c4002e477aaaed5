"""Priors: which can stand beside what, and what each leaves without use."""

from __future__ import annotations

import re

import pytest

from config.test_checks import found
from fourfold.config.checks import ignored_keys, roles_of_a_service
from fourfold.config.loading import parse_config

UNIFORM, MOVING = ["reference.prior=uniform"], ["reference.prior=moving"]
SERVICE = ["reference.residency=service", "service.url=http://a:1"]
REFUSED = [
    ([*UNIFORM, "reference.model=a/b"], "reference.prior: given, but reference.model names the policy"),
    (["reference.prior=step_0", "reference.checkpoint=x"], "reference.prior: given, but reference.checkpoint names"),
    (["reference.checkpoint=x", "reference.model=a/b"], "reference.checkpoint: given 'x' beside reference.model"),
    ([*UNIFORM, "reference.engine=llama_cpp"], "reference.engine: given 'llama_cpp' beside .*, which has no weights"),
    ([*MOVING, "reference.engine=llama_cpp"], "reference.engine: given 'llama_cpp' beside .*, whose weights move"),
    ([*UNIFORM, *SERVICE], "reference.residency: given 'service' beside .*, which has no weights .* 'cpu'"),
    ([*MOVING, *SERVICE], "reference.residency: given 'service' beside .*, whose weights move with this run's actor"),
    ([*UNIFORM, "precision.reference=int8"], "precision.reference: given, but reference.prior = 'uniform' has no wei"),
    ([*MOVING, "precision.reference=float32"], "precision.reference: given 'float32' beside .* lost in rounding"),
    (["reference.checkpoint=x", "precision.reference=int8"], "precision.reference: given 'int8' beside reference.ch"),
    ([*MOVING, "trunk.train=true"], "reference.prior: given 'moving' beside trunk.train = true: below it would stay"),
    ([*MOVING, "reference.copy_every=30"], "reference.copy_every: given 30, .* ppo.steps = 30; allowed: at most 29"),
    ([*MOVING, "reference.decay=1.0"], "reference.decay: given 1.0 .*; allowed: number >= 0 and < 1"),
    ([*MOVING, "reference.copy_every=2", "reference.decay=0.5"], "reference.decay: given, but reference.copy_every"),
    (["reference.decay=0.5"], "reference.decay: given, but reference.prior = 'step_0' does not move"),
    ([*UNIFORM, "reference.copy_every=5"], "reference.copy_every: given, but reference.prior = 'uniform' does not"),
    (["reference.log_step_0=false"], "reference.log_step_0: given, but the KL is taken to the actor of step 0 already"),
    (["reference.model=a/b", *SERVICE, "reference.log_step_0=true"], "reference.log_step_0: given, but .* 'service'"),
    (
        [*UNIFORM, "reference.log_step_0=false", "reference.residency=park"],
        "reference.residency: given, but reference.prior = 'uniform' has no weights",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_a_prior_cannot_stand_beside_is_refused(overrides: list[str], message: str) -> None:
    problems = found(*overrides)
    assert len(problems) == 1, problems
    assert re.match(message, problems[0]), problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [*UNIFORM, "reference.residency=park"],
        [*UNIFORM, "ppo.kl_estimator=full", "sharing.mode=adapters", "adapters.rank=4"],
        [*MOVING, "reference.residency=stream", "reference.copy_every=29"],
        [*MOVING, "sharing.mode=none", "ppo.kl_estimator=full"],
        ["reference.checkpoint=x", *SERVICE],
        ["reference.checkpoint=x", "reference.engine=llama_cpp"],
        ["reference.model=a/b", "reference.log_step_0=false"],
    ],
)
def test_what_it_can_stand_beside_is_not(overrides: list[str]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize("prior", ["reference.model=a/b", "reference.checkpoint=x", "reference.prior=step_0"])
def test_what_an_engine_changes_of_any_reference_is_bounded(prior: str) -> None:
    """Its bound is no ignored key: pre-flight enforces it (fourfold.models.llama_roles.note_rounding)."""
    bound = ["reference.engine=llama_cpp_q8_0", "precision.max_reference_bias=0.01"]
    kept = [] if prior.endswith("step_0") else [prior]
    assert not [problem for problem in found(*kept, *bound) if problem.startswith("precision.max_reference_bias")]
    if kept:
        [problem] = found(*kept, bound[1])
        assert problem.startswith("precision.max_reference_bias: given, but")


def test_which_prior_it_is_and_what_is_held_for_it() -> None:
    tree = {
        "output": "x", "stages": ["ppo"], "model": {"path": "m"}, "data": {"prompts": {"path": "p.jsonl"}},
        "reward": {"source": "function", "function": "m:f"}, "critic": {"init": "actor"},
    }  # fmt: skip
    cases = {
        "step_0": ({}, False, True),
        "uniform": ({"prior": "uniform"}, True, False),
        "moving": ({"prior": "moving"}, True, True),
        "checkpoint": ({"checkpoint": "c"}, True, False),
        "model": ({"model": "a/b"}, True, False),
    }
    for kind, (given, holds, starts) in cases.items():
        config = parse_config({**tree, "reference": given}, "test")
        reference = config.reference
        assert (reference.kind, reference.holds_step_0, reference.starts_as_the_actor) == (kind, holds, starts)
        assert ("reference" in roles_of_a_service(config)) == (kind not in ("uniform", "moving"))
        if kind in ("checkpoint", "model"):
            assert "reference.prior" in ignored_keys(config), "so that it is not saved with the run"

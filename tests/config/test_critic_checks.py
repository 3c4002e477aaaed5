"""Settings of the critic that are wrong or ignored together."""

from __future__ import annotations

import re
import tomllib

import pytest

from config.test_checks import BASE, NO_PAIRS, found
from fourfold.config.checks.critic import critic_warnings
from fourfold.config.loading import apply_override, parse_config
from fourfold.diagnostics.metrics import METRICS

REFUSED: list[tuple[list[str], str]] = [
    (["critic.model=a/b", "critic.init=base"], "critic.init: given, but critic.model brings its own weights"),
    (["critic.model=a/b", "critic.layers=3"], "critic.layers: given, but critic.model brings its own weights"),
    (
        ["critic.model=a/b", "trunk.train=true", "trunk.alternate=1"],
        "trunk.alternate: given, but critic.model stands beside the trunk",
    ),
    (
        ["critic.updates_per_actor=3", "trunk.train=true"],
        "critic.updates_per_actor: given 3 beside trunk.train = true, .* one pass over the trunk.*trunk.alternate",
    ),
    (["critic.updates_per_actor=0"], "critic.updates_per_actor: given 0 .integer.; allowed: integer > 0"),
    (["critic.ensemble=4"], "critic.ensemble: given 4 beside ppo.value_clip_eps = 0.2.*set ppo.value_clip_eps = 0"),
    (
        ["critic.ensemble=4", "critic.heads=vector", "ppo.value_clip_eps=0"],
        "critic.ensemble: given 4 beside critic.heads = 'vector'",
    ),
    (["critic.dropout=1"], "critic.dropout: given 1.*< 1"),
    (
        ["critic.warmup_steps=99999", "critic.updates_per_actor=2", "critic.pretrain_rollouts=3"],
        "critic.warmup_steps: given 99999, but there are 243 optimizer steps in all",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    problems = found(*overrides)
    assert len(problems) == 1, problems
    assert re.match(message, problems[0]), problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["critic.layers=5", "critic.dropout=0.1", "critic.pretrain_rollouts=2"],
        ["critic.ensemble=4", "ppo.value_clip_eps=0"],
        ["critic.updates_per_actor=3", "trunk.train=true", "trunk.alternate=1"],
        ["critic.updates_per_actor=3", "trunk.train=true", "critic.model=a/b"],
        ["critic.model=a/b", "sharing.mode=adapters", "precision.critic=float32", "precision.compute=bfloat16"],
        [NO_PAIRS, "reward.source=function", "reward.function=a:b", "critic.model=a/b"],
        [NO_PAIRS, "reward.source=model", "reward.model=a/c", "critic.model=a/b"],
    ],
)
def test_what_goes_together_is_allowed(overrides: list[str]) -> None:
    assert found(*overrides) == []


def test_more_updates_of_the_critic_are_warned_of() -> None:
    """How often it goes through a rollout, and which metrics show that it learns by heart."""
    tree = tomllib.loads(BASE)
    assert list(critic_warnings(parse_config(tree, "test"))) == []
    apply_override(tree, "critic.updates_per_actor=5")
    [warning] = critic_warnings(parse_config(tree, "test"))
    assert "goes 20 times through every rollout" in warning
    for name in ("value_loss_last_pass_per_token", "value_loss_fresh_per_token"):
        assert name in warning and name in METRICS["ppo_step"]

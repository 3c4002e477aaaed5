"""A plan as a configuration: it loads to the plan's settings, says why, and holds nothing but what is not default."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import load_config
from fourfold.config.describe import all_settings
from fourfold.config.loading import parse_config
from fourfold.planner.hardware.machine import GIB, Cluster, Node
from fourfold.planner.layout import Layout
from fourfold.planner.plan import Plan
from fourfold.planner.saved import plan_toml
from fourfold.planner.search import as_given, search
from planner.searched import CLUSTER, GPU, scene, simple

GIVEN: dict[str, Any] = {
    "output": 'runs/"quoted"',
    "data": {"prompts": {"path": "p.jsonl", "columns": {"prompt": "a question"}, "max_rows": 5}},
    "sampling": {"stop_strings": ["\n\n", "#"], "temperature": 0.7},
    "ppo": {"target_kl": 0.05, "betas": [0.8, 0.99], "rollout_batch_size": 64},
}


def keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    known = all_settings()
    found = set[str]()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= {key} if key in known or not isinstance(value, dict) else keys(value, f"{key}.")
    return found


@settings(max_examples=15, deadline=None)
@given(budget=st.integers(min_value=2, max_value=90), mode=st.sampled_from(["none", "trunk", "adapters"]))
def test_every_plan_loads_to_its_settings(budget: int, mode: str) -> None:
    for plan in search(scene(sharing={"mode": mode}, **GIVEN), budget * GIB, 0, simple):
        text = plan_toml(plan)
        loaded = parse_config(tomllib.loads(text), "plan.toml")
        assert loaded == plan.scene.config
        defaults = {key for key, each in all_settings().items() if each.default is not None}
        for key in keys(tomllib.loads(text)) & defaults:
            *path, name = key.split(".")
            value: Any = plan.scene.config
            for part in (*path, name):
                value = getattr(value, part)
            assert value != all_settings()[key].default, f"{key} is the default"
        for step in plan.steps[1:]:
            assert f"# {step.lever}: " in text


def plan_on(cluster: Cluster, layout: Layout) -> Plan:
    return as_given(replace(scene(cluster), layout=layout), 80 * GIB, 0, simple)[0]


def test_a_plan_for_several_devices_is_no_configuration_of_this_version(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"DP 4 x ZeRO-2.*one device.*--hardware"):
        plan_toml(plan_on(replace(CLUSTER, node=Node(GPU, 4)), Layout(data=4, zero=2)))
    path = tmp_path / "plan.toml"
    path.write_text(plan_toml(plan_on(CLUSTER, Layout())), encoding="utf-8")
    assert load_config(path) == scene().config
    assert path.read_text(encoding="utf-8").startswith("# Planned for a GPU: ")

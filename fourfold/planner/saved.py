"""A plan as a configuration that `fourfold run` carries out unchanged: what differs from the defaults, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.config.template import toml_value
from fourfold.planner.plan import Plan
from fourfold.planner.units import seconds, size

_WIDTH = 116


def plan_toml(plan: Plan) -> str:
    """The plan's settings, which load to its configuration; above each key of a lever stands why it was taken.

    A plan that is spread over devices, which no run of this version carries out, is refused.
    """
    if plan.scene.layout.devices > 1:
        raise ValueError(
            f"the plan's layout is {plan.scene.layout}, and `fourfold run` of this version works on one device, so "
            "that no configuration would be this plan; try --hardware with one device, such as a100-80"
        )
    config = plan.scene.config
    moment, peak = plan.peak
    about = (
        f"Planned for {plan.scene.cluster.device.name}: {size(peak)} of {size(plan.budget)} at most (in {moment}), "
        f"about {seconds(plan.costs.step_seconds)} a PPO step. Start it with: fourfold run THIS_FILE"
    )
    reasons = {key: f"{step.lever}: {step.reason}" for step in plan.steps[1:] for key in step.settings}
    tree = config.model_dump(mode="json", exclude_defaults=True)
    lines = [*_comment(about), "", *_table(tree, "", reasons)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(tree: Mapping[str, Any], prefix: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """A table's own keys, then the tables in it; a lever's reason stands at the first of its keys."""
    said = set[str]()
    own = {name: value for name, value in tree.items() if not isinstance(value, Mapping) or _is_value(prefix, name)}
    if own and prefix:
        yield f"[{prefix.rstrip('.')}]"
    for name, value in own.items():
        reason = reasons.get(f"{prefix}{name}")
        if reason is not None and reason not in said:
            said.add(reason)
            yield from _comment(reason)
        yield f"{name} = {toml_value(value)}"
    if own:
        yield ""
    for name, value in tree.items():
        if name not in own:
            yield from _table(value, f"{prefix}{name}.", reasons)


def _is_value(prefix: str, name: str) -> bool:
    """Whether a mapping is the value of a key, such as data.prompts.columns, and no table of settings."""
    from fourfold.config.describe import all_settings

    return f"{prefix}{name}" in all_settings()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]

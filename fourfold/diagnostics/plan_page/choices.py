"""What was chosen: settings to copy, the next plans with what differs, warnings, and what all of it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from fourfold.config.template import toml_value
from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.tables import NOTHING, Row, table
from fourfold.diagnostics.plan_bars import lever_shown
from fourfold.planner.links import REACHED
from fourfold.planner.plan import Plan
from fourfold.planner.saved import plan_toml
from fourfold.planner.timing import decoding_steps, reached_flops, roofline
from fourfold.planner.units import quantity, seconds, size


def settings_section(plan: Plan) -> Iterator[Element]:
    """The plan as the configuration that `fourfold run` carries out."""
    if plan.scene.layout.devices > 1:
        said = (
            f"This plan's layout is {plan.scene.layout}, and `fourfold run` of this version works on one device: no "
            "configuration would be this plan."
        )
        yield h("p", said, class_="muted")
        return
    text = plan_toml(plan)
    yield h(
        "div",
        h("button", "Copy", type="button", hidden="", data_copies="settings"),
        h("pre", h("code", text, id="settings"), tabindex=0),
        class_="settings",
    )


def alternatives_section(plans: Sequence[Plan]) -> Iterator[Element]:
    """All plans that the search gives, and what each of the next ones sets otherwise."""
    rows = [Row(_number(index), _of(plan, plans[0])) for index, plan in enumerate(plans)]
    yield table("Plans, the best first", ("", "levers", "peak", "a step", "settings that differ from the best"), rows)


def _number(index: int) -> str:
    return f"{index + 1}, this page" if index == 0 else str(index + 1)


def _of(plan: Plan, best: Plan) -> list[Element | str]:
    levers = ", ".join(lever_shown(step) for step in plan.steps[1:]) or "none: the settings as given"
    if plan.scene.layout.devices > 1:
        levers = f"{plan.scene.layout}; {levers}"
    peak, time = size(plan.peak[1]), seconds(plan.costs.step_seconds)
    if plan is not best:
        peak += f" ({plan.peak[1] / best.peak[1] - 1:+.0%})"
        time += f" ({plan.costs.step_seconds / best.costs.step_seconds - 1:+.1%})"
    changes = [h("code", change) for change in differences(best, plan)]
    return [h("td", levers, class_="why"), peak, time, h("td", changes or NOTHING, class_="why")]


def differences(before: Plan, after: Plan) -> list[str]:
    """Settings in which two plans differ, as "key before → after"."""
    old, new = (dict(_flat(plan.scene.config.model_dump(mode="json"))) for plan in (before, after))
    return [f"{key} {toml_value(old[key])} → {toml_value(new[key])}" for key in old if old[key] != new.get(key)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def ground_section(plan: Plan, notes: Sequence[str]) -> Iterator[Element]:
    """Hardware in numbers, what real work is taken to reach of them, and where figures are from."""
    facts = [h("div", h("dt", name), h("dd", said)) for name, said in _hardware(plan)]
    yield h("dl", facts, class_="facts")
    yield h("ul", [h("li", note) for note in (*notes, *_assumed(plan))], class_="dashes")


def _hardware(plan: Plan) -> Iterator[tuple[str, str]]:
    cluster, device = plan.scene.cluster, plan.scene.cluster.device
    node = cluster.node
    yield "device", device.name if cluster.devices == 1 else f"{cluster.devices} x {device.name}"
    yield "layout", str(plan.scene.layout)
    yield "memory", f"{size(device.memory)}, {quantity(device.bandwidth)}B/s"
    yield "products", ", ".join(f"{dtype} {quantity(rate)}FLOP/s" for dtype, rate in device.flops.items())
    if device.pcie:
        yield "to the host", f"{quantity(device.pcie)}B/s"
    if node.link:
        yield node.link_name or "inside the node", f"{quantity(node.link)}B/s"
    if cluster.network:
        yield cluster.network_name or "between nodes", f"{quantity(cluster.network)}B/s a node"
    if node.host_memory and not plan.scene.on_cpu:
        yield "host memory", f"{size(node.host_memory)} a node"
    if device.source:
        yield "figures from", device.source


def _assumed(plan: Plan) -> Iterator[str]:
    """The constants that turn rates into seconds (fourfold.planner.timing and links have their sources)."""
    scene, device, dtype = plan.scene, plan.scene.cluster.device, plan.scene.compute
    rows = scene.config.ppo.rollout_batch_size / scene.layout.data / decoding_steps(scene)[0]
    products = reached_flops(device, dtype)
    decoding = device.flops_of_rows(dtype, rows) or reached_flops(device, dtype, few_rows=True)
    one = roofline(device, dtype, flops=0, moved=1, layers=1)
    yield (
        f"seconds: {dtype} products reach {quantity(products)}FLOP/s, while decoding {quantity(decoding)}FLOP/s; "
        f"memory {quantity(1 / one.memory)}B/s, links {REACHED:.0%} of their rates; calling a layer takes "
        f"{seconds(one.calls)} (docs/planner.md has the publications)"
    )
    lengths = scene.lengths
    yield (
        f"lengths: prompts of up to {lengths.prompt:,} and responses of up to {lengths.response:,} tokens; memory goes "
        f"by the longest, time by the mean ({lengths.mean_prompt:,.6g} and {lengths.mean_response:,.6g})"
    )
    yield "GB are 10⁹ bytes, GiB 2³⁰; bytes are predicted, and every run prints them beside what it has measured"

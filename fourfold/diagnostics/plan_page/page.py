"""The page: a verdict, the drawings, the tables, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.document import document, section, tile
from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import rect, strip
from fourfold.diagnostics.plan_bars import lever_shown
from fourfold.diagnostics.plan_page.cells import parameters, where
from fourfold.diagnostics.plan_page.choices import alternatives_section, ground_section, settings_section
from fourfold.diagnostics.plan_page.levers import waterfall
from fourfold.diagnostics.plan_page.sections import flow_section, memory_section
from fourfold.diagnostics.plan_page.spending import time_section, traffic_section
from fourfold.diagnostics.plan_page.tables import bytes_section
from fourfold.planner.holding import trained_parameters
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import Remedy, shortage
from fourfold.planner.units import quantity, seconds, size


def plan_page(plans: Sequence[Plan], notes: Sequence[str] = (), helps: Sequence[Remedy] = (), model: str = "") -> str:
    """HTML of the plans that a search gives, the best first: that one in full, of the others what differs.

    `notes` say where figures are from, `helps` what would make it fit where nothing does, `model` what is planned.
    """
    plan = plans[0]
    device = plan.scene.cluster.device.name
    if plan.scene.layout.devices > 1:
        device = f"{plan.scene.layout.devices} x {device}"
    title = f"{model} on {device}" if model else device
    body = [_header(plan, title, helps), h("main", _sections(plans, notes)), _footer()]
    return document(f"{title}: plan", body, __name__.rpartition(".")[0])


def _header(plan: Plan, title: str, helps: Sequence[Remedy]) -> Element:
    verdict, style = ("Fits", "fits") if plan.fits else ("Does not fit", "lacks")
    return h(
        "header",
        h("p", "Fourfold plan", class_="eyebrow"),
        h("h1", title),
        h("p", h("span", verdict, class_=f"badge {style}"), " ", _verdict(plan), class_="verdict"),
        h("dl", [tile(*each) for each in _tiles(plan)], class_="tiles"),
        _remedies(helps) if helps else None,
    )  # fmt: skip


def _verdict(plan: Plan) -> str:
    if not plan.fits:
        return shortage(plan).removeprefix("does not fit: ")
    levers = ", ".join(lever_shown(step) for step in plan.steps[1:]) or "the settings as given"
    return f"with {levers}; {size(plan.budget - plan.peak[1])} to spare {where(plan.scene, 'device')}."


def _tiles(plan: Plan) -> Iterator[tuple[str, str, str, Element | None]]:
    """Name, figure, what it is of, and a bar."""
    scene, costs, (moment, peak) = plan.scene, plan.costs, plan.peak
    share = peak / plan.budget
    meter = strip(
        "meter", f"{share:.0%} of the budget", rect(0, 0, 1000, 6, "track"),
        rect(0, 0, min(share, 1) * 1000, 6, "accent" if plan.fits else "danger"), height=6,
    )  # fmt: skip
    yield "Peak memory", size(peak), f"of {size(plan.budget)} ({share:.0%}), in {moment}", meter
    rows, tokens = scene.config.ppo.rollout_batch_size, scene.lengths.mean_response
    rate = rows * tokens / costs.step_seconds
    yield "One PPO step", seconds(costs.step_seconds), f"{rows} responses, {rate:,.3g} tokens a second", None
    yield "FLOP of a step", f"{quantity(costs.flops)}FLOP", f"MFU {costs.utilisation:.1%}", None
    trained = sum(trained_parameters(scene).values())
    yield "Trained", parameters(trained), f"parameters, of actor and critic; sharing: {scene.config.sharing.mode}", None
    host = plan.footprint.peak(tier="host")[1]
    if host:
        limit = f"of {size(plan.host_budget)} a device" if plan.host_budget else "a device"
        yield "Host memory", size(host), limit, None
    disk = plan.footprint.peak(tier="disk")[1]
    if disk:
        yield "Disk", size(disk), "for what is parked", None


def _remedies(helps: Sequence[Remedy]) -> Element:
    items = [
        h("li", h("code", each.text), ": ", "it fits" if not each.missing else f"{size(each.missing)} still missing")
        for each in helps
    ]
    return h("section", h("h2", "What would help, each alone"), h("ul", items), class_="remedies dashes")


def _sections(plans: Sequence[Plan], notes: Sequence[str]) -> Iterator[Element]:
    plan = plans[0]
    yield section("flow", "Four models, three phases", flow_section(plan))
    yield section("memory", "Memory over a step", memory_section(plan))
    yield section("levers", "What each lever takes away", [waterfall(plan)])
    yield section("time", "Where the seconds go", time_section(plan))
    yield section("traffic", "What crosses links", traffic_section(plan))
    yield section("bytes", "Bytes", bytes_section(plan))
    yield section("run", "Settings", settings_section(plan))
    if len(plans) > 1:
        yield section("others", "The next plans", alternatives_section(plans))
    if plan.warnings:
        yield section("warnings", "Warnings", [h("ul", [h("li", each) for each in plan.warnings], class_="dashes")])
    yield section("ground", "Hardware and assumptions", ground_section(plan, notes))


def _footer() -> Element:
    return h(
        "footer", h("p", "Made by `fourfold plan --page`. Figures are predictions; docs/planner.md has the equations.")
    )

"""The page of a plan: every cell, bars as long as their bytes, nothing from elsewhere, nothing that is not escaped."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import pytest

from diagnostics.page_checks import drawings, parsed, style_of, words
from fourfold.batch import Experience, Rollout, ScoredRollout
from fourfold.config.sections.parts import PartSection
from fourfold.diagnostics.plan_page import plan_page
from fourfold.diagnostics.plan_page.choices import differences
from fourfold.diagnostics.plan_page.tensors import BATCH, Tensor
from fourfold.planner.answer import Answer, answer
from fourfold.planner.bill import HOLDERS, KINDS
from fourfold.planner.holding import trained_parameters
from fourfold.planner.request import Asked
from fourfold.planner.units import quantity, size

NONE = 'sharing.mode="none"'
FUNCTION = """
output = "runs/x"
stages = ["ppo"]
model.path = "smollm2-135m"
data.prompts.path = "p.jsonl"
reward = { source = "function", function = "m:f" }
critic.init = "actor"
"""


def asked(*overrides: str, **arguments: Any) -> Asked:
    return Asked("smollm2-135m", hardware="a100-80", overrides=overrides, **arguments)


SEARCHED = {
    "one that fits": Asked("llama-2-7b", hardware="a100-80", overrides=('sharing.mode="adapters"',)),
    "one that does not": Asked("llama-2-7b", hardware="a100-80", overrides=(NONE,)),
    "a cpu": Asked("smollm2-135m", hardware="ryzen-7950x", budget="3GiB"),
}
AS_GIVEN = {
    "several devices": Asked("llama-2-70b", hardware="4xa100-80"),
    "a service": asked(NONE, 'reference.residency="service"', 'service.url="http://127.0.0.1:8777"'),
    "the host's processor": asked(NONE, 'reward.residency="cpu"', "sampling.overlap_scoring=true"),
    "a trained trunk": asked('sharing.mode="trunk"', "trunk.train=true", 'precision.compute="float32"'),
    "adapters over a trunk": asked('sharing.mode="adapters"', "adapters.layers=4", 'ppo.kl_estimator="full"'),
    "another reward model": asked(reward_model="smollm2-360m"),
    "a uniform prior": asked('reference.prior="uniform"', "reference.log_step_0=false"),
    "a moving prior": asked(NONE, 'reference.prior="moving"', 'reference.residency="park"'),
    "a function": Asked("function.toml", hardware="a100-80"),
}
NAME = "<script>alert('x')</script> & \"co\""


@pytest.fixture(scope="module", params=[*SEARCHED, *AS_GIVEN])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    name = request.param
    if name in SEARCHED:
        return answer(SEARCHED[name])
    wanted = AS_GIVEN[name]
    if wanted.target == "function.toml":
        file = tmp_path_factory.mktemp("page") / wanted.target
        file.write_text(FUNCTION, encoding="utf-8")
        wanted = dataclasses.replace(wanted, target=str(file))
    return answer(wanted, as_given=True)


@pytest.fixture(scope="module")
def page(found: Answer) -> str:
    return plan_page(found.plans, found.wanted.notes, found.helps, "a model")


def test_every_model_has_a_cell_in_every_phase(found: Answer, page: str) -> None:
    plan, flow = found.plans[0], drawings(page)["flow"]
    cells = {(c.attrib["data-role"], c.attrib["data-phase"]): c for c in flow.iter("g") if "data-role" in c.attrib}
    roles, phases = ("actor", "critic", "reference", "reward"), ("generate", "score", "learn")
    assert {(role, phase) for role in roles for phase in phases} <= cells.keys()
    assert page.count('data-role="actor"') == 6, "the drawing and the words"
    shared = {item.holder for item in plan.footprint.items} & {"trunk", "base"}
    assert {role for role, _ in cells} == {*roles, *shared}
    worked = {(each.moment.role, each.moment.phase): each for each in plan.costs.work}
    for (role, phase), cell in cells.items():
        said = words(cell)
        if (role, phase) in worked:
            assert any(f"{quantity(worked[role, phase].flops)}FLOP" in line for line in said)
            assert "idle" not in said
        elif role in roles and (role, phase) != ("reward", "score"):
            assert "idle" in said and "idle" in cell.attrib["class"]
        learns = (role, phase) in worked and worked[role, phase].backward_passes > 0
        if role in roles:
            assert ("learns" in cell.attrib["class"]) == learns == (phase == "learn" and role in ("actor", "critic"))
    works = ("reference", "score") in worked
    assert cells["reference", "score"].attrib["class"].endswith("frozen" if works else "idle")
    assert works or plan.scene.config.reference.kind == "uniform"


def test_cells_say_what_is_held_meanwhile(found: Answer, page: str) -> None:
    plan = found.plans[0]
    [cell] = [
        c
        for c in drawings(page)["flow"].iter("g")
        if (c.get("data-role"), c.get("data-phase")) == ("actor", "generate")
    ]
    moment = next(moment for moment in plan.footprint.moments if str(moment) == "generate/actor")
    held = plan.footprint.by(lambda item: item.holder, moment)["actor"]
    place = "in memory" if plan.scene.on_cpu else "on the device"
    assert f"{size(held)} {place}" in words(cell)
    said = words(drawings(page)["flow"])
    for role in ("actor", "critic", "reference", "reward"):
        assert said[said.index(role) + 1] == ("trained" if role in trained_parameters(plan.scene) else "frozen")


def test_bars_are_as_long_as_their_bytes(found: Answer, page: str) -> None:
    plan, charts = found.plans[0], {n: d for n, d in drawings(page).items() if n.startswith("memory-")}
    assert {"memory-device-kind", "memory-device-holder", "memory-device-kind-narrow"} <= charts.keys()
    for name, chart in charts.items():
        tier = name.split("-")[1]
        base = next(float(line.attrib["y1"]) for line in chart.iter("line") if line.attrib["class"] == "axis")
        parts: dict[str, list[ElementTree.Element]] = {}
        for rect in chart.iter("rect"):
            if "data-bytes" in rect.attrib:
                parts.setdefault(rect.attrib["data-moment"], []).append(rect)
        fullest, peak = plan.footprint.peak(tier=tier)  # type: ignore[arg-type]
        length = sum(float(rect.attrib["height"]) for rect in parts[str(fullest)]) / peak
        for moment in plan.footprint.moments:
            stack, held = parts.get(str(moment), []), plan.footprint.held(moment, tier)  # type: ignore[arg-type]
            assert sum(int(rect.attrib["data-bytes"]) for rect in stack) == held
            at = base
            for rect in stack:
                height = float(rect.attrib["height"])
                assert height == pytest.approx(int(rect.attrib["data-bytes"]) * length, abs=0.01)
                at -= height
                assert float(rect.attrib["y"]) == pytest.approx(at, abs=0.01), "bars stand on each other"
            assert at > 0, "within the picture"
        for line in chart.iter("line"):
            if line.attrib["class"] == "budget":
                budget = plan.host_budget if tier == "host" else plan.budget
                assert int(line.attrib["data-bytes"]) == budget
                assert base - float(line.attrib["y1"]) == pytest.approx(budget * length, abs=0.02)


def test_levers_are_bars_with_their_reasons(found: Answer, page: str) -> None:
    plan = found.plans[0]
    strips = {name: each for name, each in drawings(page).items() if name.startswith("lever-")}
    assert len(strips) == len(plan.steps)
    lengths = []
    before = plan.steps[0].peak_bytes
    for step, strip in zip(plan.steps, strips.values(), strict=True):
        bars = [rect for rect in strip.iter("rect") if "data-bytes" in rect.attrib]
        counts = [int(rect.attrib["data-bytes"]) for rect in bars]
        assert sum(counts) == max(before, step.peak_bytes) and counts[0] == min(before, step.peak_bytes)
        lengths += [
            float(rect.attrib["width"]) / count for rect, count in zip(bars, counts, strict=True) if count > 2**30
        ]
        assert step.lever in words(strip)[0]
        before = step.peak_bytes
    assert max(lengths, default=1) == pytest.approx(min(lengths, default=1), rel=1e-3)
    text = re.sub(r"<[^>]+>", "", page)
    for step in plan.steps[1:]:
        assert step.reason in text.replace("&amp;", "&")
        assert all(f"{key} = " in text for key in step.settings)


def test_the_page_is_well_formed_and_can_be_read_out(page: str) -> None:
    tags = parsed(page)
    assert page.startswith("<!DOCTYPE html>") and set(tags.ids.values()) == {1}
    for _, name, value in tags.attributes:
        if name in ("aria-labelledby", "for"):
            assert value and set(value.split()) <= tags.ids.keys()
    for name, drawing in drawings(page).items():
        assert drawing.attrib["role"] == "img" and drawing.findtext("title"), name
        if "strip" not in drawing.attrib["class"]:
            assert drawing.findtext("desc"), name


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not {"link", "img", "iframe", "image", "use"} & parsed(page).tags.keys()
    assert not [each for each in parsed(page).attributes if each[1] in ("src", "href", "xlink:href")]
    outside = page.replace("http://127.0.0.1:8777", "")  # a setting of the plan
    assert "://" not in outside and "@import" not in page and "@font-face" not in page
    assert set(re.findall(r"url\((.*?)\)", page)) == {"#frozen"}
    assert len(page.encode()) < 300_000


def test_what_users_name_is_text(found: Answer) -> None:
    plain = parsed(plan_page(found.plans, found.wanted.notes, found.helps, "a model"))
    notes = [*found.wanted.notes, NAME]
    named = plan_page(found.plans, notes, found.helps, f"{NAME}\x1b[2J\u202e\udcff")
    assert parsed(named).tags == plain.tags + Counter({"li": 1})
    assert "&lt;script&gt;alert" in named and "<script>alert" not in named
    assert "\\x1b[2J\\u202e\\udcff" in named and named.encode("utf-8")


def test_settings_are_text_too() -> None:
    given = answer(asked(f"output={NAME!r}"), as_given=True)
    page = plan_page(given.plans)
    assert parsed(page).tags["script"] == 1 and "&lt;script&gt;alert" in page


def test_the_page_is_made_at_once(found: Answer) -> None:
    begin = time.process_time()
    plan_page(found.plans, found.wanted.notes, found.helps, "a model")
    assert time.process_time() - begin < 0.3


def test_the_next_plans_are_there_with_their_differences() -> None:
    plans = answer(SEARCHED["one that fits"]).plans
    text = re.sub(r"<[^>]+>", "", plan_page(plans))
    assert len(plans) == 3
    for plan in plans[1:]:
        changes = differences(plans[0], plan)
        assert changes and all(change in text for change in changes)
        for change in changes:
            key, _, after = re.fullmatch(r"(\S+) (.+) → (.+)", change).groups()  # type: ignore[union-attr]
            value: object = plan.scene.config
            for name in key.split("."):
                value = getattr(value, name)
            assert str(value) in after
    assert differences(plans[0], plans[0]) == []


def test_a_plan_that_does_not_fit_says_what_would_help() -> None:
    refused = answer(SEARCHED["one that does not"])
    page = plan_page(refused.plans, (), refused.helps)
    assert "Does not fit" in page and refused.helps
    text = re.sub(r"<[^>]+>", "", page)
    assert all(str(each) in text.replace("&amp;", "&") for each in refused.helps)


def test_tensors_are_those_of_the_batch() -> None:
    fields = {field.name: str(field.type) for field in dataclasses.fields(Experience)}
    assert [tensor.name for tensor in BATCH] == list(fields)
    first = {field.name for field in dataclasses.fields(Rollout)}
    second = {field.name for field in dataclasses.fields(ScoredRollout)} - first
    for tensor in BATCH:
        dtype, dims = re.fullmatch(r"(\w+)\[Tensor, '(.*)'\]", fields[tensor.name]).groups()  # type: ignore[union-attr]
        assert dtype.lower() == tensor.dtype
        assert dims.replace("batch", "rollout").split() == list(tensor.dims)
        assert tensor.phase == ("generate" if tensor.name in first else "score" if tensor.name in second else "learn")


def test_shapes_are_those_of_the_plan() -> None:
    plan = answer(asked(prompt_tokens=100, response_tokens=50, rollout=24), as_given=True).plans[0]
    sequences = next(tensor for tensor in BATCH if tensor.name == "sequences")
    assert sequences.numbers(plan.scene) == "[24, 150]" and sequences.bytes(plan.scene) == 24 * 150 * 8
    assert Tensor("x", "bool", (), "", "score").bytes(plan.scene) == 1
    values = next(tensor for tensor in BATCH if tensor.name == "values")
    assert values.shape == "[rollout, response]" and values.bytes(plan.scene) == 24 * 50 * 4
    several = plan.scene.config.critic.model_copy(update={"heads": "vector"})
    reward = plan.scene.config.reward.model_copy(
        update={
            "source": "combined",
            "parts": {"kind": PartSection(source="function"), "brief": PartSection(source="function")},
        }
    )
    config = plan.scene.config.model_copy(update={"critic": several, "reward": reward})
    assert values.numbers(dataclasses.replace(plan.scene, config=config)) == "[24, 50, 3]", (
        "two parts and the penalties"
    )
    page = plan_page([plan])
    assert "rollout = 24, prompt = 100, response = 50" in page and "[rollout, prompt+response]" in page


def test_every_kind_and_holder_has_a_colour() -> None:
    for way, names in (("kind", KINDS), ("holder", HOLDERS)):
        for name in names:
            assert re.search(rf"^\.{way}-{name.replace(' ', '-')}[ ,]", style_of("plan_page"), re.M), name

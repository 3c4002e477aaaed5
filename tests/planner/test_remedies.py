"""What is missing, in numbers that the bill has, and changes that are true to their word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fourfold.planner.hardware.machine import GIB
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import remedies, shortage
from fourfold.planner.scene import Scene
from fourfold.planner.search import search
from planner.searched import GPU, scene, simple


def nearest(budget: float, host: int = 0, **sections: Any) -> Plan:
    (plan,) = search(scene(**sections), round(budget * GIB), host * GIB, simple)
    assert not plan.fits
    return plan


def test_a_shortage_says_how_much_when_whose_and_what() -> None:
    plan = nearest(6, sharing={"mode": "none"})
    moment, held = plan.peak
    text = shortage(plan)
    assert f"in {moment} " in text and f"{held / GIB:.1f} GiB" in text
    assert f"{(held - 6 * GIB) / GIB:.1f} GiB more than the budget of 6.0 GiB" in text
    largest = max(
        plan.footprint.by(lambda item: f"{item.kind} of the {item.holder}", moment).items(), key=lambda e: e[1]
    )
    assert largest[0] in text


def test_the_host_can_be_what_is_short() -> None:
    text = shortage(replace(nearest(6, sharing={"mode": "none"}), budget=100 * GIB, host_budget=2**20))
    assert "host memory would hold" in text and "1.0 MiB" in text


def test_what_the_user_has_ruled_out_is_offered_and_true() -> None:
    given: dict[str, Any] = {"precision": {"frozen": "bfloat16"}, "sharing": {"mode": "adapters"}}
    plan = nearest(4.3, **given)
    found = {each.text: each.missing for each in remedies(plan, evaluate=simple)}
    assert found['precision.frozen = "int8" (--allow precision.frozen)'] == 0
    given["precision"] = {"frozen": "int8"}
    assert search(scene(**given), round(4.3 * GIB), 0, simple)[0].fits
    assert list(found.values()) == sorted(found.values(), key=bool)


def test_shorter_texts_and_larger_devices() -> None:
    def longer(given: Scene) -> Any:
        """With a cache that grows with the response."""
        bill, costs = simple(given)
        cache = next(item for item in bill.items if item.kind == "KV cache")
        grown = replace(cache, bytes=given.lengths.response * 2**27)
        return replace(bill, items=(*bill.items, grown)), costs

    given: dict[str, Any] = {"sharing": {"mode": "none"}, "sampling": {"max_new_tokens": 1024}}
    start = scene(**given)
    (plan,) = search(start, 30 * GIB, 0, longer)
    small, large = replace(GPU, name="small", memory=40 * GIB), replace(GPU, name="large", memory=400 * GIB)
    found = {str(each) for each in remedies(plan, devices=(large, small), evaluate=longer)}
    assert "sampling.max_new_tokens = 64: it fits" in found
    assert "a device of 400.0 GiB, such as large: it fits" in found

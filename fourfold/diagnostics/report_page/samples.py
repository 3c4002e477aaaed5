"""The same held-out prompts before and after training."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.numbers import change, short
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.pages.tables import NOTHING, Row, table
from fourfold.diagnostics.run_record import RunRecord


def figures_table(record: RunRecord) -> Element | None:
    """Metrics on held-out prompts before and after, with their change."""
    if record.before is None:
        return None
    before = record.before["metrics"]
    after = record.after["metrics"] if record.after is not None else _newest(record)
    names = [name for name in before if name in after] if after else list(before)
    rows = []
    for name in names:
        new = after.get(name)
        moved = NOTHING if new is None else change(new - before[name])
        rows.append(Row(h("code", name), [short(before[name]), NOTHING if new is None else short(new), moved]))
    last = "after" if record.after is not None else f"step {record.evaluations[-1]['step']}" if after else "after"
    return table("Held-out prompts", ("", "before", last, "change"), rows, "figures")


def _newest(record: RunRecord) -> dict[str, float]:
    if not record.evaluations:
        return {}
    return {name.removeprefix("eval_"): value for name, value in record.evaluations[-1].items()}


def samples_section(record: RunRecord, count: int) -> Iterator[Child]:
    """Responses side by side. What both begin with is dimmed: the same random numbers drew them."""
    yield figures_table(record)
    if record.before is None or record.after is None:
        return
    texts = list(zip(record.before["prompts"], record.before["responses"], record.after["responses"], strict=False))
    every = max(1, len(texts) // max(1, count))
    yield h("p", "Both are drawn with the same random numbers; what they have in common at their start is dimmed.",
            class_="muted")  # fmt: skip
    yield h("ol", [_sample(*each) for each in texts[::every][:count]], class_="samples")


def _sample(prompt: str, before: str, after: str) -> Element:
    common = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    return h(
        "li",
        h("p", prompt, class_="prompt"),
        h("div", h("h4", "before"), _text(before, common), class_="side"),
        h("div", h("h4", "after"), _text(after, common), class_="side"),
    )


def _text(said: str, common: int) -> Element:
    if not said:
        return h("p", "nothing", class_="said empty")
    return h("p", h("span", said[:common], class_="common") if common else None, said[common:], class_="said")

"""What the doctor says of the run: the ill first, each with its evidence and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.doctor import Examination, Verdict, by_severity
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.report_page.charts import coded

SAID = {"ill": "ill", "warning": "warning", "note": "note", "good": "healthy"}


def doctor_section(found: Examination) -> Iterator[Child]:
    """A card for each verdict; what is healthy is folded away, and so is what could not be judged."""
    ordered = by_severity(found.verdicts)
    wrong = [each for each in ordered if each.severity != "good"]
    good = [each for each in ordered if each.severity == "good"]
    if wrong:
        yield h("ul", [_card(each) for each in wrong], class_="verdicts")
    if good:
        cards = h("ul", [_card(each) for each in good], class_="verdicts")
        yield h("details", h("summary", f"{len(good)} healthy"), cards) if wrong else cards
    if found.unjudged:
        lines = [h("li", coded(f"{', '.join(names)}: {reason}")) for reason, names in found.reasons.items()]
        summary = h("summary", f"{len(found.unjudged)} not judged")
        yield h("details", summary, h("ul", lines, class_="dashes"), open_="" if found.too_early else None)


def _card(verdict: Verdict) -> Element:
    first, last = verdict.steps
    when = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    head = h(
        "div",
        h("h3", verdict.name),
        h("span", SAID[verdict.severity], class_=f"severity {verdict.severity}"),
        h("span", f"{verdict.confidence:.0%} sure", class_="sure"),
        h("span", when, class_="sure"),
        class_="verdict-head",
    )
    setting, _, reason = verdict.remedy.partition("#")
    why = h("span", f" {reason.strip()}", class_="sure") if reason.strip() else None
    remedy = h("p", h("b", "Try: "), h("code", setting.strip()), why, class_="remedy") if setting.strip() else None
    return h("li", head, h("p", coded(verdict.evidence)), remedy, class_=f"is-{verdict.severity}")

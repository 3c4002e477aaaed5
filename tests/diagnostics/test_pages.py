"""What all pages share: axes, colours that can be read, switches that work without a script."""

from __future__ import annotations

import pytest

from diagnostics.page_checks import colours, contrast, parsed, style_of
from fourfold.diagnostics.pages.document import document, switch
from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import nice


@pytest.mark.parametrize(("rough", "step"), [(0.7, 1), (1.1, 2), (2.3, 2.5), (30, 50), (0.018, 0.02), (6e3, 1e4)])
def test_axes_are_marked_at_round_figures(rough: float, step: float) -> None:
    assert nice(rough) == pytest.approx(step)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    """4.5 for text and 3 for lines that mean something (WCAG 2.2, 1.4.3 and 1.4.11)."""
    known = colours(style_of("pages"), scheme)
    for text in ("ink", "muted"):
        for ground in ("paper", "card", "track", "stripe", "accent-soft"):
            assert contrast(known[text], known[ground]) >= 4.5, (text, ground)
    for text, ground in (("accent", "paper"), ("good", "paper"), ("danger", "danger-soft")):
        assert contrast(known[text], known[ground]) >= 4.5, (text, ground)
    for lines in ("edge", "accent", "danger"):
        assert contrast(known[lines], known["paper"]) >= 3, lines


def test_a_switch_has_one_button_pressed() -> None:
    made = switch("by", "what is shown", {"one": "1", "two": "2"})
    buttons = {each.get("id"): each.get("checked") for each in made.iter("input")}
    assert buttons == {"one": "", "two": None}
    assert [each.get("for") for each in made.iter("label")] == list(buttons)


def test_a_document_has_the_style_of_all_pages_first() -> None:
    page = document("a & b", [h("main", "text")], "fourfold.diagnostics.plan_page")
    tags = parsed(page)
    assert tags.tags["style"] == tags.tags["script"] == 1 and "<title>a &amp; b</title>" in page
    assert page.index("--paper: ") < page.index(".drawing svg")

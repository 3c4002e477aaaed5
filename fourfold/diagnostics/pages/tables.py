"""Tables of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import Child, h

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line: its name, and its cells."""

    name: Child
    cells: Sequence[Child]
    class_: str | None = None


def table(caption: str, heads: Sequence[str], rows: Sequence[Row], class_: str = "") -> Element:
    """A table in a box of its own, which scrolls where the page is narrower."""
    first, *others = heads
    texts = [_is_text(cell) for cell in rows[0].cells]
    columns = [
        h("th", each, scope="col", class_="why" if left else None) for each, left in zip(others, texts, strict=True)
    ]
    head = h("tr", h("th", first, scope="col"), columns)
    body = [
        h("tr", h("th", row.name, scope="row"), [cell if _is_cell(cell) else h("td", cell) for cell in row.cells],
          class_=row.class_)
        for row in rows
    ]  # fmt: skip
    made = h("table", h("caption", caption), h("thead", head), h("tbody", body), class_=class_ or None)
    return h("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _is_cell(cell: Child) -> bool:
    return isinstance(cell, Element) and cell.tag == "td"


def _is_text(cell: Child) -> bool:
    """Whether a cell is read from the left, rather than compared with those below it."""
    return isinstance(cell, Element) and cell.get("class") == "why"


def measure(share: float, said: str) -> Element:
    """A figure with a bar behind it."""
    return h("span", said, class_="measure", style=f"--share:{max(share, 0.005):.3f}")

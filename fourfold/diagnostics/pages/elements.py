"""HTML and SVG as trees of elements: what is text stays text, because nothing is put together from strings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None
# Control codes, direction marks and halves of characters could hide text or stop a reader; they are shown as escapes.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def h(tag: str, *children: Child | Iterable[Child], **attributes: str | float | None) -> Element:
    """An element; None is no child and no attribute, "class_" is class, and "aria_label" is aria-label."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), number(value) if isinstance(value, float) else str(value))
    for child in children:
        _put(made, child)
    return made


def _put(made: Element, child: Child | Iterable[Child]) -> None:
    if isinstance(child, str):
        if len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    elif isinstance(child, Element):
        made.append(child)
    elif child is not None:
        for each in child:
            _put(made, each)


def number(value: float) -> str:
    """A coordinate, to a thousandth."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def serialised(root: Element) -> str:
    """The document."""
    text = "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)

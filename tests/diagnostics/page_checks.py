"""Checks of pages: what is opened is closed, what is drawn is well-formed, and what can be read on which ground."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import fourfold.diagnostics

FOLDER = Path(fourfold.diagnostics.__path__[0])


def style_of(package: str) -> str:
    """The style of a page of this package, that of all pages included."""
    files = (FOLDER / "pages" / "base.css", FOLDER / package / "page.css")
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def drawings(page: str) -> dict[str, ElementTree.Element]:
    """The pictures by their ids; each is well-formed XML alone."""
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]
    return {each.attrib["aria-labelledby"].split("-title")[0]: each for each in found}


def words(element: ElementTree.Element) -> list[str]:
    return [text.strip() for text in element.itertext() if text.strip()]


class Tags(HTMLParser):
    """Checks that what is opened is closed, and collects what a test looks at."""

    VOID = ("meta", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id" and value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


def colours(style: str, scheme: str) -> dict[str, str]:
    """The colours of a style by their names, in the scheme "light" or "dark"."""
    block = r"^@media screen and \(prefers-color-scheme: dark\) \{.*?^\}"
    dark = "".join(re.findall(block, style, re.S | re.M))
    light = re.sub(block, "", style, flags=re.S | re.M)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light + (dark if scheme == "dark" else "")))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)

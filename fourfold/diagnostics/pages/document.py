"""The document around a page: one file with its style and its script in it, which asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import Child, h, serialised


def document(title: str, body: Iterable[Element], package: str) -> str:
    """HTML of a page: `package` has the style (page.css) and, where it has one, the script (page.js) of its own."""
    script = _file(__package__, "base.js") + _file(package, "page.js")
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("style", _file(__package__, "base.css") + _file(package, "page.css")),
    )
    return serialised(h("html", head, h("body", body, h("script", script)), lang="en"))


def _policy(script: str) -> str:
    """What a browser may do for the page: load nothing, and run this script alone (Content Security Policy 3).

    Texts of models are escaped; should one ever get through, it could neither run nor send anything.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def _file(package: str | None, name: str) -> str:
    assert package is not None
    file = files(package).joinpath(name)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def section(name: str, title: str, content: Iterable[Child]) -> Element:
    """A part of the page with its heading."""
    return h("section", h("h2", title, id=f"{name}-heading"), content, id=name, aria_labelledby=f"{name}-heading")


def tile(name: str, figure: str, said: str, more: Element | None = None) -> Element:
    """A figure of the page's head: its name, its number, and what it is of."""
    return h("div", h("dt", name), h("dd", h("strong", figure), h("span", said), more))


def switch(name: str, about: str, choices: Mapping[str, str]) -> Element:
    """Buttons of which one is pressed, the first to begin with; `choices` are ids and what is on them.

    A page's style finds out by `:has(#ID:checked)` which one it is, so that it works without a script.
    """
    made: list[Element] = []
    for index, (choice, said) in enumerate(choices.items()):
        made.append(h("input", type="radio", name=name, id=choice, checked=None if index else ""))
        made.append(h("label", said, for_=choice))
    # More than that wrap on a phone, where a row of them would be torn.
    return h("div", made, class_="switch loose" if len(choices) > 5 else "switch", role="radiogroup", aria_label=about)

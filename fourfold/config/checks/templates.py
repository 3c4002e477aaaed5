"""Templates that settings give."""

from __future__ import annotations

from string import Formatter


def unfit_template(template: str, needed: str, *others: str) -> str:
    """What is wrong with a text in which {needed} has to stand and {others} may; empty where nothing is."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"which cannot be read ({error})"
    names = [name for _, name, _, _ in parts if name is not None]
    if unknown := sorted(set(names) - {needed, *others}):
        return f"which asks for {', '.join(map(repr, unknown))}"
    if any(spec or conversion for _, _, spec, conversion in parts):
        return "which formats a text as if it were a number"
    return "" if needed in names else f"which leaves the {needed} out"

"""Numbers for people."""

from __future__ import annotations


def short(value: float) -> str:
    """A number for people, with three digits."""
    if value == 0:
        return "0"
    sign, size = "\N{MINUS SIGN}" if value < 0 else "", abs(value)
    if 1e-3 <= size < 1e5:
        return f"{sign}{size:,.3g}" if size < 1000 else f"{sign}{size:,.0f}"
    mantissa, power = f"{size:.1e}".split("e")
    return f"{sign}{mantissa.removesuffix('.0')}e{int(power)}"


def change(value: float) -> str:
    """A difference for people, with its sign."""
    return short(value) if value <= 0 else f"+{short(value)}"

"""Bytes and seconds, read and written for people."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def parse_bytes(text: str, given_by: str) -> int:
    """'40GiB', '80 GB' or '512MiB' as bytes; `given_by` names the option in the error."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    count = 0 if found is None or unit is None else round(float(found[1]) * unit)
    if not count:
        raise ValueError(
            f"{given_by} {text}: allowed are sizes of a byte and more with their unit, such as 40GiB (2**30 bytes), "
            "80GB (1e9) or 512MiB"
        )
    return count


def size(count: float) -> str:
    """Bytes in GiB, or in MiB below one."""
    if abs(count) >= 2**30:
        return f"{count / 2**30:,.1f} GiB"
    return f"{count / 2**20:,.1f} MiB" if abs(count) < 10 * 2**20 else f"{count / 2**20:,.0f} MiB"


def seconds(count: float) -> str:
    """Seconds with three digits, or hours and minutes where there are many."""
    if count >= 7200:
        return f"{count / 3600:,.1f} h"
    if count >= 120:
        return f"{count / 60:,.1f} min"
    return f"{count:.3g} s" if count >= 0.001 or count == 0 else f"{count * 1e3:.3g} ms"


def quantity(count: float) -> str:
    """A large count with a prefix: 1.2 T, 340 G, 5.0 M."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:,.3g} {prefix}"
    return f"{count:,.3g} "

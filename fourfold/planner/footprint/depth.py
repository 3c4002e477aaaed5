"""Many layers from a few: what a pass takes is a straight line in its layers, in every stage of it.

A stage is a stretch in which the fullest moment is the same whatever the depth is: all layers are alike but the lowest,
whose input may need no gradient, so that of those in the middle none is fuller than the second and the last. Where it
is not, as where a head outweighs a few layers but not many, something grows less with depth, and the pass is run whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fourfold.planner.bill import Kind


class Line(NamedTuple):
    """Bytes, and how many of them another layer adds."""

    bytes: int
    a_layer: int = 0


Stages = dict[str, dict[Kind, Line]]
# The stage under which stands the most that lies below the device.
BELOW = "below the device"


def at_depth(run: Callable[[int], Stages], layers: int, period: int = 1) -> Stages:
    """The stages of `run(layers)`, from two runs of fewer where there are many; every `period` layers are alike."""
    few = layers % period + (3 * period if period > 1 else 4)
    more = few + period
    if layers <= more:
        return run(layers)
    first, second = run(few), run(more)
    if any(
        line.bytes < first[stage].get(kind, Line(0)).bytes
        for stage in second
        for kind, line in second[stage].items()
        if stage in first
    ):
        return run(layers)
    return {
        stage: {
            kind: _extended(first[stage].get(kind, Line(0)), line, layers - more, period)
            for kind, line in second[stage].items()
        }
        for stage in second
        if stage in first
    }


def _extended(before: Line, line: Line, further: int, period: int) -> Line:
    """The line `further` layers on, from its last two points."""
    a_layer = (line.bytes - before.bytes) // period
    return Line(line.bytes + further // period * (line.bytes - before.bytes), a_layer or line.a_layer)

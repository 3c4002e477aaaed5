"""Many layers from a few: what a pass takes is a straight line in its layers, in every stage of it.

A stage is a stretch in which the fullest moment is the same whatever the depth is: all layers are alike, so of those in
the middle none is fuller than both the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable

from fourfold.planner.bill import Kind

# Bytes by kind at the fullest moment of each stage; what lies below the device goes under BELOW.
Stages = dict[str, dict[Kind, int]]


def at_depth(run: Callable[[int], Stages], layers: int, period: int = 1) -> Stages:
    """The stages of `run(layers)`, taken from two runs of fewer where there are many; every `period` layers are alike."""
    few = layers % period + 2 * period
    more = few + period
    if layers <= more:
        return run(layers)
    first, second = run(few), run(more)
    steps = (layers - few) // period
    return {
        stage: {
            kind: first[stage].get(kind, 0) + steps * (size - first[stage].get(kind, 0))
            for kind, size in second[stage].items()
        }
        for stage in first.keys() & second.keys()
    }

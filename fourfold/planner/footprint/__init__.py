"""Predicted bytes of a PPO stage: who holds what, where and when, by formula from settings and architecture."""

from __future__ import annotations

from fourfold.planner.bill import Footprint
from fourfold.planner.footprint import held, work
from fourfold.planner.footprint.roles import cast_of
from fourfold.planner.scene import Scene

__all__ = ["footprint"]


def footprint(scene: Scene) -> Footprint:
    """The memory bill of a scene."""
    cast = cast_of(scene)
    texts = work.texts_of(scene)
    there = work.moments_of(scene, cast)
    items = [
        *held.weights(scene, cast),
        *held.sampler_copy(scene, cast),
        *held.optimizer(scene, cast),
        *held.experience(scene, cast, texts),
        *work.passes_of(scene, cast),
    ]
    return Footprint(tuple(work.only(items, there)))

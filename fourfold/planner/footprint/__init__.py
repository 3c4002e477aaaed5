"""Predicted bytes of a PPO stage: who holds what, where and when, by formula from settings and architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fourfold.config.checks.critic import one_pass
from fourfold.planner.bill import MOMENTS, Footprint, Item, Moment
from fourfold.planner.footprint import held, process, work
from fourfold.planner.footprint.roles import Cast, cast_of
from fourfold.planner.parallel import sharded
from fourfold.planner.scene import Scene

__all__ = ["footprint"]


def footprint(scene: Scene) -> Footprint:
    """The memory bill of a scene: of the device that holds most where its layout has several."""
    cast = cast_of(scene)
    items = [
        *held.weights(scene, cast),
        *held.sampler_copy(scene, cast),
        *held.optimizer(scene, cast),
        *held.experience(scene, cast, work.texts_of(scene)),
        *work.passes_of(scene, cast),
        *process.loading(scene, cast),
        *process.saving(scene, cast),
        *process.framework(scene),
    ]
    return sharded(Footprint(tuple(_only(items, moments_of(scene, cast)))), scene)


def moments_of(scene: Scene, cast: Cast) -> frozenset[Moment]:
    """The moments that a run of this scene has."""
    config, gone = scene.config, set[Moment]()
    if config.ppo.kl_estimator != "full":
        gone.add(Moment("score", "actor"))
    if config.sampling.overlap_scoring:
        gone |= {Moment("score", "reference"), Moment("score", "reward")}
    if config.reference.kind == "uniform":
        gone.add(Moment("score", "reference"))
    if config.reference.holds_step_0:  # which is asked in its phase always
        gone.discard(Moment("score", "reference"))
    if one_pass(config):
        gone |= {Moment("learn", "critic"), Moment("learn", "actor")}
    else:
        gone.add(Moment("learn", "trunk"))
    return frozenset(MOMENTS) - gone


def _only(items: Iterable[Item], moments: frozenset[Moment]) -> Iterator[Item]:
    """The items in the moments that there are."""
    for item in items:
        if item.bytes and item.moments & moments:
            yield replace(item, moments=item.moments & moments)

"""What the KL is taken to: which priors can stand where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

# What a prior has no use for, and why.
_ENGINE = {
    "uniform": "which has no weights that llama.cpp could run",
    "moving": "whose weights move, and llama.cpp runs a file that is written once",
}
_SERVICE = {
    "uniform": "which has no weights that a service could hold",
    "moving": "whose weights move with this run's actor, and a service holds those of step 0",
}


def prior(config: RunConfig) -> Iterator[str]:
    given, kind = config.reference, config.reference.kind
    if given.model and given.checkpoint:
        yield (
            f"reference.checkpoint: given {given.checkpoint!r} beside reference.model = {given.model!r}: the KL is "
            "taken to one of them; leave the other out"
        )
    if kind in _ENGINE and given.engine != "torch":
        yield (
            f"reference.engine: given {given.engine!r} beside reference.prior = {kind!r}, {_ENGINE[kind]}; set engine "
            "to 'torch', or prior to 'step_0'"
        )
    if kind in _SERVICE and given.residency == "service":
        yield (
            f"reference.residency: given 'service' beside reference.prior = {kind!r}, {_SERVICE[kind]}; allowed: "
            "'keep', 'park', 'stream', 'cpu'"
        )
    if kind == "moving":
        yield from _moving(config)
    if kind == "checkpoint" and config.precision.reference != "auto":
        yield (
            f"precision.reference: given {config.precision.reference!r} beside reference.checkpoint, whose distance "
            "from the actor hides what rounding does to it; leave precision.reference out"
        )


def _moving(config: RunConfig) -> Iterator[str]:
    if config.precision.reference != "auto":
        yield (
            f"precision.reference: given {config.precision.reference!r} beside reference.prior = 'moving', whose "
            "weights are float32 as the actor's are, because small moves would be lost in rounding; leave "
            "precision.reference out"
        )
    if config.sharing.mode == "trunk" and config.trunk.train:
        yield (
            "reference.prior: given 'moving' beside trunk.train = true: below it would stay the trunk of step 0, so "
            "that it would be a policy that the actor never was; set trunk.train = false, or prior to 'step_0'"
        )
    every, steps = config.reference.copy_every, config.ppo.steps
    if "ppo" in config.stages and every >= steps:
        yield (
            f"reference.copy_every: given {every}, so that nothing is copied before the end of ppo.steps = {steps}; "
            f"allowed: at most {steps - 1}, or 0 for the average"
        )

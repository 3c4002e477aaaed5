"""How deep the trunk reaches, and whose turn it is to learn over a trained one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def trunk(config: RunConfig) -> Iterator[str]:
    given = config.trunk
    if config.sharing.mode != "trunk":
        return
    if given.branch_layers == 0 and not given.train:
        yield (
            "trunk.branch_layers: given 0, which leaves the roles nothing but norm and head above a frozen trunk; "
            "allowed: 1 or more; try 4, or trunk.train = true"
        )
    if given.branch_layers == 0 and given.decoupling > 0:
        yield (
            f"trunk.decoupling: given {given.decoupling:g} beside trunk.branch_layers = 0: both heads read the trunk's "
            "features themselves, which no penalty can turn apart; set trunk.branch_layers to 1 or more, or "
            "trunk.decoupling = 0"
        )
    if given.train and config.precision.frozen != "auto":
        yield (
            f"precision.frozen: given {config.precision.frozen!r} beside trunk.train = true, which trains a copy of "
            "the trunk's weights; leave precision.frozen out, or set trunk.train = false"
        )
    if given.train and config.memory.optimizer_residency == "offload":
        yield (
            "memory.optimizer_residency: given 'offload' beside trunk.train = true, whose two gradients are compared "
            "on the device before they go down; allowed there: 'keep', 'park'"
        )
    mini_batches = config.ppo.updates_of(config.rows_at(0))
    if "ppo" in config.stages and 0 < mini_batches <= given.alternate:
        yield (
            f"trunk.alternate: given {given.alternate}, but a rollout has {mini_batches} mini-batches in all (ppo."
            "num_epochs x ppo.rollout_batch_size / ppo.mini_batch_size), so that the actor never has a turn; allowed: "
            f"at most {mini_batches - 1}"
        )


def trunk_depth(config: RunConfig, total: int) -> int:
    """Layers of the trunk of a model of `total` layers, 0 where there is none; ValueError where none would be left."""
    if config.sharing.mode == "none":
        return 0
    trunk = config.sharing.mode == "trunk"
    key, own = (
        ("trunk.branch_layers", config.trunk.branch_layers) if trunk else ("adapters.layers", config.adapters.layers)
    )
    if not trunk and own in (0, total):
        return 0
    if own >= total:
        instead = 'or use sharing.mode = "none"' if trunk else "or 0 for all"
        least = 0 if trunk and config.trunk.train else 1
        raise ValueError(
            f"{key} = {own}: the model has {total} layers, so {least} to {total - 1} are allowed; {instead}"
        )
    return total - own

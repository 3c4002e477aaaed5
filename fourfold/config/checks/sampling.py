"""Samplers with another distribution than the trained one: where they can stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def sampling(config: RunConfig) -> Iterator[str]:
    given = config.sampling
    if given.engine == "local" and given.weights != "as_trained" and config.sharing.mode == "adapters":
        yield (
            f"sampling.weights: given {given.weights!r} beside sharing.mode = 'adapters', which holds one base for all "
            f"roles, the sampler too; leave it out and set precision.frozen = {given.weights!r}: adapters are then "
            "trained above what is drawn from"
        )

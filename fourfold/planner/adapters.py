"""How many numbers low-rank adapters have: r (m + n) for a matrix [m, n] (Hu et al. 2021, "LoRA", section 4.1)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from fourfold.planner.architectures import Architecture
from fourfold.planner.linears import linears_between


def adapter_parameters(architecture: Architecture, rank: int, targets: Collection[str] = (), layers: int = 0) -> int:
    """Numbers of the low-rank matrices on the `layers` upper layers (0: all); no targets: on all linear layers.

    DoRA's lengths are not among them. ValueError for a target that the architecture does not have.
    """
    return _numbers(architecture, rank, tuple(targets), layers)


@lru_cache(maxsize=256)  # a search asks thousands of times
def _numbers(architecture: Architecture, rank: int, targets: tuple[str, ...], layers: int) -> int:
    of_all = linears_between(architecture, 0, architecture.layers)
    known = {each.name for each in of_all}
    if unknown := sorted(set(targets) - known):
        raise ValueError(
            f"adapters.targets: given {', '.join(unknown)}; this model's linear layers are {', '.join(sorted(known))}; "
            "leave it out to adapt them all"
        )
    adapted = linears_between(architecture, architecture.layers - layers, architecture.layers) if layers else of_all
    return sum(each.count * rank * (each.inputs + each.outputs) for each in adapted if each.name in (targets or known))

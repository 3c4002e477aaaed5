"""Every memory lever, declared once: what it is called, what switches it on, what it saves, costs, changes, excludes.

docs/memory.md, the tests of whole updates (tests/training/test_levers.py) and benchmarks/levers.py are made from this
list; the mechanism lies in the module of `memory/` or `models/` that bears the lever's name or is named in `where`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# What a lever does to an update: nothing, bit for bit; no more than its bound; or other parameters are trained at all.
Change = Literal["exact", "bounded", "other parameters"]


@dataclass(frozen=True)
class Lever:
    """One memory or compute measure."""

    name: str
    where: str  # the module with the mechanism
    settings: Mapping[str, Any]  # dotted keys that switch it on, as in a configuration
    saves: str
    costs: str
    change: Change
    bound: float = 0.0  # "bounded": largest |difference of the weights' move| / |move| of one update on a tiny model
    baseline: Mapping[str, Any] = field(default_factory=dict)  # what it is compared with, where that is not the default
    excludes: tuple[str, ...] = ()  # names of levers that are refused beside it


SEPARATE: Mapping[str, Any] = {"sharing.mode": "none"}
ADAPTERS: Mapping[str, Any] = {"sharing.mode": "adapters"}

LEVERS: tuple[Lever, ...] = (
    Lever(
        name="trunk",
        where="fourfold.models.split",
        settings={"sharing.mode": "trunk"},
        baseline=SEPARATE,
        saves="three copies of the lower layers, their gradients and moments; most passes run the upper layers only",
        costs="the lower layers are not trained",
        change="other parameters",
        excludes=("adapters", "adapters over a trunk"),
    ),
    Lever(
        name="adapters",
        where="fourfold.models.adapters",
        settings=ADAPTERS,
        baseline=SEPARATE,
        saves="three copies of the whole base; gradients and moments but for the adapters",
        costs="low rank; two small products more for each matrix",
        change="other parameters",
        excludes=("trunk", "adapters over a trunk"),
    ),
    Lever(
        name="adapters over a trunk",
        where="fourfold.models.adapters",
        settings={**ADAPTERS, "adapters.layers": 2},
        baseline=SEPARATE,
        saves="what both save",
        costs="only the upper layers adapt",
        change="other parameters",
        excludes=("trunk", "adapters"),
    ),
    Lever(
        name="checkpointing",
        where="fourfold.memory.activations",
        settings={"memory.checkpointing": "layers"},
        saves="of every layer's activations all but its input",
        costs="the layers' forward pass once more",
        change="exact",
        excludes=("checkpointing attention",),
    ),
    Lever(
        name="checkpointing attention",
        where="fourfold.memory.activations",
        settings={"memory.checkpointing": "attention"},
        saves="the activations inside attention",
        costs="attention's forward pass once more",
        change="exact",
        excludes=("checkpointing",),
    ),
    Lever(
        name="activation offload",
        where="fourfold.memory.activation_offload",
        settings={"memory.activation_offload": True},
        saves="the layers' activations while they wait for the backward pass; they lie in host memory or in a file",
        costs="copying them out and back",
        change="exact",
    ),
    Lever(
        name="micro-batches",
        where="fourfold.models.roles",
        settings={"ppo.micro_batch_size": 1},
        saves="activations, in proportion",
        costs="small products are slower",
        change="bounded",
        bound=1e-4,
    ),
)


def lever(name: str) -> Lever:
    """The lever of this name."""
    return next(each for each in LEVERS if each.name == name)

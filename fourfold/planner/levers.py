"""Every memory lever, declared once: what it is called, what switches it on, what it saves, costs, changes, excludes.

tests/training/test_levers.py runs whatever stands in this list, and every pair, on a whole update; docs/memory.md tells
the same for people, and benchmarks/levers.py measures it at a real model's sizes. The mechanism lies
in the module named in `where`.
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
# What a step within the backward pass needs.
ONE_MICRO_BATCH: Mapping[str, Any] = {
    "ppo.mini_batch_size": 4,
    "ppo.micro_batch_size": 4,
    "ppo.max_grad_norm": 0.0,
    "critic.max_grad_norm": 0.0,
}

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
        excludes=("optimizer in backward",),
    ),
    Lever(
        name="park reference",
        where="fourfold.memory.offload",
        settings={"reference.residency": "park"},
        saves="the reference's own weights, in every phase but score",
        costs="reading them once a step",
        change="exact",
        excludes=("stream reference",),
    ),
    Lever(
        name="stream reference",
        where="fourfold.memory.offload",
        settings={"reference.residency": "stream"},
        saves="the reference's own weights; in score all its decoder layers but two",
        costs="reading them once a micro-batch, while the layer before computes",
        change="exact",
        excludes=("park reference",),
    ),
    Lever(
        name="park reward",
        where="fourfold.memory.offload",
        settings={"reward.residency": "park"},
        saves="the reward model's own weights, in every phase but score",
        costs="reading them once a step",
        change="exact",
        excludes=("stream reward",),
    ),
    Lever(
        name="stream reward",
        where="fourfold.memory.offload",
        settings={"reward.residency": "stream"},
        saves="the reward model's own weights; in score all its decoder layers but two",
        costs="reading them once a micro-batch, while the layer before computes",
        change="exact",
        excludes=("park reward",),
    ),
    Lever(
        name="park optimizer",
        where="fourfold.memory.optimizers",
        settings={"memory.optimizer_residency": "park"},
        saves="Adam's moments but for one parameter's, always",
        costs="reading and writing them once an optimizer step",
        change="exact",
    ),
    Lever(
        name="optimizer in backward",
        where="fourfold.backends.local",
        settings={"memory.optimizer_in_backward": True, **ONE_MICRO_BATCH},
        baseline=ONE_MICRO_BATCH,
        saves="the gradients of a role but for a few parameters' at a time",
        costs="no clipping by the norm, no gradient accumulation, no ppo.target_kl",
        change="exact",
        excludes=("micro-batches", "float16"),
    ),
    Lever(
        name="adamw_8bit",
        where="fourfold.memory.optimizers",
        settings={"ppo.optimizer": "adamw_8bit", "critic.optimizer": "adamw_8bit"},
        baseline=SEPARATE,  # tensors of fewer than 4,096 numbers keep float32 moments, and tiny branches have no others
        saves="6 of the 8 bytes of moments a parameter",
        costs="rounded moments; on a CPU slower steps",
        change="bounded",
        bound=0.2,
    ),
    Lever(
        name="bfloat16",
        where="fourfold.memory.precision",
        settings={"precision.compute": "bfloat16"},
        saves="half of frozen weights, of cached and of passing activations; without instructions for it no time",
        costs="8 binary digits in every product; masters and moments are float32 all the same",
        change="bounded",
        bound=0.7,
        excludes=("float16", "half-precision frozen roles"),
    ),
    Lever(
        name="float16",
        where="fourfold.backends.scaling",
        # With the default the first steps of a tiny model would be skipped until the scale has fallen.
        settings={"precision.compute": "float16", "precision.loss_scale": 64.0},
        saves="what bfloat16 saves, with 11 binary digits",
        costs="gradients of actor and critic at the same time; steps that overflow are skipped",
        change="bounded",
        bound=0.45,  # 0.03 to 0.05, but 0.3 on adapters over a trunk: Adam makes steps of gradients that are near 0
        excludes=("bfloat16", "optimizer in backward"),
    ),
    Lever(
        name="half-precision frozen roles",
        where="fourfold.models.products",
        settings={"precision.frozen": "float16", "precision.reference": "float16", "precision.reward": "float16"},
        baseline={"sharing.mode": "trunk"},  # without anything shared there is nothing that is held for all
        saves="half of trunk or base and of the frozen roles' own weights, while trained roles compute in float32",
        costs="rounded weights; every KL is biased by what pre-flight measures; a base is widened for each product",
        change="bounded",
        bound=0.1,
        excludes=("bfloat16",),
    ),
)


def lever(name: str) -> Lever:
    """The lever of this name."""
    return next(each for each in LEVERS if each.name == name)

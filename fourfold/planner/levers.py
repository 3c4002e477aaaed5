"""Every memory lever, declared once: what it is called, what switches it on, what it saves, costs, changes, excludes.

tests/training/test_levers.py runs whatever stands in this list, and every pair, on a whole update; docs/memory.md tells
the same for people, and benchmarks/levers.py measures it at a real model's sizes. The mechanism lies
in the module named in `where`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.planner.engines import ENGINES
from fourfold.planner.lever import HALF, ORDER_OF_SUMS, SEPARATE, Lever
from fourfold.planner.rounded_roles import REFERENCES, REWARDS, ROUNDED_ROLES

TRUNK: Mapping[str, Any] = {"sharing.mode": "trunk"}
ADAPTERS: Mapping[str, Any] = {"sharing.mode": "adapters"}
# What a step within the backward pass needs.
ONE_MICRO_BATCH: Mapping[str, Any] = {
    "ppo.mini_batch_size": 4,
    "ppo.micro_batch_size": 4,
    "ppo.max_grad_norm": 0.0,
    "critic.max_grad_norm": 0.0,
}

# Of levers that set the same keys or halve the same rows, the one that saves most stands last.
LEVERS: tuple[Lever, ...] = (
    Lever(
        name="trunk",
        where="fourfold.models.split",
        settings={"sharing.mode": "trunk"},
        baseline=SEPARATE,
        saves="three copies of the lower layers, their gradients and moments; most passes run the upper layers only",
        costs="the lower layers are not trained",
        change="other parameters",
        excludes=("trained trunk", "adapters", "adapters over a trunk"),
    ),
    Lever(
        name="trained trunk",
        where="fourfold.models.trunk",
        settings={"sharing.mode": "trunk", "trunk.train": True},
        baseline=SEPARATE,
        saves="one of two trained copies of the lower layers with its moments; one pass for actor and critic",
        costs="no cached activations; a frozen copy of the lower layers for reference and reward, which stays when "
        "they are parked, streamed or at a service",
        change="other parameters",
        excludes=(
            "int8 base",
            "int8 dynamic base",
            "nf4 base",
            "trunk",
            "adapters",
            "adapters over a trunk",
            "optimizer in backward",
            "half-precision frozen roles",
            "offload optimizer",
        ),
        not_planned="what is learned by whom is no question of room",
    ),
    Lever(
        name="adapters",
        where="fourfold.models.adapters",
        settings=ADAPTERS,
        baseline=SEPARATE,
        saves="three copies of the whole base; gradients and moments but for the adapters",
        costs="low rank; two small products more for each matrix",
        change="other parameters",
        excludes=("trunk", "trained trunk", "adapters over a trunk", *REFERENCES, *REWARDS),
    ),
    Lever(
        name="adapters over a trunk",
        where="fourfold.models.adapters",
        settings={**ADAPTERS, "adapters.layers": 2},
        planned={**ADAPTERS, "adapters.layers": 4},
        baseline=SEPARATE,
        saves="what both save",
        costs="only the upper layers adapt",
        change="other parameters",
        excludes=("trunk", "trained trunk", "adapters", *REFERENCES, *REWARDS),
    ),
    Lever(
        name="checkpointing attention",
        where="fourfold.memory.activations",
        settings={"memory.checkpointing": "attention"},
        saves="the activations inside attention",
        costs="attention's forward pass once more",
        change="exact",
        excludes=("checkpointing", "checkpointing every second layer"),
    ),
    Lever(
        name="checkpointing every second layer",
        where="fourfold.memory.activations",
        settings={"memory.checkpointing": "layers", "memory.checkpoint_every": 2},
        saves="of every second layer's activations all but its input",
        costs="the forward pass of those layers once more",
        change="exact",
        excludes=("checkpointing attention", "checkpointing"),
        not_planned="a strength of checkpointing, which a search takes as a whole",
    ),
    Lever(
        name="checkpointing",
        where="fourfold.memory.activations",
        settings={"memory.checkpointing": "layers"},
        every="memory.checkpoint_every",
        saves="of every layer's activations all but its input",
        costs="the layers' forward pass once more",
        change="exact",
        excludes=("checkpointing attention", "checkpointing every second layer"),
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
        halves=("ppo.micro_batch_size", "ppo.mini_batch_size"),
        saves="activations, in proportion",
        costs="small products are slower",
        change="bounded",
        bound=ORDER_OF_SUMS,
        excludes=("optimizer in backward",),
    ),
    Lever(
        name="park reference",
        where="fourfold.memory.offload",
        settings={"reference.residency": "park"},
        saves="the reference's own weights, in every phase but score",
        costs="reading them once a step",
        change="exact",
        excludes=("llama.cpp reference", "stream reference", "service reference", "reference on the CPU"),
    ),
    Lever(
        name="stream reference",
        where="fourfold.memory.offload",
        settings={"reference.residency": "stream"},
        saves="the reference's own weights; in score all its decoder layers but two",
        costs="reading them once a micro-batch, while the layer before computes",
        change="exact",
        excludes=("llama.cpp reference", "park reference", "service reference", "reference on the CPU"),
    ),
    Lever(
        name="park reward",
        where="fourfold.memory.offload",
        settings={"reward.residency": "park"},
        saves="the reward model's own weights, in every phase but score",
        costs="reading them once a step",
        change="exact",
        excludes=("stream reward", "service reward", "reward on the CPU", "ONNX int8 reward"),
    ),
    Lever(
        name="stream reward",
        where="fourfold.memory.offload",
        settings={"reward.residency": "stream"},
        saves="the reward model's own weights; in score all its decoder layers but two",
        costs="reading them once a micro-batch, while the layer before computes",
        change="exact",
        excludes=("park reward", "service reward", "reward on the CPU", "ONNX int8 reward"),
    ),
    Lever(
        name="service reference",
        where="fourfold.scoring.service.roles",
        settings={"reference.residency": "service"},
        baseline=SEPARATE,
        saves="the reference's own weights, always: another process has them",
        costs="a request a step; the service needs a base of its own; on another kind of machine KL is off by rounding",
        change="exact",
        trunk_bound=1e-5,  # the service makes the trunk's activations anew
        excludes=(
            "llama.cpp reference",
            "park reference",
            "stream reference",
            *REFERENCES,
            "half-precision frozen roles",
            "reference on the CPU",
        ),
        not_planned="needs a service that somebody has started",
    ),
    Lever(
        name="service reward",
        where="fourfold.scoring.service.roles",
        settings={"reward.residency": "service"},
        baseline=SEPARATE,
        saves="the reward model's own weights, always: another process has them",
        costs="a request a step; the service needs a base of its own",
        change="exact",
        trunk_bound=1e-5,  # the service makes the trunk's activations anew
        excludes=("park reward", "stream reward", *REWARDS, "half-precision frozen roles", "reward on the CPU"),
        not_planned="needs a service that somebody has started",
    ),
    Lever(
        name="park optimizer",
        where="fourfold.memory.optimizers",
        settings={"memory.optimizer_residency": "park"},
        saves="Adam's moments but for one parameter's",
        costs="reading and writing them once an optimizer step",
        change="exact",
        excludes=("offload optimizer", "paged_adamw", "paged_adamw_8bit"),
    ),
    Lever(
        name="offload optimizer",
        where="fourfold.memory.optimizer_offload",
        settings={"memory.optimizer_residency": "offload", **HALF},
        baseline=HALF,
        saves="Adam's moments and gradients but for those of two parameters; half of the trained matrices; the "
        "sampler's copy of the actor in the compute type",
        costs="writing gradients once a micro-batch, and reading and writing states once a step; the CPU steps",
        change="exact",  # below a GPU but for the rounding of Adam: the CPU steps
        excludes=(
            "park optimizer",
            "half-precision frozen roles",
            "float16",
            "trained trunk",
            "paged_adamw",
            "paged_adamw_8bit",
        ),
    ),
    Lever(
        name="optimizer in backward",
        where="fourfold.backends.local",
        settings={"memory.optimizer_in_backward": True, **ONE_MICRO_BATCH},
        baseline=ONE_MICRO_BATCH,
        saves="the gradients of a role but for a few parameters' at a time",
        costs="no clipping by the norm, no gradient accumulation, no ppo.target_kl, no second try with fewer rows when "
        "memory runs out",
        change="exact",
        excludes=("micro-batches", "trained trunk", "float16"),
    ),
    Lever(
        name="overlap scoring",
        where="fourfold.scoring.ahead",
        settings={"sampling.overlap_scoring": True, "sampling.batch_size": 4},
        baseline={"sampling.batch_size": 4},
        halves=("sampling.batch_size", "ppo.rollout_batch_size"),
        saves="the seconds of reference and reward, as far as sampling leaves the processor room",
        costs="rows are cut into micro-batches as they end; offloaded roles are read once for so many rows as slots",
        change="bounded",  # as micro-batches: products of other shapes
        bound=ORDER_OF_SUMS,
    ),
    Lever(
        name="sampling batches",
        where="fourfold.rollout.decoder",
        settings={"sampling.batch_size": 4},
        halves=("sampling.batch_size", "ppo.rollout_batch_size"),
        saves="the cache of keys and values and sampling's logits, in proportion",
        costs="sampling reads the weights for fewer rows at a time",
        change="bounded",  # as micro-batches
        bound=ORDER_OF_SUMS,
    ),
    Lever(
        name="adamw_8bit",
        where="fourfold.memory.optimizers",
        settings={"ppo.optimizer": "adamw_8bit", "critic.optimizer": "adamw_8bit"},
        baseline=SEPARATE,  # tensors of fewer than 4,096 numbers keep float32 moments, and tiny branches have no others
        saves="6 of the 8 bytes of moments a parameter",
        costs="rounded moments; on a CPU slower steps",
        change="bounded",
        bound=0.1,
        excludes=("paged_adamw", "paged_adamw_8bit"),
    ),
    Lever(
        name="bfloat16",
        where="fourfold.memory.precision",
        settings={"precision.compute": "bfloat16"},
        saves="half of frozen weights, of cached and of passing activations; without instructions for it no time",
        costs="8 binary digits in every product; masters and moments are float32 all the same, and in generate a copy "
        "of the actor in half precision stands beside its masters",
        change="bounded",
        bound=0.7,  # 0.10 to 0.15, but 0.49 on adapters that a reward model pays, and 0.57 on 135M parameters
        excludes=("float16", "half-precision frozen roles"),
    ),
    Lever(
        name="float16",
        where="fourfold.backends.scaling",
        # With the default the first steps of a tiny model would be skipped until the scale has fallen.
        settings={"precision.compute": "float16", "precision.loss_scale": 64.0},
        planned={"precision.compute": "float16"},
        saves="what bfloat16 saves, with 11 binary digits",
        costs="gradients of actor and critic at the same time; steps that overflow are skipped",
        change="bounded",
        bound=0.45,  # 0.03 to 0.05, but 0.3 on adapters over a trunk: Adam makes steps of gradients that are near 0
        excludes=("bfloat16", "optimizer in backward", "offload optimizer", "flash attention"),
    ),
    Lever(
        name="half-precision frozen roles",
        where="fourfold.models.products",
        settings={"precision.frozen": "float16", "precision.reference": "float16", "precision.reward": "float16"},
        baseline=TRUNK,  # without anything shared there is nothing that is held for all
        saves="half of trunk or base and of the frozen roles' own weights, while trained roles compute in float32",
        costs="rounded weights; every KL is biased by what pre-flight measures; a base is widened for each product",
        change="bounded",
        bound=0.1,
        excludes=(
            "llama.cpp reference",
            "bfloat16",
            "offload optimizer",
            "int8 base",
            "nf4 base",
            *REFERENCES,
            *REWARDS,
            "service reference",
            "service reward",
            "trained trunk",
            "flash attention",
            "int8 dynamic base",
            "ONNX int8 reward",
        ),
    ),
    # What rounding does to what real models say, `fourfold bench quantization` tells.
    Lever(
        name="int8 base",
        where="fourfold.memory.quantization",
        settings={"precision.frozen": "int8"},
        baseline=TRUNK,
        saves="half of the half-precision matrices in a shared trunk, or in the base below adapters",
        costs="rounded weights; widening them for each product",
        change="bounded",
        bound=2e-3,  # torchao adds up in another order, and Adam makes whole steps of gradients near 0
        rounding=0.25,
        excludes=("nf4 base", "int8 dynamic base", "trained trunk", "half-precision frozen roles"),
    ),
    Lever(
        name="int8 dynamic base",
        where="fourfold.memory.quantization",
        settings={"precision.frozen": "int8_dynamic"},
        baseline=TRUNK,
        saves="what an int8 base saves",
        costs="rounded weights and activations; products of bytes, which some processors make faster",
        change="bounded",
        bound=0.6,  # up to 0.18 by the weights and 0.37 by the activations, which no run in float32 rounds alike
        excludes=("int8 base", "nf4 base", "trained trunk", "half-precision frozen roles"),
        not_planned="saves what an int8 base saves and rounds more",
    ),
    Lever(
        name="nf4 base",
        where="fourfold.memory.quantization",
        settings={"precision.frozen": "nf4"},
        baseline=TRUNK,
        saves="three quarters of them (QLoRA)",
        costs="weights of 4 bits; widening them for each product",
        change="bounded",
        bound=1e-4,
        rounding=1.0,  # a cosine of 0.5 and more
        excludes=("int8 base", "int8 dynamic base", "trained trunk", "half-precision frozen roles"),
    ),
    *ROUNDED_ROLES,
    *ENGINES,
)


def lever(name: str) -> Lever:
    """The lever of this name."""
    return next(each for each in LEVERS if each.name == name)

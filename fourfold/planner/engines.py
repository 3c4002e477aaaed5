"""Levers of kernels and engines: what computes a role besides torch's usual way on the run's device.

No search takes them: each needs a GPU, a package or a model that a user brings, or is what 'auto' is already. What
runs on CUDA only is declared with bounds that nobody has measured yet; tests/training/test_levers.py holds it to them
where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.planner.lever import HALF, ORDER_OF_SUMS, SEPARATE, Lever
from fourfold.planner.rounded_roles import REFERENCES, REWARDS

EAGER: Mapping[str, Any] = {"memory.attention": "eager"}
_ON_CUDA = "needs a GPU whose kernels this names"

ENGINES: tuple[Lever, ...] = (
    Lever(
        name="sdpa attention",
        where="fourfold.memory.attention",
        settings={"memory.attention": "sdpa"},
        baseline=EAGER,
        saves="the [time, time] weights of attention",
        costs="nothing where the model has it",
        change="bounded",
        bound=1e-2,  # 3e-6, but 1e-3 below adapters: Adam makes whole steps of gradients near 0
        excludes=("flash attention", "flex attention"),
        not_planned="what memory.attention = 'auto' takes wherever a model has it",
    ),
    Lever(
        name="flash attention",
        where="fourfold.memory.attention",
        settings={"memory.attention": "flash_attention_2", **HALF},
        baseline={**EAGER, **HALF},
        saves="the [time, time] weights of attention",
        costs="the package flash-attn; half precision only",
        change="bounded",
        bound=0.55,  # as bfloat16 itself, whose sums it makes in another order
        excludes=("sdpa attention", "flex attention", "float16", "half-precision frozen roles"),
        package="flash_attn",
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
    Lever(
        name="flex attention",
        where="fourfold.memory.attention",
        settings={"memory.attention": "flex_attention"},
        baseline=EAGER,
        saves="the [time, time] weights of attention",
        costs="compiling a kernel for each shape",
        change="bounded",
        bound=1e-2,
        excludes=("sdpa attention", "flash attention"),
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
    Lever(
        name="llama.cpp reference",
        where="fourfold.models.llama_roles",
        settings={"reference.engine": "llama_cpp_q8_0"},
        saves="torch's copy of the reference; a GGUF file in Q8_0 (8.5 bits a weight) is read instead, by the CPU",
        costs="a KL that is off by the rounding; passes from the ids on, over a cached trunk too; writing the file",
        change="bounded",
        bound=0.15,  # 0.08 on 135M parameters
        excludes=(
            "park reference",
            "stream reference",
            "service reference",
            *REFERENCES,
            "half-precision frozen roles",
            "reference on the CPU",
        ),
        package="llama_cpp",
        not_planned="needs an optional package that compiles for minutes",
    ),
    Lever(
        name="ONNX int8 reward",
        where="fourfold.models.onnx",
        settings={"reward.source": "model", "reward.engine": "onnx_int8"},
        baseline={"reward.source": "model", "critic.init": "actor"},
        saves="torch's copy of a reward model of another family; ONNX Runtime holds a quarter of its matrices' bytes",
        costs="scores that are off by the rounding; an export, once for each model; both copies while it is loaded",
        change="bounded",
        bound=0.3,  # 0.02 to 0.04; in 7 bits, on CPUs without VNNI, 0.17
        excludes=("park reward", "stream reward", "reward on the CPU", *REWARDS, "half-precision frozen roles"),
        package="onnxruntime",
        not_planned="needs a reward model of another family",
    ),
    Lever(
        name="reference on the CPU",
        where="fourfold.models.residency",
        settings={"reference.residency": "cpu"},
        saves="the reference's own weights on the GPU, always: host memory has them, with a copy of what is shared",
        costs="a pass at the CPU's speed; sampling hides it where its scoring is overlapped",
        change="bounded",
        bound=1e-2,
        excludes=("llama.cpp reference", "park reference", "stream reference", "service reference"),
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
    Lever(
        name="reward on the CPU",
        where="fourfold.models.residency",
        settings={"reward.residency": "cpu"},
        saves="the reward model's own weights on the GPU, always: host memory has them, with a copy of what is shared",
        costs="a pass at the CPU's speed; sampling hides it where its scoring is overlapped",
        change="bounded",
        bound=1e-2,
        excludes=("park reward", "stream reward", "service reward", "ONNX int8 reward"),
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
    Lever(
        name="paged_adamw",
        where="fourfold.memory.optimizers",
        settings={"ppo.optimizer": "paged_adamw", "critic.optimizer": "paged_adamw"},
        saves="Adam's moments, page by page, where a GPU is full",
        costs="a step waits for pages",
        change="bounded",
        bound=ORDER_OF_SUMS,
        excludes=("adamw_8bit", "paged_adamw_8bit", "park optimizer", "offload optimizer"),
        package="bitsandbytes",
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
    Lever(
        name="paged_adamw_8bit",
        where="fourfold.memory.optimizers",
        settings={"ppo.optimizer": "paged_adamw_8bit", "critic.optimizer": "paged_adamw_8bit"},
        baseline=SEPARATE,  # as adamw_8bit
        saves="6 of the 8 bytes of moments a parameter, and the rest page by page where a GPU is full",
        costs="rounded moments; a step waits for pages",
        change="bounded",
        bound=0.1,
        excludes=("adamw_8bit", "paged_adamw", "park optimizer", "offload optimizer"),
        package="bitsandbytes",
        only_on="cuda",
        not_planned=_ON_CUDA,
    ),
)

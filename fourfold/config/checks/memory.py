"""Optimizers, where their states are, and attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import OptimizerSection, RunConfig


def trained(config: RunConfig) -> dict[str, OptimizerSection]:
    """The sections whose optimizers this run makes."""
    sections: dict[str, OptimizerSection] = {}
    if "sft" in config.stages:
        sections["sft"] = config.sft
    if "reward" in config.stages and config.reward.trains:
        sections["reward"] = config.reward
    if "ppo" in config.stages:
        sections |= {"ppo": config.ppo, "critic": config.critic}
    return sections


def needs_cuda(config: RunConfig) -> list[str]:
    """What a run on the CPU cannot do."""
    on_cpu = [
        f"{role}.residency: given 'cpu', and this run's device is the CPU already: 'keep' is the same; set it to "
        "'keep'; sampling.overlap_scoring = true scores beside sampling"
        for role in ("reference", "reward")
        if getattr(config, role).residency == "cpu"
    ]
    return on_cpu + [
        f"{name}.optimizer: given {section.optimizer!r}, which pages between a CUDA GPU and the host, and this run is "
        f"on the CPU; allowed there: 'adamw', 'adamw_8bit'; memory.optimizer_residency = 'park' keeps states on disk"
        for name, section in trained(config).items()
        if section.optimizer.startswith("paged")
    ]


def optimizer_states(config: RunConfig) -> Iterator[str]:
    if config.system.device == "cpu":
        yield from needs_cuda(config)
    residency = config.memory.optimizer_residency
    if residency != "keep":
        for name, section in trained(config).items():
            if section.optimizer.startswith("paged"):
                yield (
                    f"{name}.optimizer: given {section.optimizer!r} beside memory.optimizer_residency = {residency!r}: "
                    "both move the states; try 'adamw' or 'adamw_8bit', or memory.optimizer_residency = 'keep'"
                )


def overlap(config: RunConfig) -> Iterator[str]:
    exact = config.ppo.kl_estimator == "full"
    if exact and config.reference.residency == "cpu":
        yield (
            "reference.residency: given 'cpu' beside ppo.kl_estimator = 'full', which takes the vocabularies of actor "
            "and reference at once; set residency to 'stream', or kl_estimator to another one, such as 'k1'"
        )
    if not config.sampling.overlap_scoring:
        return
    if exact:
        yield (
            "sampling.overlap_scoring: true beside ppo.kl_estimator = 'full', which takes actor and reference at once; "
            "set overlap_scoring = false, or kl_estimator to another one, such as 'k1'"
        )
    if config.memory.count_tensors:
        yield (
            "sampling.overlap_scoring: true beside memory.count_tensors = true, which counts those of one thread; "
            "set one of the two to false"
        )


def in_backward(config: RunConfig) -> Iterator[str]:
    """A step in the backward pass knows neither the other gradients (clipping) nor what comes after it."""
    if not config.memory.optimizer_in_backward:
        return
    because = "memory.optimizer_in_backward = true steps each parameter within the backward pass"
    for name, section in trained(config).items():
        if section.max_grad_norm > 0:
            yield (
                f"{name}.max_grad_norm: {section.max_grad_norm:g} needs the norm of all gradients, but {because}; "
                f"set {name}.max_grad_norm = 0"
            )
    batches = {
        "sft": ("batch_size", config.sft.batch_size),
        "reward": ("batch_size", config.reward.batch_size),
        "ppo": ("mini_batch_size", config.ppo.mini_batch_size),
    }
    for name, (key, size) in batches.items():
        if name in trained(config) and (micro := getattr(config, name).micro_batch_size) != size:
            yield (
                f"{name}.micro_batch_size: {micro} adds gradients up to {name}.{key} = {size}, but {because}; "
                f"set {name}.micro_batch_size = {size}, or {name}.{key} = {micro}"
            )
    if "ppo" in config.stages and config.ppo.micro_batch_tokens:
        yield (
            f"ppo.micro_batch_tokens: {config.ppo.micro_batch_tokens} may cut a mini-batch, but {because}; "
            "set ppo.micro_batch_tokens = 0"
        )
    if "ppo" in config.stages and config.sharing.mode == "trunk" and config.trunk.train:
        yield (
            f"trunk.train: true puts the trunk's gradient together from the actor's and the critic's, but {because}; "
            "set memory.optimizer_in_backward = false, or trunk.train = false"
        )
    if "ppo" in config.stages and config.ppo.target_kl is not None:
        yield (
            f"ppo.target_kl: given {config.ppo.target_kl:g}, which drops a step after its backward pass, but "
            f"{because}; leave target_kl out"
        )


def attention(config: RunConfig) -> Iterator[str]:
    kernel = config.memory.attention
    if kernel in ("flash_attention_2", "flex_attention") and config.system.device == "cpu":
        yield (
            f"memory.attention: given {kernel!r} beside system.device = 'cpu', which cannot train with it; "
            "allowed there: 'auto', 'eager', 'sdpa'"
        )
    elif kernel == "flash_attention_2":
        types = config.precision
        for name in ("compute", "critic", "frozen", "reference", "reward"):
            if getattr(types, name) == "float32":
                yield (
                    "memory.attention: 'flash_attention_2' computes in bfloat16 and float16 only, and "
                    f"precision.{name} = 'float32'; set precision.{name} = 'bfloat16', or memory.attention = 'sdpa'"
                )

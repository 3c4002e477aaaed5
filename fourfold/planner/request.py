"""From what `fourfold plan` is asked to what is planned: settings, models, lengths, hardware and budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.config.checks.critic import critic_layers
from fourfold.config.checks.trunk import trunk_depth
from fourfold.config.loading import apply_override, parse_config, read_extended
from fourfold.config.schema import RunConfig
from fourfold.planner.architectures import Architecture, find_architecture
from fourfold.planner.architectures.published import PUBLISHED
from fourfold.planner.choices import allowed_keys, without
from fourfold.planner.hardware.machine import GIB, Cluster
from fourfold.planner.levers import LEVERS
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.units import parse_bytes, size

# Lengths of a plan for a model alone: those of DeepSpeed-Chat's benchmarks (Yao et al. 2023, section 4).
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 256
MOST_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Asked:
    """The arguments of `fourfold plan`; None and "" are not given."""

    target: str
    reward_model: str = ""
    hardware: str = "detect"
    budget: str = ""
    host_budget: str = ""
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    rollout: int | None = None
    allow: Sequence[str] = ()
    refuse: Sequence[str] = ()
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Wanted:
    """What is planned, and within which bytes of a device and of its host (0: no limit there)."""

    scene: Scene
    budget: int
    host_budget: int
    free: tuple[str, ...]  # keys that the planner may set although they are given
    refused: tuple[str, ...]  # names of levers that it must not take
    notes: tuple[str, ...]


def wanted(asked: Asked) -> Wanted:
    """Everything found and checked; a ValueError says what was given, what is allowed and what to try."""
    from fourfold.planner.hardware import find_hardware

    of_config = is_config(asked.target)
    tree = read_extended(Path(asked.target).expanduser()) if of_config else _tree_of_model(asked)
    for key, value in _of_arguments(asked, of_config).items():
        put(tree, key, value)
    for override in asked.overrides:
        apply_override(tree, override)
    config = parse_config(tree, source=asked.target)
    if "ppo" not in config.stages:
        raise ValueError(f"{asked.target}: stages are {list(config.stages)}; a plan is one of the stage 'ppo'; add it")
    free = tuple(allowed_keys(asked.allow))
    cluster = find_hardware(asked.hardware)
    models, notes = architectures_of(config)
    config = without(config, (*free, "memory.levers"))  # a plan has chosen
    scene = Scene(config, models, cluster, lengths_of(config))
    budget = round(config.memory.budget_gib * GIB) or cluster.device.memory
    if budget > cluster.device.memory:
        raise ValueError(
            f"memory.budget_gib (or --budget): given {size(budget)}, but {cluster.device.name} has "
            f"{size(cluster.device.memory)}; allowed: at most that"
        )
    given_host = parse_bytes(asked.host_budget, "--host-budget") if asked.host_budget else 0
    notes += cluster.notes
    if not of_config:
        notes.append("the data files are those of `fourfold init`: give your own before you run the plan")
    return Wanted(scene, budget, given_host or host_memory(cluster), free, _refused(asked.refuse), tuple(notes))


def _refused(names: Sequence[str]) -> tuple[str, ...]:
    known = [lever.name for lever in LEVERS if not lever.not_planned]
    for name in names:
        if name not in known:
            raise ValueError(f"--refuse {name!r}: no such lever; allowed: {', '.join(known)}")
    return tuple(names)


def is_config(target: str) -> bool:
    """Whether a configuration is named, rather than a model."""
    return target.endswith(".toml")


def host_memory(cluster: Cluster) -> int:
    """Bytes of host memory for each device; 0, no limit, where the device is the CPU, whose memory that is."""
    return 0 if cluster.device.kind == "cpu" else cluster.node.host_memory // cluster.node.devices


def lengths_of(config: RunConfig) -> Lengths:
    """All rows as long as the settings allow."""
    return Lengths.longest(config.data.max_prompt_tokens, config.sampling.max_new_tokens)


def architectures_of(config: RunConfig) -> tuple[dict[str, Architecture], list[str]]:
    """The architectures of the run's model and of roles that have one of their own, and where each is from.

    ValueError where one is not known, and where layers that the settings name are none of the run's model.
    """
    named = {"base": config.model.path, "critic": config.critic.model, "reference": config.reference.model}
    named |= {key: config.reward.classifiers[key].model for key in config.reward.held_classifiers}
    found = {role: find_architecture(name) for role, name in named.items() if name}
    layers = found["base"].architecture.layers
    critic_layers(config, layers, trunk_depth(config, layers))
    notes = [f"{role} model: {each.name}, from {each.source}" for role, each in found.items()]
    return {role: each.architecture for role, each in found.items()}, notes


def put(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key in nested tables."""
    *path, name = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[name] = value


def _of_arguments(asked: Asked, of_config: bool) -> Mapping[str, object]:
    """Settings that arguments stand for."""
    if of_config and asked.reward_model:
        raise ValueError('--reward-model beside a configuration: give it there, as reward.source = "model"')
    for name in ("prompt_tokens", "response_tokens", "rollout"):
        if (given := getattr(asked, name)) is not None and given < 1:
            raise ValueError(f"--{name.replace('_', '-')} {given}: allowed are 1 or more")
    settings: dict[str, object] = {
        "data.max_prompt_tokens": asked.prompt_tokens,
        "sampling.max_new_tokens": asked.response_tokens,
        "ppo.rollout_batch_size": asked.rollout,
    }
    if asked.budget:
        settings["memory.budget_gib"] = parse_bytes(asked.budget, "--budget") / GIB
    return {key: value for key, value in settings.items() if value is not None}


def _loadable(model: str) -> str:
    """The hub id of a published model that is called by the planner's own name for it: what a run can load."""
    known = PUBLISHED.get(model.lower())
    return model if known is None else known.hub


def _tree_of_model(asked: Asked) -> dict[str, Any]:
    """The tables of a run of this model: of `fourfold init` with nothing in them that is not needed."""
    name = Path(asked.target).name.removesuffix(".gguf")
    tree: dict[str, Any] = {
        "output": f"runs/{name}",
        "model": {"path": _loadable(asked.target)},
        "data": {
            "prompts": {"path": "data/prompts.jsonl"},
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_text_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
        },
        "sampling": {"max_new_tokens": RESPONSE_TOKENS},
    }
    if asked.reward_model:
        tree |= {"stages": ["ppo"], "reward": {"source": "model", "model": _loadable(asked.reward_model)}}
        tree["critic"] = {"init": "actor"}
    else:
        tree["data"] |= {stage: {"path": f"data/{stage}.jsonl"} for stage in ("texts", "pairs")}
    if asked.rollout and asked.rollout > 0:
        rows = max(n for n in range(1, min(asked.rollout, MOST_ROWS_AT_ONCE) + 1) if asked.rollout % n == 0)
        tree["ppo"] = {"mini_batch_size": rows}
        if rows < MOST_ROWS_AT_ONCE:
            tree["ppo"]["micro_batch_size"] = rows
    return tree

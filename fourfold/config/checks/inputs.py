"""Stages, data sets and where the reward comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

STAGE_ORDER = ("sft", "reward", "ppo")
STANDARD_COLUMNS = ("text", "prompt", "chosen", "rejected", "messages")
DATASETS = ("texts", "texts_test", "pairs", "pairs_test", "prompts", "prompts_test")


def stages(config: RunConfig) -> Iterator[str]:
    stages = list(config.stages)
    ordered = [stage for stage in STAGE_ORDER if stage in stages]
    if not stages:
        yield f"stages: given [], allowed: at least one of {list(STAGE_ORDER)}"
    elif stages != ordered:
        yield f"stages: given {stages}; allowed: each stage once, in the order of the pipeline; try {ordered}"
    if config.sft.checkpoint and "sft" in stages:
        yield (
            "sft.checkpoint: given beside the stage 'sft', which would train another policy; leave 'sft' out of "
            "stages, or sft.checkpoint out"
        )
    if not config.output:
        yield "output: given an empty text; allowed: a folder, such as 'runs/first'"
    if not config.model.path:
        yield "model.path: given an empty text; allowed: a folder, a hub id, a .gguf file or 'package:MODULE/FILE'"


def data(config: RunConfig) -> Iterator[str]:
    needs = {"texts": "sft" in config.stages, "prompts": "ppo" in config.stages, "pairs": False}
    if "reward" in config.stages and config.reward.trains:
        needs["pairs"] = True
        if config.reward.standardise and config.data.texts is None:
            yield (
                "reward.standardise: true takes mean and standard deviation over data.texts, which is not given; "
                "give [data.texts], or set reward.standardise = false"
            )
    stages = {"texts": "sft", "pairs": "reward", "prompts": "ppo"}
    for name, needed in needs.items():
        if needed and getattr(config.data, name) is None:
            yield (
                f"data.{name}: not given, but the stage {stages[name]!r} needs it; give [data.{name}] with a path, "
                f"or leave {stages[name]!r} out of stages"
            )
    for name in DATASETS:
        dataset = getattr(config.data, name)
        if dataset is None:
            continue
        if not dataset.path:
            yield f"data.{name}.path: given an empty text; allowed: a .jsonl, .parquet or .csv file, or a hub id"
        unknown = sorted(set(dataset.columns) - set(STANDARD_COLUMNS))
        if unknown:
            yield (
                f"data.{name}.columns: given {', '.join(unknown)}; allowed on the left: {', '.join(STANDARD_COLUMNS)} "
                "(on the right stands the name in your file)"
            )


def reward_source(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.source == "checkpoint" and not reward.checkpoint:
        yield (
            "reward.checkpoint: not given, but reward.source = 'checkpoint' needs the folder of a trained reward model"
        )
    if reward.source == "function":
        yield from function_problem("reward", reward.function)
    if not reward.has_model and "ppo" in config.stages and config.critic.from_reward:
        yield (
            f"critic.init: 'reward' copies the reward model, and reward.source = {reward.source!r} has none; "
            "allowed: 'actor' or 'base', or critic.model; try critic.init = 'actor'"
        )


def function_problem(key: str, function: str) -> Iterator[str]:
    """What is wrong with the name of a reward function that stands in table `key`."""
    module, _, name = function.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield (
            f"{key}.function: given {function!r}, but {key}.source = 'function' needs 'module:name', "
            "such as 'my_rewards:politeness'"
        )

"""Checks across settings: each returns every problem it finds as 'key: given; allowed; what to try'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

STAGE_ORDER = ("sft", "reward", "ppo")
STANDARD_COLUMNS = ("text", "prompt", "chosen", "rejected", "messages")
DATASETS = ("texts", "texts_test", "pairs", "pairs_test", "prompts", "prompts_test")
# What training a reward model reads; nothing of it is used when the reward comes from elsewhere.
REWARD_TRAINING = (
    *("learning_rate", "schedule", "warmup_steps", "betas", "eps", "weight_decay", "max_grad_norm"),
    *("init", "num_epochs", "batch_size", "micro_batch_size", "max_pairs", "standardise"),
)


def problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with settings which are each allowed alone."""
    return [
        *_stages(config),
        *_data(config),
        *_batch_sizes(config),
        *_optimizers(config),
        *_reward(config),
        *_ppo(config),
        *_warm_ups(config),
        *_lengths(config),
        *_ignored(config),
    ]


def ignored_keys(config: RunConfig) -> dict[str, str]:
    """Dotted keys that nothing reads with these settings, and why: giving one is an error, and none is saved."""
    ignored: dict[str, str] = {}

    def because(reason: str, section: str, *names: str) -> None:
        ignored.update({f"{section}.{name}": reason for name in names})

    mode = config.sharing.mode
    if mode == "none":
        because("sharing.mode = 'none' has no trunk", "trunk", *type(config.trunk).model_fields)
    if mode == "adapters":
        because("sharing.mode = 'adapters' cuts by adapters.layers", "trunk", *type(config.trunk).model_fields)
    else:
        because(f"sharing.mode = {mode!r} has no adapters", "adapters", *type(config.adapters).model_fields)
    if config.memory.checkpointing == "none":
        because("memory.checkpointing = 'none' keeps every activation", "memory", "checkpoint_every")
    if config.reward.source != "checkpoint":
        because(f"reward.source = {config.reward.source!r} loads no reward model", "reward", "checkpoint")
    if config.reward.source != "function":
        # A model answers the same way every time: no use to ask it again, and a score that is not finite stops the run.
        reason = f"reward.source = {config.reward.source!r} calls no function"
        because(reason, "reward", "function", "retries", "on_failure")
    if config.reward.source != "train":
        reason = f"reward.source = {config.reward.source!r} trains no reward model"
        because(reason, "reward", *REWARD_TRAINING)
        because(reason, "data", "pairs", "pairs_test")
    if config.ppo.kl_controller == "fixed":
        because("ppo.kl_controller = 'fixed' keeps kl_coef as it is", "ppo", "kl_target", "kl_horizon")
    if config.ppo.kl_loss_coef == 0:
        because("ppo.kl_loss_coef = 0 puts no KL into the loss", "ppo", "kl_loss_estimator")
    if config.ppo.length_penalty == 0:
        because("ppo.length_penalty = 0 penalises no length", "ppo", "length_range")
    if config.data.prompts_test is None:
        reason = "without data.prompts_test nothing is evaluated"
        because(reason, "evaluation", *type(config.evaluation).model_fields)
        if config.checkpoint.best_metric.startswith("eval_"):
            because(reason, "checkpoint", "best_metric", "best_mode")
    return ignored


def is_given(config: RunConfig, key: str) -> bool:
    """Whether a dotted key was written down (rather than left at its default)."""
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        if part not in section.model_fields_set:
            return False
        section = getattr(section, part)
    return name in section.model_fields_set


def _ignored(config: RunConfig) -> Iterator[str]:
    for key, reason in ignored_keys(config).items():
        if is_given(config, key):
            yield f"{key}: given, but {reason}, so it would be ignored; leave it out"


def _stages(config: RunConfig) -> Iterator[str]:
    stages = list(config.stages)
    ordered = [stage for stage in STAGE_ORDER if stage in stages]
    if not stages:
        yield f"stages: given [], allowed: at least one of {list(STAGE_ORDER)}"
    elif stages != ordered:
        yield f"stages: given {stages}; allowed: each stage once, in the order of the pipeline; try {ordered}"
    if not config.output:
        yield "output: given an empty text; allowed: a folder, such as 'runs/first'"
    if not config.model.path:
        yield "model.path: given an empty text; allowed: a folder, a hub id, a .gguf file or 'package:MODULE/FILE'"


def _data(config: RunConfig) -> Iterator[str]:
    needs = {"texts": "sft" in config.stages, "prompts": "ppo" in config.stages, "pairs": False}
    if "reward" in config.stages and config.reward.source == "train":
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


def _divides(small_key: str, small: int, large_key: str, large: int) -> Iterator[str]:
    if large % small:
        low = [n for n in range(1, math.isqrt(large) + 1) if large % n == 0]
        nearest = min([*low, *(large // n for n in low)], key=lambda n: (abs(n - small), n))
        yield f"{small_key}: {small} does not divide {large_key} = {large}; allowed: a divisor of it; try {nearest}"


def _batch_sizes(config: RunConfig) -> Iterator[str]:
    for name in ("sft", "reward"):
        section = getattr(config, name)
        micro, batch = section.micro_batch_size, section.batch_size
        yield from _divides(f"{name}.micro_batch_size", micro, f"{name}.batch_size", batch)
    ppo, responses = config.ppo, config.sampling.responses_per_prompt
    rollout = "ppo.rollout_batch_size"
    yield from _divides("ppo.mini_batch_size", ppo.mini_batch_size, rollout, ppo.rollout_batch_size)
    yield from _divides("ppo.micro_batch_size", ppo.micro_batch_size, "ppo.mini_batch_size", ppo.mini_batch_size)
    yield from _divides("sampling.responses_per_prompt", responses, rollout, ppo.rollout_batch_size)


def _optimizers(config: RunConfig) -> Iterator[str]:
    for name in ("sft", "reward", "critic", "ppo"):
        betas = getattr(config, name).betas
        if max(betas) >= 1:
            yield (
                f"{name}.betas: given {list(betas)}; allowed: two numbers >= 0 and < 1 (at 1 Adam's moments never move)"
            )


def _reward(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.source == "checkpoint" and not reward.checkpoint:
        yield (
            "reward.checkpoint: not given, but reward.source = 'checkpoint' needs the folder of a trained reward model"
        )
    if reward.source == "function":
        module, _, name = reward.function.partition(":")
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            yield (
                f"reward.function: given {reward.function!r}, but reward.source = 'function' needs 'module:name', "
                "such as 'my_rewards:politeness'"
            )
        if "ppo" in config.stages and config.critic.init == "reward":
            yield (
                "critic.init: 'reward' copies the reward model, and reward.source = 'function' has none; "
                "allowed: 'actor' or 'base'; try critic.init = 'actor'"
            )


def _ppo(config: RunConfig) -> Iterator[str]:
    ppo = config.ppo
    if ppo.kl_coef > 0 and ppo.kl_loss_coef > 0:
        yield (
            f"ppo.kl_loss_coef: given {ppo.kl_loss_coef} beside ppo.kl_coef = {ppo.kl_coef}: KL would be "
            "charged twice, in "
            "the reward and in the loss; set one of the two to 0"
        )
    if ppo.kl_controller == "adaptive" and ppo.kl_coef == 0:
        yield (
            "ppo.kl_controller: 'adaptive' multiplies kl_coef, and ppo.kl_coef = 0 stays 0; give a kl_coef > 0 "
            "or 'fixed'"
        )
    if 0 < ppo.dual_clip <= 1:
        yield f"ppo.dual_clip: given {ppo.dual_clip}; allowed: 0 (off) or a number > 1; usual is 3"
    if ppo.missing_eos_penalty > 0 and ppo.truncation != "terminal":
        yield (
            f"ppo.missing_eos_penalty: given {ppo.missing_eos_penalty}, but with ppo.truncation = "
            f"{ppo.truncation!r} the score "
            "of a response cut by length does not count; set it to 0, or ppo.truncation = 'terminal'"
        )
    if "ppo" in config.stages and config.critic.warmup_rollouts >= ppo.steps:
        yield (
            f"critic.warmup_rollouts: given {config.critic.warmup_rollouts}, so that the actor never moves in "
            "ppo.steps = "
            f"{ppo.steps}; allowed: less than ppo.steps"
        )
    if "" in config.sampling.stop_strings:
        yield "sampling.stop_strings: an empty text would end every response at once; leave it out"


def _warm_ups(config: RunConfig) -> Iterator[str]:
    """Only of ppo: how many steps sft and reward take depends on their data."""
    rollouts = {"critic": config.ppo.steps, "ppo": config.ppo.steps - config.critic.warmup_rollouts}
    for name, count in rollouts.items():
        given, total = getattr(config, name).warmup_steps, count * config.ppo.updates_a_rollout
        if given > total > 0:
            yield (
                f"{name}.warmup_steps: given {given}, but there are {total} optimizer steps in all, so that "
                f"{name}.learning_rate is never reached; allowed: at most {total}"
            )


def _lengths(config: RunConfig) -> Iterator[str]:
    low, high = config.ppo.length_range
    longest = config.sampling.max_new_tokens
    if config.ppo.length_penalty > 0 and (low, high) == (0, 0):
        yield (
            f"ppo.length_penalty: given {config.ppo.length_penalty}, but ppo.length_range = [0, 0] leaves "
            "every length free; "
            "give a range such as [8, 24], or set the penalty to 0"
        )
    if high and low > high:
        yield (
            f"ppo.length_range: given [{low}, {high}]; allowed: [shortest, longest] with shortest <= longest; "
            f"try [{high}, {low}]"
        )
    elif low > longest:
        yield (
            f"ppo.length_range: given [{low}, {high}], but no response is longer than sampling.max_new_tokens "
            f"= {longest}; "
            f"allowed: a shortest length <= {longest}"
        )

"""Batch sizes, optimizers, the loss and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def batch_sizes(config: RunConfig) -> Iterator[str]:
    for name in ("sft", "reward"):
        section = getattr(config, name)
        micro, batch = section.micro_batch_size, section.batch_size
        yield from _divides(f"{name}.micro_batch_size", micro, f"{name}.batch_size", batch)
    ppo, responses = config.ppo, config.sampling.responses_per_prompt
    rollout = "ppo.rollout_batch_size"
    yield from _divides("ppo.mini_batch_size", ppo.mini_batch_size, rollout, ppo.rollout_batch_size)
    yield from _divides("ppo.micro_batch_size", ppo.micro_batch_size, "ppo.mini_batch_size", ppo.mini_batch_size)
    yield from _divides("sampling.responses_per_prompt", responses, rollout, ppo.rollout_batch_size)


def _divides(small_key: str, small: int, large_key: str, large: int) -> Iterator[str]:
    if large % small:
        low = [n for n in range(1, math.isqrt(large) + 1) if large % n == 0]
        nearest = min([*low, *(large // n for n in low)], key=lambda n: (abs(n - small), n))
        yield f"{small_key}: {small} does not divide {large_key} = {large}; allowed: a divisor of it; try {nearest}"


def optimizers(config: RunConfig) -> Iterator[str]:
    for name in ("sft", "reward", "critic", "ppo"):
        betas = getattr(config, name).betas
        if max(betas) >= 1:
            yield (
                f"{name}.betas: given {list(betas)}; allowed: two numbers >= 0 and < 1 (at 1 Adam's moments never move)"
            )


def ppo(config: RunConfig) -> Iterator[str]:
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


def warm_ups(config: RunConfig) -> Iterator[str]:
    """Only of ppo: how many steps sft and reward take depends on their data."""
    for role, name in (("critic", "critic"), ("actor", "ppo")):
        given, total = getattr(config, name).warmup_steps, config.optimizer_steps[role]
        if given > total > 0:
            yield (
                f"{name}.warmup_steps: given {given}, but there are {total} optimizer steps in all, so that "
                f"{name}.learning_rate is never reached; allowed: at most {total}"
            )


def curriculum(config: RunConfig) -> Iterator[str]:
    given, ppo = config.curriculum, config.ppo
    starts = ("start_new_tokens", "start_rollout_batch_size")
    if given.steps and not any(getattr(given, name) for name in starts):
        yield (
            "curriculum.steps: given, but neither start_new_tokens nor start_rollout_batch_size is, so that nothing "
            "grows; give one of the two, or leave steps out"
        )
    if "ppo" in config.stages and given.steps >= ppo.steps:
        yield (
            f"curriculum.steps: given {given.steps}, so that the whole size is never reached in ppo.steps = "
            f"{ppo.steps}; allowed: less than ppo.steps"
        )
    for name, whole, what in (
        ("start_new_tokens", config.sampling.max_new_tokens, "sampling.max_new_tokens"),
        ("start_rollout_batch_size", ppo.rollout_batch_size, "ppo.rollout_batch_size"),
    ):
        if getattr(given, name) >= whole:
            yield f"curriculum.{name}: given {getattr(given, name)}, but it grows to {what} = {whole}; allowed: less"
    unit = math.lcm(ppo.mini_batch_size, config.sampling.responses_per_prompt)
    if given.start_rollout_batch_size % unit:
        yield (
            f"curriculum.start_rollout_batch_size: given {given.start_rollout_batch_size}; allowed: a multiple of "
            f"{unit}, for whole mini-batches (ppo.mini_batch_size) and whole prompts (sampling.responses_per_prompt)"
        )
    shortest = config.ppo.length_range[0] if ppo.length_penalty else 0
    if 0 < given.start_new_tokens < shortest:
        yield (
            f"curriculum.start_new_tokens: given {given.start_new_tokens}, shorter than the shortest response of "
            f"ppo.length_range that is free of ppo.length_penalty; allowed: at least {shortest}"
        )


def lengths(config: RunConfig) -> Iterator[str]:
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

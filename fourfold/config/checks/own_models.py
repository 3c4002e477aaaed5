"""Roles that are not made of the run's model: a reward model of another family, a reference with a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def reference_engine(config: RunConfig) -> Iterator[str]:
    engine, model = config.reference.engine, config.reference.model
    if engine == "torch":
        return
    if config.ppo.kl_estimator == "full":
        yield (
            f"reference.engine: given {engine!r} beside ppo.kl_estimator = 'full', which takes the vocabularies of "
            "actor and reference at once; set engine to 'torch', or kl_estimator to another one, such as 'k1'"
        )
    if config.reference.residency not in ("keep", "service"):
        yield (
            f"reference.residency: given {config.reference.residency!r} beside reference.engine = {engine!r}, which "
            "runs on the CPU and holds its weights itself; allowed: 'keep', or 'service' for a llama-server"
        )
    if engine == "llama_cpp_q8_0" and model.endswith(".gguf"):
        yield (
            f"reference.engine: given {engine!r} beside reference.model = {model!r}, whose weights have the types that "
            "the file gives them; set engine to 'llama_cpp'"
        )


def reward_model(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.source != "model":
        return
    if not reward.model or reward.model.endswith(".gguf") or reward.model.startswith("package:"):
        yield (
            f"reward.model: given {reward.model!r}, but reward.source = 'model' needs a sequence classifier, which "
            "GGUF files do not hold; allowed: a folder written by save_pretrained, or a hub id"
        )
    if "ppo" in config.stages and config.critic.from_reward:
        yield (
            "critic.init: 'reward' copies the reward model, and that of reward.source = 'model' is of another family: "
            "its layers read other tokens than the actor writes; allowed: 'actor' or 'base', or critic.model; try "
            "critic.init = 'actor'"
        )
    if problem := _template_problem(reward.template):
        yield (
            f"reward.template: given {reward.template!r}, {problem}; allowed: '', 'pair', 'chat', or a text with "
            "{response} and {prompt} such as 'Q: {prompt} A: {response}' (a brace of its own is written twice)"
        )
    if reward.residency == "cpu":
        yield (
            "reward.residency: given 'cpu' beside reward.source = 'model', which has a device of its own; allowed: "
            "'keep', 'park', 'stream' or 'service'; try reward.device = 'cpu'"
        )
    if reward.label and not any(reward.label.values()):
        yield f"reward.label: given {reward.label}; allowed: factors of which at least one is not 0"


def _template_problem(template: str) -> str:
    """What is wrong with a reward template; empty where nothing is."""
    if template in ("", "pair", "chat"):
        return ""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"which cannot be read ({error})"
    names = [name for _, name, _, _ in parts if name is not None]
    if unknown := sorted(set(names) - {"prompt", "response"}):
        return f"which asks for {', '.join(map(repr, unknown))}"
    if any(spec or conversion for _, _, spec, conversion in parts):
        return "which formats a text as if it were a number"
    return "" if "response" in names else "which leaves the response out"

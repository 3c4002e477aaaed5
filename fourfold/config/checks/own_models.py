"""Roles that are not made of the run's model: a reward model of another family, a reference with a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fourfold.config.checks.templates import unfit_template

if TYPE_CHECKING:
    from fourfold.config.schema import ClassifierSection, RunConfig


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
    for key, given in reward.classifiers.items():
        yield from _classifier(key, given)
    if reward.classifiers and not reward.of_the_base and "ppo" in config.stages and config.critic.from_reward:
        yield (
            "critic.init: 'reward' copies the reward model, and that of source = 'model' is of another family: "
            "its layers read other tokens than the actor writes; allowed: 'actor' or 'base', or critic.model; try "
            "critic.init = 'actor'"
        )
    if reward.source == "model" and reward.residency == "cpu":
        yield (
            "reward.residency: given 'cpu' beside reward.source = 'model', which has a device of its own; allowed: "
            "'keep', 'park', 'stream' or 'service'; try reward.device = 'cpu'"
        )


def _classifier(key: str, given: ClassifierSection) -> Iterator[str]:
    """A text classifier of another family, described by the table `key`."""
    if not given.model or given.model.endswith(".gguf") or given.model.startswith("package:"):
        yield (
            f"{key}.model: given {given.model!r}, but {key}.source = 'model' needs a sequence classifier, which "
            "GGUF files do not hold; allowed: a folder written by save_pretrained, or a hub id"
        )
    known = given.template in ("", "pair", "chat")
    if not known and (problem := unfit_template(given.template, "response", "prompt")):
        yield (
            f"{key}.template: given {given.template!r}, {problem}; allowed: '', 'pair', 'chat', or a text with "
            "{response} and {prompt} such as 'Q: {prompt} A: {response}' (a brace of its own is written twice)"
        )
    if given.label and not any(given.label.values()):
        yield f"{key}.label: given {given.label}; allowed: factors of which at least one is not 0"

"""What a run is paid by, made of its settings: a reward model, a function, or a combination of several sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.config.schema import PartSection, RunConfig
from fourfold.data.told_weights import ToldWeights
from fourfold.models.assembly import FourModels
from fourfold.models.external import External
from fourfold.models.roles import Scorer
from fourfold.scoring.combined import Combined, Reward, RewardPart
from fourfold.scoring.external import ExternalReward
from fourfold.scoring.rules import RuleSet
from fourfold.scoring.service.texts import ServiceScores
from fourfold.scoring.sources import FunctionReward, ModelReward, RewardSource
from fourfold.scoring.verifier import Verifier
from fourfold.training.services import reader_at_service, reward_at_service


def reward_source(config: RunConfig, models: FourModels) -> Reward:
    """The reward model, of this family or another, the function that the settings name, or the sum of their parts."""
    given, tokenizer = config.reward, models.base.tokenizer
    if given.source == "combined":
        readers = {key: ExternalReward(external, tokenizer) for key, external in models.classifiers.items()}
        parts = tuple(
            RewardPart(name, each.weight, _part(name, each, config, models, readers), each.on_failure)
            for name, each in given.parts.items()
        )
        return Combined(parts, ToldWeights.of(config, tokenizer))
    if given.source == "function":
        return FunctionReward.named(
            given.function,
            tokenizer,
            retries=given.retries,
            on_failure=given.on_failure,
            timeout_seconds=given.timeout_seconds,
        )
    if given.source == "model" and given.residency == "service":
        models.reward, reward = reader_at_service(config, models.base)
        return reward
    if isinstance(models.reward, External):
        return ExternalReward(models.reward, tokenizer)
    return _own_model(config, models)


def _own_model(config: RunConfig, models: FourModels) -> RewardSource:
    """The reward model that is made of the run's own."""
    assert isinstance(models.reward, Scorer), "assemble has loaded the reward model"
    if config.reward.residency == "service":
        return reward_at_service(config, models.base, models.reward, models.critic)
    return ModelReward(models.reward)


def _part(
    name: str, part: PartSection, config: RunConfig, models: FourModels, readers: Mapping[str, ExternalReward]
) -> RewardSource:
    if part.source == "trained":
        return _own_model(config, models)
    if part.source == "model":
        return readers[config.reward.holder_of(f"reward.parts.{name}")]
    return text_source(name, part, models.base.tokenizer)


def text_source(name: str, part: PartSection, tokenizer: Any) -> FunctionReward:
    """A part that reads texts and needs no model here: a function, rules, a verifier, an HTTP service."""
    key = f"reward.parts.{name}"
    given: dict[str, Any] = {"retries": 0, "on_failure": part.on_failure, "key": key}
    if part.source == "rules":
        return FunctionReward(RuleSet(part.rules), tokenizer, **given)
    if part.source == "http":  # which has its own retries and time-outs, a request each
        return FunctionReward(ServiceScores(part, key), tokenizer, whole=True, **given)
    given["timeout_seconds"] = part.timeout_seconds
    if part.source == "verifiable":
        return FunctionReward(Verifier(part, key, tokenizer), tokenizer, **given)
    return FunctionReward.named(part.function, tokenizer, **{**given, "retries": part.retries})

"""Data of a run, read and encoded before anything trains: every bad row is known first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.config.schema import DatasetSection, RunConfig
from fourfold.data.records import read_pairs, read_prompts, read_texts
from fourfold.data.tokenize import encode_pairs, encode_prompts, encode_texts
from fourfold.models.loading import Base
from fourfold.training.reward_model import Pair
from fourfold.training.supervised import Texts
from fourfold.training.texts import draw


@dataclass
class Inputs:
    """Token ids of everything that the chosen stages read; empty where a stage is not run."""

    texts: Texts = ()
    texts_test: Texts = ()
    pairs: list[Pair] = field(default_factory=list)
    pairs_test: list[Pair] = field(default_factory=list)
    prompts: Texts = ()
    prompts_test: Texts = ()


def read_inputs(config: RunConfig, base: Base, say: Callable[[str], None]) -> Inputs:
    """Read what the stages need; `say` gets one line for each data set: its size and what was too long."""
    data, stages = config.data, config.stages
    trains_reward = "reward" in stages and config.reward.source == "train"
    inputs = Inputs()
    if "sft" in stages or (trains_reward and config.reward.standardise):
        texts = _texts(config, base, data.texts, "texts", say)
        rows = draw(len(texts), config.sft.max_texts, seed=config.seed, name="texts")
        inputs.texts = [texts[row] for row in rows]
    if "sft" in stages:
        inputs.texts_test = _texts(config, base, data.texts_test, "texts_test", say)
    if trains_reward:
        pairs = _pairs(config, base, data.pairs, "pairs", say)
        rows = draw(len(pairs), config.reward.max_pairs, seed=config.seed, name="pairs")
        inputs.pairs = [pairs[row] for row in rows]
        inputs.pairs_test = _pairs(config, base, data.pairs_test, "pairs_test", say)
    if "ppo" in stages:
        inputs.prompts = _prompts(config, base, data.prompts, "prompts", say)
        inputs.prompts_test = _prompts(config, base, data.prompts_test, "prompts_test", say)[
            : config.evaluation.max_prompts
        ]
    return inputs


def _eos(base: Base) -> int:
    """The EOS that ends a text in training: the tokenizer's own where it has one."""
    own = base.tokenizer.eos_token_id
    return own if own in base.eos_ids else min(base.eos_ids)


def _texts(
    config: RunConfig, base: Base, section: DatasetSection | None, name: str, say: Callable[[str], None]
) -> Texts:
    if section is None:
        return []
    data = config.data
    encoded, report = encode_texts(
        base.tokenizer,
        read_texts(section),
        eos_id=_eos(base),
        max_tokens=data.max_text_tokens,
        truncation=data.truncation,
    )
    say(f"data.{name}: {report.describe()}")
    return encoded


def _pairs(
    config: RunConfig, base: Base, section: DatasetSection | None, name: str, say: Callable[[str], None]
) -> list[Pair]:
    if section is None:
        return []
    data = config.data
    encoded, report, mismatch = encode_pairs(
        base.tokenizer,
        read_pairs(section),
        eos_id=_eos(base),
        max_tokens=data.max_text_tokens,
        truncation=data.truncation,
    )
    say(f"data.{name}: {report.describe()}; tokens differ at the prompt's end in {mismatch:.1%} of the pairs")
    return [(pair.chosen, pair.rejected) for pair in encoded]


def _prompts(
    config: RunConfig, base: Base, section: DatasetSection | None, name: str, say: Callable[[str], None]
) -> Texts:
    if section is None:
        return []
    data = config.data
    encoded, report = encode_prompts(
        base.tokenizer, read_prompts(section), max_tokens=data.max_prompt_tokens, truncation=data.truncation
    )
    say(f"data.{name}: {report.describe()}")
    return encoded

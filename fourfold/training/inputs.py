"""Data of a run: read before a model is loaded, encoded before anything trains; every bad row is known first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fourfold.config.checks import TASK
from fourfold.config.schema import DatasetSection, RunConfig
from fourfold.data.records import (
    BadRowsError,
    PairRecord,
    PromptRecord,
    TextRecord,
    read_pairs,
    read_prompts,
    read_texts,
)
from fourfold.data.tasks import read_task_prompts
from fourfold.data.tokenize import encode_pairs, encode_prompts, encode_texts
from fourfold.data.told_weights import ToldWeights
from fourfold.models.loading import Base
from fourfold.training.reward_model import Pair
from fourfold.training.supervised import Texts
from fourfold.training.texts import draw

Say = Callable[[str], None]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Records:
    """Rows of everything that the chosen stages read; empty where a stage is not run or a set is not given."""

    texts: list[TextRecord]
    texts_test: list[TextRecord]
    pairs: list[PairRecord]
    pairs_test: list[PairRecord]
    prompts: list[PromptRecord]
    prompts_test: list[PromptRecord]


@dataclass
class Inputs:
    """Token ids of everything that the chosen stages read; empty where a stage is not run."""

    texts: Texts = ()
    texts_test: Texts = ()
    pairs: list[Pair] = field(default_factory=list)
    pairs_test: list[Pair] = field(default_factory=list)
    prompts: Texts = ()
    prompts_test: Texts = ()


class _Errors:
    """What is wrong with the data sets, collected so that one error tells everything."""

    def __init__(self) -> None:
        self._found: dict[str, ValueError] = {}

    def rows(self, name: str, work: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of data set `name`; none where they cannot be used."""
        try:
            return list(work())
        except ValueError as error:
            self._found[name] = error
            return []

    def refuse(self) -> None:
        """Raise what was found: one error as it is, several as one."""
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            bad = sum(error.total for error in self._found.values() if isinstance(error, BadRowsError))
            counted = f" ({bad:,} bad rows in all)" if bad else ""
            lines = [f"{len(self._found)} data sets cannot be used{counted}; nothing was trained"]
            raise ValueError("\n".join([*lines, *(f"data.{name}: {error}" for name, error in self._found.items())]))


def read_records(config: RunConfig) -> Records:
    """Read what the stages need, which takes no model; every data set is read before any is refused."""
    stages, errors = config.stages, _Errors()
    trains_reward = "reward" in stages and config.reward.trains

    def read(name: str, reader: Callable[[DatasetSection], list[Row]], needed: bool) -> list[Row]:
        section = getattr(config.data, name)
        return errors.rows(name, lambda: reader(section)) if needed and section is not None else []

    records = Records(
        texts=read("texts", read_texts, "sft" in stages or (trains_reward and config.reward.standardise)),
        texts_test=read("texts_test", read_texts, "sft" in stages or _evaluates_texts(config)),
        pairs=read("pairs", read_pairs, trains_reward),
        pairs_test=read("pairs_test", read_pairs, trains_reward),
        prompts=read("prompts", partial(_prompt_records, config), "ppo" in stages),
        prompts_test=read("prompts_test", partial(_prompt_records, config, held_out=True), "ppo" in stages),
    )
    errors.refuse()
    return records


def _prompt_records(config: RunConfig, section: DatasetSection, *, held_out: bool = False) -> list[PromptRecord]:
    """Rows of a file or hub id, or the questions of a task."""
    if not section.path.startswith(TASK):
        return read_prompts(section)
    name = section.path.removeprefix(TASK)
    return read_task_prompts(config.reward.parts[name], f"reward.parts.{name}", section, held_out=held_out)


def _evaluates_texts(config: RunConfig) -> bool:
    """Whether evaluations in ppo look at held-out texts."""
    evaluates = "ppo" in config.stages and config.data.prompts_test is not None
    return evaluates and config.evaluation.max_texts > 0


def encode_inputs(config: RunConfig, base: Base, records: Records, say: Say) -> Inputs:
    """Token ids of the records; `say` gets one line for each data set: its size and what was too long."""
    errors = _Errors()
    texts, texts_test = (
        errors.rows(name, partial(_texts, config, base, rows, name, say))
        for name, rows in (("texts", records.texts), ("texts_test", records.texts_test))
    )
    pairs, pairs_test = (
        errors.rows(name, partial(_pairs, config, base, rows, name, say))
        for name, rows in (("pairs", records.pairs), ("pairs_test", records.pairs_test))
    )
    prompts, prompts_test = (
        errors.rows(name, partial(_prompts, config, base, rows, name, say))
        for name, rows in (("prompts", records.prompts), ("prompts_test", records.prompts_test))
    )
    errors.refuse()
    _tell_of_shared(prompts, prompts_test, say)
    return Inputs(
        [texts[row] for row in draw(len(texts), config.sft.max_texts, seed=config.seed, name="texts")],
        texts_test,
        [pairs[row] for row in draw(len(pairs), config.reward.max_pairs, seed=config.seed, name="pairs")],
        pairs_test,
        prompts,
        prompts_test[: config.evaluation.max_prompts],
    )


def end_of_text(base: Base) -> int:
    """The EOS that ends a text in training: the tokenizer's own where it has one."""
    own = base.tokenizer.eos_token_id
    return own if own in base.eos_ids else min(base.eos_ids)


def _tell_of_shared(prompts: Texts, held_out: Texts, say: Say) -> None:
    """Say how many held-out prompts are learned from: on those an evaluation is none of new prompts."""
    learned = {tuple(prompt) for prompt in prompts}
    if shared := sum(tuple(prompt) in learned for prompt in held_out):
        say(
            f"warning: {shared:,} of the {len(held_out):,} prompts of data.prompts_test stand in data.prompts too, so "
            "evaluations are no test of new prompts; take them out of one of the two"
        )


def _texts(config: RunConfig, base: Base, records: list[TextRecord], name: str, say: Say) -> Texts:
    if not records:
        return []
    data = config.data
    encoded, report = encode_texts(
        base.tokenizer,
        records,
        eos_id=end_of_text(base),
        max_tokens=text_tokens(config, base),
        truncation=data.truncation,
    )
    say(f"data.{name}: {report.describe()}")
    return encoded


def _pairs(config: RunConfig, base: Base, records: list[PairRecord], name: str, say: Say) -> list[Pair]:
    if not records:
        return []
    data = config.data
    encoded, report, mismatch = encode_pairs(
        base.tokenizer, records, eos_id=end_of_text(base), max_tokens=data.max_text_tokens, truncation=data.truncation
    )
    say(f"data.{name}: {report.describe()}; tokens differ at the prompt's end in {mismatch:.1%} of the pairs")
    return [(pair.chosen, pair.rejected) for pair in encoded]


def _prompts(config: RunConfig, base: Base, records: list[PromptRecord], name: str, say: Say) -> Texts:
    if not records:
        return []
    encoded, report = encode_prompts(
        base.tokenizer, records, max_tokens=prompt_tokens(config, base), truncation=config.data.truncation
    )
    say(f"data.{name}: {report.describe()}")
    return encoded


def text_tokens(config: RunConfig, base: Base) -> int:
    """The most tokens that a text of the data may have: what it is told of weights comes on top."""
    told, most = ToldWeights.of(config, base.tokenizer), config.data.max_text_tokens
    return told.room(most, "data.max_text_tokens") if told is not None and config.sft.tell_weights else most


def prompt_tokens(config: RunConfig, base: Base) -> int:
    """The most tokens that a prompt of the data may have: what it is told of weights comes on top."""
    told, most = ToldWeights.of(config, base.tokenizer), config.data.max_prompt_tokens
    return most if told is None else told.room(most)

"""How text becomes a reward model's input: its own tokenizer, a template, and the length that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fourfold.config.schema import RewardSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a padded batch is checked on when a model is loaded: texts of several lengths, so that most rows have padding.
PROBE: tuple[tuple[str, str], ...] = (
    ("what is rain?", " water."),
    ("say something good about the sea and the wind", " it is wide and blue, and the wind makes the waves of it."),
    ("the book", " was long, and dull. i left it after ten pages."),
    ("a", " b"),
)
# Lengths that stand for "no limit" in tokenizers' configs are far above this.
_NO_LIMIT = 10**6


Row = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TextReader:
    """Makes rows of token ids of prompts and responses, as the reward model's own tokenizer does."""

    tokenizer: Any
    template: str
    names: tuple[str, ...]  # the model's inputs
    padding: Mapping[str, int]
    limit: int  # tokens a row, 0 for none

    def rows(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[list[Row], int]:
        """One row a response, and how many were too long: of those the first tokens go, special ones stay."""
        segments = self._segments(prompts, responses)
        rows = self._ids(segments, {})
        long = [number for number, row in enumerate(rows) if self.limit and len(row["input_ids"]) > self.limit]
        for number in long:
            rows[number] = self._cut(rows[number], [part[number] for part in segments])
        return rows, len(long)

    def _segments(self, prompts: Sequence[str], responses: Sequence[str]) -> list[list[str]]:
        """The texts, or the first and the second segments."""
        if self.template == "pair":
            return [list(prompts), list(responses)]
        pairs = zip(prompts, responses, strict=True)
        if self.template == "chat":
            return [[self._chat(prompt, response) for prompt, response in pairs]]
        template = self.template or "{prompt}{response}"
        return [[template.format(prompt=prompt, response=response) for prompt, response in pairs]]

    def _chat(self, prompt: str, response: str) -> str:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False)

    def _ids(self, segments: Sequence[Sequence[str]], cut: Mapping[str, Any]) -> list[Row]:
        # A chat template writes its special tokens itself.
        special = self.template != "chat"
        found = self.tokenizer(*segments, add_special_tokens=special, verbose=False, **cut)
        return [{name: found[name][row] for name in self.names} for row in range(len(segments[0]))]

    def _cut(self, row: Row, segments: Sequence[str]) -> Row:
        if self.template != "chat":
            [row] = self._ids([[text] for text in segments], {"truncation": True, "max_length": self.limit})
            return row
        head = int(self.limit > 1 and row["input_ids"][0] == self.tokenizer.bos_token_id)
        return {name: [*ids[:head], *ids[len(ids) - self.limit + head :]] for name, ids in row.items()}

    def batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Rows side by side, padded on the right: int64 [batch, time] for each of the model's inputs."""
        width = max(len(row["input_ids"]) for row in rows)
        return {
            name: torch.tensor([[*row[name], *[fill] * (width - len(row[name]))] for row in rows])
            for name, fill in self.padding.items()
        }


def reader_of(model: PreTrainedModel, tokenizer: Any, settings: RewardSection) -> TextReader:
    """What reads texts for `model`; ValueError where it, or its tokenizer, cannot do what `settings` ask."""
    pad_id = pad_id_of(model, tokenizer)
    if settings.template == "chat" and tokenizer.chat_template is None:
        raise ValueError(
            f"reward.template: given 'chat', but the tokenizer of {settings.model!r} has no chat template; allowed: "
            "'', 'pair', or a text with {prompt} and {response}"
        )
    taken = inspect.signature(model.forward).parameters
    names = tuple(name for name in tokenizer.model_input_names if name in taken)
    padding = {"input_ids": pad_id, "token_type_ids": tokenizer.pad_token_type_id, "attention_mask": 0}
    tokenizer.truncation_side = "left"
    return TextReader(
        tokenizer, settings.template, names, {name: padding[name] for name in names}, _limit(model, tokenizer, settings)
    )


def _limit(model: PreTrainedModel, tokenizer: Any, settings: RewardSection) -> int:
    """Tokens that a row may have; 0 where nothing limits them."""
    positions = _positions(model)
    if not settings.max_tokens:
        return min((limit for limit in (positions, tokenizer.model_max_length) if 0 < limit < _NO_LIMIT), default=0)
    special = 0 if settings.template == "chat" else tokenizer.num_special_tokens_to_add(settings.template == "pair")
    if not special < settings.max_tokens <= (positions or _NO_LIMIT):
        raise ValueError(
            f"reward.max_tokens: given {settings.max_tokens}; allowed for {settings.model!r}: {special + 1} (its "
            f"special tokens and one more) to {positions or _NO_LIMIT:,}"
        )
    return settings.max_tokens


def _positions(model: PreTrainedModel) -> int:
    """Positions that the model has; 0 where they are not limited."""
    limits = [getattr(model.config, "max_position_embeddings", None) or 0]
    for module in model.modules():
        # RoBERTa and its kin count positions from the padding's id on.
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return min((limit for limit in limits if limit > 0), default=0)


def probe(reader: TextReader) -> list[Row]:
    """Rows of several lengths."""
    prompts, responses = zip(*PROBE, strict=True)
    return reader.rows(prompts, responses)[0]


def pad_id_of(model: PreTrainedModel, tokenizer: Any) -> int:
    """The id that fills rows up; decoders find the last token of a row by it."""
    rows = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    for given in (model.config.pad_token_id, tokenizer.pad_token_id):
        if given is not None and 0 <= given < rows:
            model.config.pad_token_id = given
            return given
    raise ValueError(
        f"reward.model: neither the config nor the tokenizer names a padding token below {rows}, so that texts of "
        "several lengths cannot be told apart; put pad_token_id into the model's config.json"
    )

"""Token ids of texts, prompts and pairs: special tokens exactly once, and a stated rule for what is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fourfold.data.records import Content, Message, PairRecord, PromptRecord, TextRecord
from fourfold.data.sources import REPORTED_ROWS

Truncation = Literal["drop", "left", "right", "error"]
PREVIEW_CHARACTERS = 240
_AT_TOO_LONG = {
    "drop": "left out",
    "left": "cut at the left end (a BOS stays)",
    "right": "cut at the right end",
}


@dataclass(frozen=True, slots=True)
class TruncationReport:
    """What the limit did to a data set; lengths in tokens, before and after, and the first row as the models see it."""

    policy: Truncation
    limit: int
    rows: int
    too_long: int
    dropped: int
    longest: int
    longest_kept: int
    first: str
    cuts_eos: bool

    def describe(self) -> str:
        """One sentence for the start of a run, without its full stop."""
        limit = f"limit {self.limit:,}, truncation {self.policy!r}"
        head = f"{self.rows:,} rows, the longest of {self.longest:,} tokens; {limit}: "
        if self.too_long == 0:
            body = "none is too long"
        else:
            body = f"{self.too_long:,} too long, {_AT_TOO_LONG[self.policy]}"
            if self.cuts_eos:
                body += ", so that they end without EOS"
        alike = self.dropped - (self.too_long if self.policy == "drop" else 0)
        if alike:
            body += f"; {alike:,} left out because chosen and rejected are the same tokens"
        if self.too_long or alike:
            body += f"; {self.rows - self.dropped:,} rows of at most {self.longest_kept:,} tokens remain"
        return f"{head}{body}; first row: {_shorten(self.first)!r}"


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """A prompt with each of its answers, tokenised as one text; both begin with the same `prompt_length` prompt tokens.

    `boundary_differs` says that prompt + answer does not begin with the tokens of the prompt alone: a merge crosses the
    border, or the chat template writes the prompt in another way once it is answered. An actor that continues the
    prompt's tokens cannot write such a text.
    """

    prompt_length: int
    chosen: list[int]
    rejected: list[int]
    boundary_differs: bool


def encode_text(tokenizer: Any, record: TextRecord, *, eos_id: int) -> list[int]:
    """Ids of a whole text, with exactly one EOS at its end."""
    return _encode_texts(tokenizer, [record], eos_id)[0]


def encode_prompt(tokenizer: Any, record: PromptRecord) -> list[int]:
    """Ids of a prompt as the actor continues it: the opening of the assistant's turn included, no EOS."""
    return _encode_prompts(tokenizer, [record])[0]


def encode_pair(tokenizer: Any, record: PairRecord, *, eos_id: int) -> EncodedPair:
    """Ids of prompt + chosen and prompt + rejected, each tokenised as one text, with exactly one EOS."""
    return _encode_pairs(tokenizer, [record], eos_id)[0]


def encode_texts(
    tokenizer: Any, records: Sequence[TextRecord], *, eos_id: int, max_tokens: int, truncation: Truncation
) -> tuple[list[list[int]], TruncationReport]:
    """Every text that the limit leaves, and what it did."""
    encoded = _encode_texts(tokenizer, records, eos_id)
    kept = _truncate(tokenizer, encoded, max_tokens, truncation, setting="data.max_text_tokens")
    return kept, _report(tokenizer, encoded, kept, max_tokens, truncation, ends_with_eos=True)


def encode_prompts(
    tokenizer: Any, records: Sequence[PromptRecord], *, max_tokens: int, truncation: Truncation
) -> tuple[list[list[int]], TruncationReport]:
    """Every prompt that the limit leaves, and what it did."""
    encoded = _encode_prompts(tokenizer, records)
    kept = _truncate(tokenizer, encoded, max_tokens, truncation, setting="data.max_prompt_tokens")
    return kept, _report(tokenizer, encoded, kept, max_tokens, truncation, ends_with_eos=False)


def encode_pairs(
    tokenizer: Any, records: Sequence[PairRecord], *, eos_id: int, max_tokens: int, truncation: Truncation
) -> tuple[list[EncodedPair], TruncationReport, float]:
    """Every pair that the limit leaves, what it did, and the share of pairs whose tokens differ at the border."""
    encoded = _encode_pairs(tokenizer, records, eos_id)
    lengths = [max(len(pair.chosen), len(pair.rejected)) for pair in encoded]
    _refuse_too_long(lengths, max_tokens, truncation, setting="data.max_text_tokens")
    if truncation == "drop":
        kept = [pair for pair, length in zip(encoded, lengths, strict=True) if length <= max_tokens]
    else:
        kept = [_cut_pair(pair, max_tokens, truncation, tokenizer.bos_token_id) for pair in encoded]
    kept = [pair for pair in kept if pair.chosen != pair.rejected]
    if not kept:
        raise ValueError(
            f"chosen and rejected are the same {max_tokens} or fewer tokens in every pair (data.max_text_tokens): "
            "nothing is left to learn from; try a larger data.max_text_tokens, and look at the rows"
        )
    mismatch_rate = sum(pair.boundary_differs for pair in encoded) / max(1, len(encoded))
    longer = [max(pair.chosen, pair.rejected, key=len) for pair in encoded]
    longer_kept = [max(pair.chosen, pair.rejected, key=len) for pair in kept]
    report = _report(tokenizer, longer, longer_kept, max_tokens, truncation, ends_with_eos=True)
    return kept, report, mismatch_rate


def _encode_texts(tokenizer: Any, records: Sequence[TextRecord], eos_id: int) -> list[list[int]]:
    rendered = _rendered(tokenizer, [record.text for record in records], eos_id)
    encoded = _ids(tokenizer, rendered, {eos_id, tokenizer.eos_token_id})
    return [[*_without_eos(ids, {eos_id}), eos_id] for ids in encoded]


def _encode_prompts(tokenizer: Any, records: Sequence[PromptRecord]) -> list[list[int]]:
    rendered = _rendered(tokenizer, [record.prompt for record in records], None)
    return _ids(tokenizer, rendered, {tokenizer.eos_token_id})


def _encode_pairs(tokenizer: Any, records: Sequence[PairRecord], eos_id: int) -> list[EncodedPair]:
    prompts = _encode_prompts(tokenizer, [PromptRecord(record.prompt) for record in records])
    chosen = _encode_texts(tokenizer, [TextRecord(_join(record.prompt, record.chosen)) for record in records], eos_id)
    rejected = _encode_texts(
        tokenizer, [TextRecord(_join(record.prompt, record.rejected)) for record in records], eos_id
    )
    pairs = []
    for prompt, better, worse in zip(prompts, chosen, rejected, strict=True):
        shared = min(_shared(prompt, better[:-1]), _shared(prompt, worse[:-1]))
        pairs.append(EncodedPair(shared, better, worse, boundary_differs=shared < len(prompt)))
    return pairs


def _join(prompt: Content, answer: Content) -> Content:
    if isinstance(prompt, str) and isinstance(answer, str):
        return prompt + answer
    assert not isinstance(prompt, str) and not isinstance(answer, str), (
        "records hold texts or messages, never a mixture"
    )
    return prompt + answer


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A text for the tokenizer; `templated` ones hold their special tokens already, BOS among them."""

    text: str
    templated: bool


def _rendered(tokenizer: Any, contents: Sequence[Content], eos_id: int | None) -> list[_Rendered]:
    """Whole texts that end at `eos_id`, or (where that is None) prompts with the opening of the assistant's turn."""
    if tokenizer.chat_template is None and not all(isinstance(content, str) for content in contents):
        raise ValueError(
            "the rows hold messages, but the tokenizer has no chat template; allowed: rows of plain text, "
            "or a model whose tokenizer has a template (often called Instruct or Chat)"
        )
    rendered, bad = [], []
    for row, content in enumerate(contents, start=1):
        try:
            rendered.append(_render(tokenizer, content, eos_id))
        except ValueError as error:
            bad.append((row, str(error)))
    _refuse_rows(bad, len(contents))
    return rendered


def _render(tokenizer: Any, content: Content, eos_id: int | None) -> _Rendered:
    if isinstance(content, str):
        return _Rendered(content, templated=False)
    text = _template(tokenizer, content, generation=eos_id is None)
    # Most templates end the last turn by EOS and a line break; a response ends at EOS, so the line break goes.
    stripped = text.rstrip()
    ends = eos_id is not None and stripped.endswith(tokenizer.convert_ids_to_tokens(eos_id))
    return _Rendered(stripped if ends else text, templated=True)


def _template(tokenizer: Any, content: tuple[Message, ...], *, generation: bool) -> str:
    from jinja2 import TemplateError

    messages = [{"role": message.role, "content": message.content} for message in content]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except TemplateError as error:
        roles = ", ".join(message.role for message in content)
        raise ValueError(
            f"the tokenizer's chat template refuses the messages ({error}); roles given: {roles}"
        ) from error


def _refuse_rows(bad: Sequence[tuple[int, str]], rows: int) -> None:
    if bad:
        lines = [f"{len(bad):,} of {rows:,} rows cannot be used:"]
        lines += [f"  row {row}: {reason}" for row, reason in bad[:REPORTED_ROWS]]
        if len(bad) > REPORTED_ROWS:
            lines.append(f"  and {len(bad) - REPORTED_ROWS:,} more")
        raise ValueError("\n".join([*lines, "mend or remove them, or check the tokenizer"]))


def _ids(tokenizer: Any, texts: Sequence[_Rendered], eos_ids: set[int]) -> list[list[int]]:
    """Ids with the special tokens that belong in front, without the EOS that some tokenizers put behind plain texts."""
    encoded: list[list[int]] = [[] for _ in texts]
    for templated in (False, True):
        rows = [row for row, text in enumerate(texts) if text.templated == templated]
        if rows:
            plain = [texts[row].text for row in rows]
            batch = tokenizer(plain, add_special_tokens=not templated, return_attention_mask=False, verbose=False)
            for row, ids in zip(rows, batch["input_ids"], strict=True):
                # An EOS that a template writes closes somebody's turn, so it stays.
                encoded[row] = list(ids) if templated else _without_eos(ids, eos_ids)
    empty = [row for row, ids in enumerate(encoded) if not ids]
    _refuse_rows([(row + 1, f"{texts[row].text!r} has no token") for row in empty], len(texts))
    return encoded


def _without_eos(ids: Sequence[int], eos_ids: set[int]) -> list[int]:
    end = len(ids)
    while end > 0 and ids[end - 1] in eos_ids:
        end -= 1
    return list(ids[:end])


def _refuse_too_long(lengths: Sequence[int], limit: int, policy: Truncation, *, setting: str) -> None:
    long = [row for row, length in enumerate(lengths, start=1) if length > limit]
    if long and policy == "error":
        raise ValueError(
            f"{len(long):,} of {len(lengths):,} rows have more than {setting} = {limit} tokens (the first is row "
            f"{long[0]}, the longest has {max(lengths):,}); allowed with data.truncation = 'error': none; "
            f"try a larger {setting}, or truncation = 'drop', 'left' or 'right'"
        )
    if policy == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"none of {len(lengths):,} rows has at most {setting} = {limit} tokens, so 'drop' leaves nothing; "
            f"the shortest has {min(lengths, default=0):,}; try a larger {setting}"
        )


def _truncate(
    tokenizer: Any, rows: Sequence[list[int]], limit: int, policy: Truncation, *, setting: str
) -> list[list[int]]:
    _refuse_too_long([len(ids) for ids in rows], limit, policy, setting=setting)
    if policy == "drop":
        return [ids for ids in rows if len(ids) <= limit]
    return [_cut(ids, limit, policy, tokenizer.bos_token_id) for ids in rows]


def _cut(ids: list[int], limit: int, policy: Truncation, bos_id: int | None) -> list[int]:
    if len(ids) <= limit:
        return ids
    if policy == "right":
        return ids[:limit]
    head = _head(ids, bos_id, limit)
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _head(ids: list[int], bos_id: int | None, limit: int) -> int:
    """Tokens that a cut at the left end leaves in front: a BOS, without which many models write nonsense."""
    return int(limit > 1 and ids[0] == bos_id)


def _cut_pair(pair: EncodedPair, limit: int, policy: Truncation, bos_id: int | None) -> EncodedPair:
    """Both texts within the limit; cut at the left end, both lose the same prompt tokens first and still share it."""
    excess = max(len(pair.chosen), len(pair.rejected)) - limit
    if excess <= 0:
        return pair
    length, chosen, rejected = min(pair.prompt_length, limit), pair.chosen, pair.rejected
    if policy == "left":
        head = min(_head(chosen, bos_id, limit), pair.prompt_length)
        gone = min(excess, pair.prompt_length - head)
        length = pair.prompt_length - gone
        chosen, rejected = (ids[:head] + ids[head + gone :] for ids in (chosen, rejected))
    chosen, rejected = (_cut(ids, limit, policy, bos_id) for ids in (chosen, rejected))
    return EncodedPair(length, chosen, rejected, pair.boundary_differs)


def _report(
    tokenizer: Any,
    before: Sequence[list[int]],
    after: Sequence[list[int]],
    limit: int,
    policy: Truncation,
    *,
    ends_with_eos: bool,
) -> TruncationReport:
    too_long = sum(len(ids) > limit for ids in before)
    return TruncationReport(
        policy=policy,
        limit=limit,
        rows=len(before),
        too_long=too_long,
        dropped=len(before) - len(after),
        longest=max((len(ids) for ids in before), default=0),
        longest_kept=max((len(ids) for ids in after), default=0),
        first=tokenizer.decode(after[0]) if after else "",
        cuts_eos=too_long > 0 and policy == "right" and ends_with_eos,
    )


def _shorten(text: str) -> str:
    half = PREVIEW_CHARACTERS // 2
    return text if len(text) <= PREVIEW_CHARACTERS else f"{text[:half]} ... {text[-half:]}"

"""Token ids: special tokens exactly once, borders, truncation, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from fourfold.data.records import Message, PairRecord, PromptRecord, TextRecord
from fourfold.data.tokenize import (
    Truncation,
    encode_pair,
    encode_pairs,
    encode_prompt,
    encode_prompts,
    encode_text,
    encode_texts,
)
from tiny import BOS, EOS, UNK, sentences, tiny_tokenizer

PLAIN = tiny_tokenizer(pad_is_eos=True)
WITH_BOS = tiny_tokenizer(pad_is_eos=False, bos=True)
ASK = Message("user", "how was the film")
SAY = Message("assistant", "the film is a gift")
MOAN = Message("assistant", "the film is a mess")


def ends_with_eos_itself() -> Any:
    """A tokenizer that puts BOS in front and EOS behind every plain text, as some do."""
    tokenizer = tiny_tokenizer(pad_is_eos=False, bos=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert tokenizer("a")["input_ids"][-1] == EOS
    return tokenizer


def words(text: str) -> list[int]:
    return WITH_BOS(text, add_special_tokens=False)["input_ids"]


def texts_of(*lengths: int) -> list[TextRecord]:
    """Texts of so many tokens with EOS: a letter and digits, each one token."""
    return [TextRecord("0123456789"[: length - 1]) for length in lengths]


@pytest.mark.parametrize("text", sentences()[:3])
def test_plain_texts_get_bos_by_the_tokenizers_rule_and_one_eos(text: str) -> None:
    assert encode_text(PLAIN, TextRecord(text), eos_id=EOS) == [*words(text), EOS]
    assert encode_text(WITH_BOS, TextRecord(text), eos_id=EOS) == [BOS, *words(text), EOS]
    assert encode_text(ends_with_eos_itself(), TextRecord(text), eos_id=EOS) == [BOS, *words(text), EOS]
    assert encode_text(WITH_BOS, TextRecord(text + "<eos><eos>"), eos_id=EOS) == [BOS, *words(text), EOS]


def test_the_eos_of_the_run_replaces_that_of_the_tokenizer() -> None:
    assert encode_text(ends_with_eos_itself(), TextRecord("a film"), eos_id=7) == [BOS, *words("a film"), 7]


def test_prompts_never_end_with_eos() -> None:
    for tokenizer, head in ((PLAIN, []), (WITH_BOS, [BOS]), (ends_with_eos_itself(), [BOS])):
        assert encode_prompt(tokenizer, PromptRecord("the film is")) == [*head, *words("the film is")]


@pytest.mark.parametrize("tokenizer", [WITH_BOS, ends_with_eos_itself()], ids=["bos", "bos and eos"])
def test_bos_of_the_chat_template_is_not_doubled(tokenizer: Any) -> None:
    rendered = "user:\nhow was the film\nassistant:\n"
    prompt = encode_prompt(tokenizer, PromptRecord((ASK,)))
    assert prompt == [BOS, *words(rendered)]
    text = encode_text(tokenizer, TextRecord((ASK, SAY)), eos_id=EOS)
    assert text == [BOS, *words(rendered + "the film is a gift\n"), EOS]
    assert text.count(BOS) == text.count(EOS) == 1


def test_a_template_without_bos_gets_none() -> None:
    assert BOS not in encode_prompt(PLAIN, PromptRecord((ASK,)))


def test_a_template_that_ends_turns_by_eos_keeps_one_at_the_end() -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    ids = encode_text(tokenizer, TextRecord((ASK, SAY)), eos_id=EOS)
    assert tokenizer.decode(ids) == "user:\nhow was the film<eos>\nassistant:\nthe film is a gift<eos>"
    assert ids[-1] == EOS and ids.count(EOS) == 2
    pair = encode_pair(tokenizer, PairRecord((ASK,), (SAY,), (MOAN,)), eos_id=EOS)
    assert pair.chosen == ids
    assert pair.chosen[: pair.prompt_length] == encode_prompt(tokenizer, PromptRecord((ASK,)))


def test_rows_of_both_kinds_stay_in_order() -> None:
    records = [PromptRecord("the film"), PromptRecord((ASK,)), PromptRecord("a story")]
    encoded, report = encode_prompts(WITH_BOS, records, max_tokens=64, truncation="error")
    assert encoded == [encode_prompt(WITH_BOS, record) for record in records]
    assert report.rows == 3


def test_missing_and_refusing_templates_are_explained() -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, PromptRecord((ASK,)))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    records = [PromptRecord("plain"), PromptRecord((ASK, ASK)), PromptRecord((ASK, SAY))]
    refused = (
        r"2 of 3 rows cannot be used:\n  row 2: .*roles must alternate.*: user, user\n  row 3: .*: user, assistant\n"
    )
    with pytest.raises(ValueError, match=refused):
        encode_prompts(tokenizer, records, max_tokens=64, truncation="drop")


def test_rows_without_any_token_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"^1 of 2 rows cannot be used:\n  row 2: '<eos>' has no token\n"):
        encode_texts(PLAIN, [TextRecord("a"), TextRecord("<eos>")], eos_id=EOS, max_tokens=9, truncation="drop")
    records = [PromptRecord("a"), *[PromptRecord("<eos>")] * 12]
    with pytest.raises(ValueError, match=r"^12 of 13 rows.*\n(  row .*\n){10}  and 2 more\n"):
        encode_prompts(PLAIN, records, max_tokens=9, truncation="drop")


@pytest.mark.parametrize(
    ("prompt", "chosen", "differs"),
    [
        ("the film", " is a gift", False),
        ("the film ", "is a gift", True),  # the space belongs to the next word's token
        ("the fi", "lm is a gift", True),  # an answer that begins with a piece of a word
    ],
)
def test_merges_across_the_border_are_seen(prompt: str, chosen: str, differs: bool) -> None:
    """FAULTS L2: texts are tokenised whole, and the share of pairs whose border tokens differ is reported."""
    record = PairRecord(prompt, chosen, chosen.replace("gift", "mess"))
    pair = encode_pair(WITH_BOS, record, eos_id=EOS)
    assert pair.chosen == [BOS, *words("the film is a gift"), EOS]
    assert pair.rejected == [BOS, *words("the film is a mess"), EOS]
    assert pair.boundary_differs == differs
    assert (words(prompt) + words(chosen) != words(prompt + chosen)) == differs
    clean = PairRecord("the film", " is long", " is short")
    _, report, rate = encode_pairs(WITH_BOS, [record, clean], eos_id=EOS, max_tokens=64, truncation="error")
    assert rate == differs / 2
    assert report.rows == 2


@given(st.sampled_from(sentences()), st.data())
def test_border_check_equals_tokenising_the_parts(sentence: str, data: st.DataObject) -> None:
    """FAULTS L2, wherever a sentence is cut: the prefix test finds just the cuts where the parts differ."""
    cut = data.draw(st.integers(1, len(sentence) - 1))
    prompt, answer = sentence[:cut], sentence[cut:]
    pair = encode_pair(WITH_BOS, PairRecord(prompt, answer, answer + " again"), eos_id=EOS)
    assert pair.boundary_differs == (words(prompt) + words(answer) != words(sentence))
    shared = pair.chosen[: pair.prompt_length]
    assert shared == pair.rejected[: pair.prompt_length]
    if not pair.boundary_differs:
        assert shared == [BOS, *words(prompt)]


def test_drop_leaves_out_what_is_too_long_and_says_so() -> None:
    """FAULTS L5: the exact lengths before and after are stated."""
    encoded, report = encode_texts(PLAIN, texts_of(3, 9, 5, 8), eos_id=EOS, max_tokens=5, truncation="drop")
    assert [len(ids) for ids in encoded] == [3, 5]
    assert (report.rows, report.too_long, report.dropped, report.longest, report.longest_kept) == (4, 2, 2, 9, 5)
    assert report.describe() == (
        "4 rows, the longest of 9 tokens; limit 5, truncation 'drop': 2 too long, left out; 2 rows of at most 5 tokens "
        "remain; first row: '01<eos>'"
    )


def test_nothing_too_long() -> None:
    """FAULTS L5: what would have happened is stated all the same."""
    for policy in ("drop", "left", "right", "error"):
        encoded, report = encode_texts(PLAIN, texts_of(3, 5), eos_id=EOS, max_tokens=5, truncation=policy)
        assert [ids[-1] for ids in encoded] == [EOS, EOS]
        assert f"limit 5, truncation {policy!r}: none is too long" in report.describe()
        assert "without EOS" not in report.describe()


def test_left_keeps_the_end_and_bos() -> None:
    long = TextRecord("0123456789")
    digits = words("0123456789")
    encoded, report = encode_texts(PLAIN, [long], eos_id=EOS, max_tokens=4, truncation="left")
    assert encoded == [[*digits[-3:], EOS]]
    encoded, _ = encode_texts(WITH_BOS, [long], eos_id=EOS, max_tokens=4, truncation="left")
    assert encoded == [[BOS, *digits[-2:], EOS]]
    encoded, _ = encode_texts(WITH_BOS, [long], eos_id=EOS, max_tokens=1, truncation="left")
    assert encoded == [[EOS]]
    assert "left end" in report.describe()


def test_right_loses_eos_and_says_so() -> None:
    encoded, report = encode_texts(WITH_BOS, texts_of(9, 3), eos_id=EOS, max_tokens=5, truncation="right")
    assert encoded == [[BOS, *words("0123")], [BOS, *words("01"), EOS]]
    assert "1 too long, cut at the right end, so that they end without EOS" in report.describe()
    _, report = encode_prompts(WITH_BOS, [PromptRecord("0123456789")], max_tokens=5, truncation="right")
    assert "EOS" not in report.describe()  # prompts have none


def test_error_names_the_setting_the_count_and_the_first_row() -> None:
    with pytest.raises(ValueError, match=r"2 of 3 rows .*data\.max_text_tokens = 5 .*row 2, the longest has 9"):
        encode_texts(PLAIN, texts_of(3, 8, 9), eos_id=EOS, max_tokens=5, truncation="error")
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens = 2"):
        encode_prompts(PLAIN, [PromptRecord("012345")], max_tokens=2, truncation="error")


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"leaves nothing; the shortest has 8"):
        encode_texts(PLAIN, texts_of(8, 9), eos_id=EOS, max_tokens=5, truncation="drop")
    pair = PairRecord("012", "345", "678")
    with pytest.raises(ValueError, match="leaves nothing"):
        encode_pairs(PLAIN, [pair], eos_id=EOS, max_tokens=5, truncation="drop")


def test_a_pair_is_dropped_when_either_text_is_too_long() -> None:
    records = [PairRecord("01", "2", "3456"), PairRecord("01", "2345", "6"), PairRecord("01", "2", "3")]
    kept, report, _ = encode_pairs(PLAIN, records, eos_id=EOS, max_tokens=5, truncation="drop")
    assert kept == [encode_pair(PLAIN, records[2], eos_id=EOS)]
    assert (report.too_long, report.dropped, report.longest, report.longest_kept) == (2, 2, 7, 4)


def test_cut_pairs_still_share_their_prompt() -> None:
    record = PairRecord("0123", "45", "6789")  # with BOS and EOS 8 and 10 tokens
    (pair,), report, _ = encode_pairs(WITH_BOS, [record], eos_id=EOS, max_tokens=8, truncation="left")
    assert pair.chosen == [BOS, *words("2345"), EOS]
    assert pair.rejected == [BOS, *words("236789"), EOS]
    assert pair.prompt_length == 3
    assert (report.too_long, report.dropped) == (1, 0)
    (pair,), _, _ = encode_pairs(WITH_BOS, [record], eos_id=EOS, max_tokens=4, truncation="left")
    assert (pair.chosen, pair.rejected) == ([BOS, *words("45"), EOS], [BOS, *words("89"), EOS])
    assert pair.prompt_length == 1
    (pair,), _, _ = encode_pairs(WITH_BOS, [record], eos_id=EOS, max_tokens=6, truncation="right")
    assert (pair.chosen, pair.rejected) == ([BOS, *words("01234")], [BOS, *words("01236")])
    assert pair.prompt_length == 5


def test_pairs_that_a_cut_makes_alike_are_left_out() -> None:
    alike, apart = PairRecord("0123", "4", "5"), PairRecord("0", "1", "2")
    kept, report, _ = encode_pairs(PLAIN, [alike, apart], eos_id=EOS, max_tokens=4, truncation="right")
    assert kept == [encode_pair(PLAIN, apart, eos_id=EOS)]
    assert "1 left out because chosen and rejected are the same tokens; 1 rows" in report.describe()
    with pytest.raises(ValueError, match="nothing is left to learn from"):
        encode_pairs(PLAIN, [alike], eos_id=EOS, max_tokens=4, truncation="right")
    unknown = PairRecord("the film", " é", " ü")  # all unknown letters are one token
    assert encode_pair(PLAIN, unknown, eos_id=EOS).chosen[-2] == UNK
    _, report, _ = encode_pairs(PLAIN, [unknown, apart], eos_id=EOS, max_tokens=9, truncation="drop")
    assert (report.too_long, report.dropped) == (0, 1)


@given(
    st.lists(st.tuples(*[st.text("abcd ", min_size=1, max_size=12)] * 3), min_size=1, max_size=6),
    st.integers(2, 20),
    st.sampled_from(["drop", "left", "right"]),
)
def test_nothing_longer_than_the_limit_leaves(rows: list[tuple[str, str, str]], limit: int, policy: Truncation) -> None:
    records = [PairRecord(*row) for row in rows]
    try:
        kept, report, rate = encode_pairs(WITH_BOS, records, eos_id=EOS, max_tokens=limit, truncation=policy)
    except ValueError as error:
        assert "leaves nothing" in str(error) or "nothing is left" in str(error)
        return
    assert all(len(ids) <= limit for pair in kept for ids in (pair.chosen, pair.rejected))
    assert all(pair.chosen[: pair.prompt_length] == pair.rejected[: pair.prompt_length] for pair in kept)
    assert all(ids[0] == BOS for pair in kept for ids in (pair.chosen, pair.rejected))
    assert len(kept) == report.rows - report.dropped
    assert 0 <= rate <= 1
    if policy != "right":
        assert all(ids[-1] == EOS for pair in kept for ids in (pair.chosen, pair.rejected))


def test_the_first_row_is_shown_as_the_models_see_it() -> None:
    """FAULTS L7: with a chat template and a column of one's own, the first rendered sample holds the prompt."""
    _, report = encode_prompts(WITH_BOS, [PromptRecord((ASK,))], max_tokens=64, truncation="drop")
    assert "<bos>user:\\nhow was the film\\nassistant:\\n" in report.describe()
    _, report = encode_texts(PLAIN, [TextRecord("a " * 400 + "z")], eos_id=EOS, max_tokens=999, truncation="drop")
    assert len(report.describe()) < 400
    assert " ... " in report.describe() and "z<eos>" in report.describe()

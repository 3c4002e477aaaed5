"""Texts of tokens: put together they are what the tokenizer decodes, and no character is torn apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fourfold.diagnostics.token_texts import TokenText, token_texts
from tiny import EOS, sentences, tiny_tokenizer

SMILE = "\U0001f642"


def byte_level() -> Any:
    """A byte-level BPE that knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sentences(),
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[AddedToken("<end>", special=True)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_fallback() -> Any:
    """As SentencePiece models with byte fallback are: letters, and bytes for all else."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportArgumentType]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=20))
@settings(max_examples=60, deadline=None)
def test_together_they_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(each.text for each in texts) == text
    assert not any(each.special for each in texts) and (not texts or not texts[-1].bytes)


def test_a_character_of_several_tokens_is_shown_where_it_ends() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer(f"a{SMILE}b", add_special_tokens=False)["input_ids"]
    assert token_texts(ids, tokenizer) == [
        TokenText("a"), TokenText("", "F0"), TokenText("", "F0 9F"), TokenText("", "F0 9F 99"), TokenText(SMILE),
        TokenText("b"),
    ]  # fmt: skip
    # Cut short, as a response by its length limit.
    assert token_texts(ids[:3], tokenizer)[-1] == TokenText("", "F0 9F")


@given(data=st.binary(max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_bytes_are_lost_and_none_are_shown_twice(data: bytes) -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    texts = token_texts(ids, tokenizer)
    for length in range(len(ids) + 1):  # what a token shows does not depend on those after it
        assert token_texts(ids[:length], tokenizer) == texts[:length]
    for at, each in enumerate(texts):
        assert each.text or each.bytes, "every token shows something"
        waiting = bytes.fromhex(each.bytes)
        assert data[: at + 1].endswith(waiting) and len(waiting) < 4


def test_bytes_that_are_no_text_are_escapes() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<0xFF>", "<0xF0>", "a", "<0x80>")]
    assert token_texts(ids, tokenizer) == [
        TokenText("\\xff"), TokenText("", "F0"), TokenText("a"), TokenText("\\x80")
    ]  # fmt: skip


def test_special_tokens_are_named() -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    ids = [*tokenizer("the film")["input_ids"], EOS]
    texts = token_texts(ids, tokenizer)
    assert texts[-1] == TokenText("<eos>", "", True)
    assert "".join(each.text for each in texts[:-1]) == "the film"


def test_an_id_that_the_tokenizer_does_not_know_is_named_by_its_number() -> None:
    """Embeddings often have more rows than the tokenizer has tokens."""
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    assert token_texts([5000], tokenizer) == [TokenText("<5000>", "", True)]

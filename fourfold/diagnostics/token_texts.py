"""What each token of a text is, for people: characters that several tokens make together are shown where they end.

A byte-level tokenizer cuts between the bytes of a character, so that a token decoded alone is a replacement character.
Here tokens are taken back to bytes and decoded as one stream of UTF-8.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.config.schema import RunConfig
from fourfold.memory.quantization import quiet_imports

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's


class TokenText(NamedTuple):
    """The characters that end in a token; `bytes` are those after them, which belong to a later one, as in "F0 9F"."""

    text: str
    bytes: str = ""
    special: bool = False


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer of a run's model; no weights are read."""
    from fourfold.models.loading import resolve_model  # which imports every kind of model

    quiet_imports()
    from transformers import AutoTokenizer

    place = resolve_model(config.model.path, Path(config.model.cache))
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[TokenText]:
    """A text for each token. Bytes that are no UTF-8, alone or with their neighbours, stand as escapes (\\xff)."""
    added = tokenizer.added_tokens_decoder
    names = tokenizer.convert_ids_to_tokens(list(ids))
    byte_level = "ByteLevel" in _decoders(tokenizer)
    texts: list[TokenText] = []
    waiting = b""
    for token, name in zip(ids, names, strict=True):
        if token in added or name is None:
            texts.append(TokenText(str(added.get(token, f"<{token}>")), "", token not in added or added[token].special))
            waiting = b""
            continue
        own = _own_bytes(name, byte_level=byte_level)
        text, rest = _decoded(waiting + own)
        if waiting and text.startswith(f"\\x{waiting[0]:02x}"):  # what was begun does not go on here
            text, rest = _decoded(own)
        texts.append(TokenText(text, rest.hex(" ").upper()))
        waiting = rest
    return texts


def _decoded(data: bytes) -> tuple[str, bytes]:
    """Characters of UTF-8, and the bytes at the end that begin another."""
    text, used = codecs.utf_8_decode(data, "backslashreplace", False)
    return text, data[used:]


def _own_bytes(name: str, *, byte_level: bool) -> bytes:
    """The bytes that a token of the vocabulary stands for."""
    if byte_level:
        return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in name)
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    return name.replace(_SPACE, " ").encode()


def _decoders(tokenizer: Any) -> set[str]:
    """The kinds of decoders that a tokenizer puts texts together with."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {each["type"] for each in (state, *state.get("decoders", ()))}


def _byte_alphabet() -> dict[str, int]:
    """Characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, encoder.py of GPT-2).

    Printable ones of Latin-1 stand for themselves, the others for characters from U+0100 on in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()

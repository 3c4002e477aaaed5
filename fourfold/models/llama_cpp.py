"""llama.cpp as an engine: what the model in a GGUF file says of given token ids, on the CPU, in this process.

Rows are decoded side by side, each as a sequence of its own and without padding. Logits exist for one piece of a few
hundred states at a time, and what is made of them is float32.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from jaxtyping import Float32
from torch import Tensor

from fourfold.algorithms.log_probs import log_probs_from_logits

PACKAGE = "llama_cpp"
# Cells of the key-value cache, unless one row needs more: every token attends to all of them, behind a mask.
CELLS = 512
# Tokens of one pass, at most, and so rows of logits; of these so many are reduced at a time.
PIECE_TOKENS, BLOCK_TOKENS = 256, 64
# Rows side by side.
SEQUENCES = 32

Ids = Sequence[int]


def library(key: str) -> Any:
    """The Python binding; ValueError names the extra that brings it. `key` is the setting that asks for it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(
            f"{key}: llama.cpp needs the Python package llama-cpp-python, which is built for minutes when it is "
            f"installed; try: pip install 'fourfold[llama-cpp]', or leave {key} out"
        )
    # Else it prints what it finds in every file; it takes llama.cpp's warnings for errors.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    return importlib.import_module(PACKAGE)


@dataclass(frozen=True)
class _Token:
    """A token to decode; `wanted`: whether what comes after it is asked for."""

    id: int
    position: int
    sequence: int
    wanted: bool


class LlamaCpp:
    """The model in a GGUF file, with as many threads as torch has."""

    def __init__(self, file: Path, key: str) -> None:
        self._cpp = cpp = library(key)
        self.file = file
        cpp.llama_backend_init()
        parameters = cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = cpp.llama_model_load_from_file(str(file).encode(), parameters)
        if not self._model:
            raise ValueError(f"{key}: llama.cpp cannot read {str(file)!r}; give a GGUF file of a causal language model")
        weakref.finalize(self, cpp.llama_model_free, self._model)
        self.vocabulary: int = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self._model))
        self.parameters: int = cpp.llama_model_n_params(self._model)
        self._hidden: int = cpp.llama_model_n_embd(self._model)
        self._batch = cpp.llama_batch_init(PIECE_TOKENS, 0, 1)
        weakref.finalize(self, cpp.llama_batch_free, self._batch)
        self._context: Any = None
        self._cells = 0
        self._adapters: Any = None

    def take_adapters(self, file: Path) -> None:
        """Compute with the LoRA adapters in a GGUF file from here on, and no more with those before."""
        adapters = self._cpp.llama_adapter_lora_init(self._model, str(file).encode())
        if not adapters:
            raise RuntimeError(f"llama.cpp cannot put the adapters in {str(file)!r} on {str(self.file)!r}")
        before, self._adapters = self._adapters, adapters
        self._put_on_adapters()
        if before is not None:
            self._cpp.llama_adapter_lora_free(before)

    def _put_on_adapters(self) -> None:
        """In a context that may be new."""
        if self._adapters is None or self._context is None:
            return
        one, scale = (self._cpp.llama_adapter_lora_p_ctypes * 1)(self._adapters), (ctypes.c_float * 1)(1.0)
        if status := self._cpp.llama_set_adapters_lora(self._context, one, 1, scale):
            raise RuntimeError(f"llama.cpp could not take adapters for {self.file} (status {status})")

    def growing(self, rows: int, tokens: int) -> Growing:
        """Up to `rows` sequences of `tokens` in all, still without any; what was decoded before is forgotten."""
        context = self._room(tokens)
        self._cpp.llama_set_embeddings(context, False)
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(context), True)
        assert rows <= SEQUENCES
        return Growing(self, context, [0] * rows)

    def log_probs(self, rows: Sequence[Ids], starts: Sequence[int], temperature: float) -> Float32[Tensor, "tokens"]:
        """log softmax(logits / temperature) of the tokens of each row from its start on, rows one after the other."""
        labels = torch.tensor([token for row, start in zip(rows, starts, strict=True) for token in row[start:]])
        found, at = torch.empty(len(labels)), 0
        for logits in self.logits(rows, starts):
            for block in logits.split(BLOCK_TOKENS):
                chosen = slice(at, at + len(block))
                found[chosen] = log_probs_from_logits(block, labels[chosen], temperature)
                at = chosen.stop
        return found

    def logits(self, rows: Sequence[Ids], starts: Sequence[int]) -> Iterator[Float32[Tensor, "states vocab"]]:
        """Logits of the states before the tokens of each row from its start on, rows one after the other, in pieces."""
        tokens = [
            [(token, position, position + 1 >= start) for position, token in enumerate(row[:-1])]
            for row, start in zip(rows, starts, strict=True)
        ]
        read = self._cpp.llama_get_logits_ith
        for context, wanted in self._pieces(tokens, embeddings=False):
            yield torch.from_numpy(numpy.stack([self._numbers(read(context, i), self.vocabulary) for i in wanted]))

    def hidden(self, rows: Sequence[Ids]) -> Float32[Tensor, "rows hidden"]:
        """The state after the last token of each row, as the final norm leaves it."""
        tokens = [[(token, position, position + 1 == len(row)) for position, token in enumerate(row)] for row in rows]
        read = self._cpp.llama_get_embeddings_ith
        found = [
            self._numbers(read(context, i), self._hidden).copy()
            for context, wanted in self._pieces(tokens, embeddings=True)
            for i in wanted
        ]
        return torch.from_numpy(numpy.stack(found))

    def _numbers(self, pointer: Any, count: int) -> Any:
        return numpy.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (count,))

    def _pieces(
        self, rows: Sequence[Sequence[tuple[int, int, bool]]], *, embeddings: bool
    ) -> Iterator[tuple[Any, list[int]]]:
        """Decode (id, position, wanted) of rows, and give the places of what is wanted in what was decoded last."""
        cpp = self._cpp
        for group in _groups([len(row) for row in rows]):
            context = self._room(sum(len(rows[row]) for row in group))
            cpp.llama_set_embeddings(context, embeddings)
            cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
            tokens = [
                _Token(id, at, sequence, wanted) for sequence, row in enumerate(group) for id, at, wanted in rows[row]
            ]
            for start in range(0, len(tokens), PIECE_TOKENS):
                piece = tokens[start : start + PIECE_TOKENS]
                self._decode(context, piece)
                wanted = [place for place, token in enumerate(piece) if token.wanted]
                if wanted:
                    yield context, wanted

    def decoded(self, context: Any, tokens: Sequence[_Token]) -> list[Any]:
        """The logits after those tokens of a piece that are `wanted`."""
        self._decode(context, tokens)
        read = self._cpp.llama_get_logits_ith
        wanted = [place for place, token in enumerate(tokens) if token.wanted]
        return [self._numbers(read(context, place), self.vocabulary).copy() for place in wanted]

    def _decode(self, context: Any, tokens: Sequence[_Token]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token.id
            batch.pos[place] = token.position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = token.sequence
            batch.logits[place] = token.wanted
        if status := self._cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens of {self.file} (status {status})")

    def _room(self, cells: int) -> Any:
        """A context with at least so many cells; keys and values in float32."""
        if cells > self._cells:
            cpp, parameters = self._cpp, self._cpp.llama_context_default_params()
            parameters.n_ctx = self._cells = max(cells, CELLS)
            parameters.n_batch = parameters.n_ubatch = PIECE_TOKENS
            parameters.n_seq_max = SEQUENCES
            parameters.kv_unified = True
            parameters.type_k = parameters.type_v = cpp.GGML_TYPE_F32
            parameters.flash_attn_type = cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            parameters.pooling_type = cpp.LLAMA_POOLING_TYPE_NONE
            parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
            if self._context is not None:
                self._free()
            self._context = cpp.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise RuntimeError(f"llama.cpp could not make a context of {cells} tokens for {self.file}")
            self._free = weakref.finalize(self, cpp.llama_free, self._context)
            self._put_on_adapters()
        return self._context


class Growing:
    """Sequences that get tokens piece by piece, beside each other; `lengths` are those so far."""

    def __init__(self, engine: LlamaCpp, context: Any, lengths: list[int]) -> None:
        self._engine = engine
        self._context = context
        self._lengths = lengths

    def logits_after(self, more: Mapping[int, Ids]) -> Float32[Tensor, "rows vocab"]:
        """Append these tokens to these sequences: the logits after the last one of each, in their order."""
        tokens = [
            _Token(id, self._lengths[sequence] + place, sequence, place + 1 == len(ids))
            for sequence, ids in more.items()
            for place, id in enumerate(ids)
        ]
        for sequence, ids in more.items():
            self._lengths[sequence] += len(ids)
        found = []
        for start in range(0, len(tokens), PIECE_TOKENS):
            found += self._engine.decoded(self._context, tokens[start : start + PIECE_TOKENS])
        return torch.from_numpy(numpy.stack(found))


def _groups(lengths: Sequence[int]) -> Iterator[range]:
    """Consecutive rows that fit beside each other; a row that is too long for that stands alone."""
    start = tokens = 0
    for row, length in enumerate(lengths):
        if row > start and (tokens + length > CELLS or row - start == SEQUENCES):
            yield range(start, row)
            start, tokens = row, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))

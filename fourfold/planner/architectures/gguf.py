"""The header of a GGUF file (versions 2 and 3): its metadata and the names, shapes and types of its tensors.

Tensor data is not read. The `gguf` package reads headers too, but imports numpy and maps every tensor. Format:
github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# By the number of a metadata type: its struct format. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# By the number of a tensor type: its name, the numbers in a block, the bytes of a block (ggml.h, ggml-common.h).
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


class Tensor(NamedTuple):
    """A tensor's type and shape, the fastest dimension first."""

    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself. Metadata that are arrays (the tokenizer's) are left out."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of the tensors of each type, most first."""
        sums: dict[str, int] = {}
        for tensor in self.tensors.values():
            sums[tensor.type] = sums.get(tensor.type, 0) + tensor.bytes
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))

    @property
    def quantisation(self) -> str:
        """The type that most bytes of the file are of, such as 'Q4_1'."""
        return next(iter(self.bytes_by_type), "")


def read_header(file: Path) -> Header:
    """The header of a GGUF file; ValueError where it is none, or broken, or one of several parts."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Reader(data).header()
    except FileNotFoundError:
        raise ValueError(f"no GGUF file at {str(file)!r}; give an existing file") from None
    except (OSError, ValueError, struct.error, UnicodeDecodeError, IndexError) as error:
        raise ValueError(
            f"{str(file)!r} is no whole GGUF file ({error}); allowed: version 2 or 3, little-endian; try to bring the "
            "file again"
        ) from error
    if header.metadata.get("split.count", 0) > 1:
        raise ValueError(
            f"{str(file)!r} is one of {header.metadata['split.count']} parts; allowed: one whole file; try "
            "`llama-gguf-split --merge`"
        )
    return header


class _Reader:
    """Walks through the bytes of a file from its beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._data[:4]!r}, not with b'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(pairs):
            key, kind = self._string(), self._scalar("I")
            if kind == _ARRAY:
                self._skip_array()
            else:
                metadata[key] = self._string() if kind == _STRING else self._scalar(self._format(kind))
        return Header(metadata, dict(self._tensor() for _ in range(tensors)))

    def _scalar(self, format: str) -> Any:
        [value] = struct.unpack_from(f"<{format}", self._data, self._at)
        self._at += struct.calcsize(f"<{format}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        text = self._data[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("a text goes beyond its end")
        self._at += length
        return text.decode()

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return _SCALARS[kind]

    def _skip_array(self) -> None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:  # of a vocabulary there are 100,000 and more
            length, at = struct.Struct("<Q").unpack_from, self._at
            for _ in range(count):
                at += 8 + length(self._data, at)[0]
            self._at = at
        else:
            self._at += count * struct.calcsize(f"<{self._format(kind)}")
        if self._at > len(self._data):
            raise ValueError("an array goes beyond its end")

    def _tensor(self) -> tuple[str, Tensor]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        kind, _ = self._scalar("I"), self._scalar("Q")  # the second is where its data begin
        if kind not in _TYPES:
            raise ValueError(f"the tensor {name!r} has the unknown type {kind}")
        type_name, block, size = _TYPES[kind]
        return name, Tensor(type_name, shape, math.prod(shape) // block * size)


# By the architecture in a header: the model_type of a config.json.
_FAMILIES = {
    "llama": "llama",  # llama.cpp has Mistral's and Mixtral's models under this name too
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "deepseek2": "deepseek_v2",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
}
# By the key of a config.json: that of a header's metadata, behind the architecture's name.
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length",
    "n_positions": "context_length",
}
_GPT2_KEYS = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"}


def config_of(header: Header) -> dict[str, Any]:
    """The header as the config.json of the same model would put it; what it leaves to the tensors is read from them."""
    name = header.metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise ValueError(
            f"general.architecture {name!r}: its parameters cannot be counted; allowed: {', '.join(_FAMILIES)}; try a "
            "model of one of these"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("the file has no tensor token_embd.weight; allowed: a whole language model")
    given = {key: header.metadata.get(f"{name}.{theirs}") for key, theirs in _KEYS.items()}
    config = {key: value for key, value in given.items() if value is not None}
    config |= {
        "model_type": _FAMILIES[name],
        "vocab_size": embedding.shape[1],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }
    if name == "llama" and config.get("num_experts"):
        config |= {"model_type": "mixtral", "num_local_experts": config["num_experts"]}
    if name == "deepseek2":
        config |= _latent(header)
    if name in ("gpt2", "gptneox"):
        config |= {ours: config[theirs] for ours, theirs in _GPT2_KEYS.items() if theirs in config}
        config |= {"n_inner": config.get("intermediate_size"), "attention_bias": True}
    return config


def _latent(header: Header) -> dict[str, Any]:
    """DeepSeek's head sizes: in newer files under names of their own, in older ones in the plain keys."""
    found = {}
    for key in ("key_length", "value_length"):
        plain = header.metadata.get(f"deepseek2.attention.{key}", 0)
        found[key] = header.metadata.get(f"deepseek2.attention.{key}_mla", plain)
    rotary = header.metadata.get("deepseek2.rope.dimension_count", 0)
    return {
        "qk_nope_head_dim": found["key_length"] - rotary,
        "v_head_dim": found["value_length"],
        "n_routed_experts": header.metadata.get("deepseek2.expert_count"),
    }

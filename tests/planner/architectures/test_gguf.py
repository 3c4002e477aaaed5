"""GGUF headers, written by the `gguf` package, as ours reads them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest

from fourfold.planner.architectures import Architecture, find_architecture
from fourfold.planner.architectures.gguf import _TYPES, config_of, read_header
from fourfold.planner.architectures.published import PUBLISHED

WIDE, ROWS = 64, 37  # width and vocabulary


def write(
    file: Path, values: dict[str, int], architecture: str = "llama", tensors: dict[str, Any] | None = None
) -> Path:
    """A file with a tokenizer's arrays and the tensors asked for, float32 unless given with a type."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_string("general.name", "tiny, with an ü")
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(ROWS)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * ROWS)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, value in values.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name, tensor in {"token_embd.weight": numpy.zeros((ROWS, WIDE), "float32"), **(tensors or {})}.items():
        if isinstance(tensor, tuple):
            data, kind = tensor
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


LLAMA = {
    "block_count": 2,
    "embedding_length": WIDE,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def test_types_are_those_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES}
    assert theirs == _TYPES


def test_a_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    data = numpy.ones((96, WIDE), "float32")
    tensors = {
        "blk.0.ffn_up.weight": (data, gguf.GGMLQuantizationType.Q4_1),
        "blk.0.ffn_gate.weight": (data, gguf.GGMLQuantizationType.Q8_0),
        "blk.0.attn_q.weight": numpy.zeros((WIDE, WIDE), "float16"),
    }
    file = write(tmp_path / "a.gguf", LLAMA, tensors=tensors)
    header, reference = read_header(file), gguf.GGUFReader(file)
    assert len(header.tensors) == 4
    for tensor in reference.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.type, ours.bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert ours.shape == tuple(tensor.shape)
    scalars = {name: f.contents() for name, f in reference.fields.items() if f.types[0] != gguf.GGUFValueType.ARRAY}
    # The reader adds three of its own.
    assert header.metadata == {name: value for name, value in scalars.items() if not name.startswith("GGUF.")}
    assert header.bytes_by_type == {
        "F32": ROWS * WIDE * 4,
        "F16": WIDE * WIDE * 2,
        "Q8_0": 96 * WIDE // 32 * 34,
        "Q4_1": 96 * WIDE // 32 * 20,
    }
    assert header.quantisation == "F32"


def test_a_llama_from_its_header(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf", LLAMA)
    found = find_architecture(str(file))
    assert (found.name, found.source, found.quantisation) == ("small", str(file), "F32")
    expected = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": WIDE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": ROWS,
        "tie_word_embeddings": True,
    }
    assert found.architecture == Architecture.from_config(expected)
    untied = write(tmp_path / "untied.gguf", LLAMA, tensors={"output.weight": numpy.zeros((ROWS, WIDE), "float32")})
    assert found.architecture.parameters() + ROWS * WIDE == find_architecture(str(untied)).architecture.parameters()


HEADERS: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral-8x7b": (
        "llama",
        {
            "block_count": 32,
            "embedding_length": 4096,
            "feed_forward_length": 14336,
            "attention.head_count": 32,
            "attention.head_count_kv": 8,
            "expert_count": 8,
            "expert_used_count": 2,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3moe",
        {
            "block_count": 48,
            "embedding_length": 2048,
            "feed_forward_length": 6144,
            "attention.head_count": 32,
            "attention.head_count_kv": 4,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_feed_forward_length": 768,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek2",
        {
            "block_count": 27,
            "embedding_length": 2048,
            "feed_forward_length": 10944,
            "attention.head_count": 16,
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "expert_count": 64,
            "expert_used_count": 6,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 1408,
            "leading_dense_block_count": 1,
        },
    ),
    "gemma-3-1b": (
        "gemma3",
        {
            "block_count": 26,
            "embedding_length": 1152,
            "feed_forward_length": 6912,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 256,
            "attention.sliding_window": 512,
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "block_count": 12,
            "embedding_length": 768,
            "feed_forward_length": 3072,
            "attention.head_count": 12,
            "context_length": 1024,
        },
    ),
    "pythia-160m": (
        "gptneox",
        {
            "block_count": 12,
            "embedding_length": 768,
            "feed_forward_length": 3072,
            "attention.head_count": 12,
        },
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_published_models_from_their_headers(name: str, tmp_path: Path) -> None:
    """The keys are those that llama.cpp's converter writes for these models."""
    family, values = HEADERS[name]
    file = write(tmp_path / "m.gguf", values, family)
    ours = Architecture.from_config(PUBLISHED[name].config)
    # The tiny file has a vocabulary of its own, and no head.
    config = {
        **config_of(read_header(file)),
        "vocab_size": ours.vocabulary,
        "tie_word_embeddings": ours.tied_embeddings,
    }
    assert Architecture.from_config(config) == ours


def test_a_family_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"block_count": 2}, "mamba")
    with pytest.raises(ValueError, match=r"m\.gguf.*'mamba'.*allowed: llama"):
        find_architecture(str(file))


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {key: value for key, value in LLAMA.items() if key != "embedding_length"})
    with pytest.raises(ValueError, match="has no hidden_size"):
        find_architecture(str(file))


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"one of 3 parts.*--merge"):
        read_header(tmp_path / "m.gguf")


def test_no_file_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GGUF file at"):
        find_architecture(str(tmp_path / "none.gguf"))
    for content in (b"", b"GGU", b"PK\x03\x04" + bytes(100), b"GGUF" + struct.pack(">I", 3) + bytes(50)):
        (tmp_path / "other.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="is no whole GGUF file"):
            find_architecture(str(tmp_path / "other.gguf"))


def test_a_file_that_is_cut_anywhere_in_its_header_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", LLAMA).read_bytes()
    header = len(whole) - ROWS * WIDE * 4 - 32  # before the data there may be padding
    for length in range(4, header, 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is no whole GGUF file|has no tensor"):
            find_architecture(str(tmp_path / "cut.gguf"))


def test_counts_beyond_the_file_end_soon(tmp_path: Path) -> None:
    """A header that promises 2^60 texts is refused, not read for years."""
    for kind in (8, 4):
        array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, 2**60)
        (tmp_path / "lies.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(4000))
        with pytest.raises(ValueError):
            read_header(tmp_path / "lies.gguf")

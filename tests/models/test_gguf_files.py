"""Written GGUF files hold the model: read back by the library's own reader, and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from fourfold.models.gguf_files import TYPES, Weights, require_writable, write_gguf
from tiny import VOCABULARY, tiny_model

IDS = torch.tensor([[5, 9, 33, 60, 12, 77, 3, 8]])


@pytest.mark.parametrize(("weights", "bound"), [("F16", 0.005), ("Q8_0", 0.1)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_transformers_reads_the_same_model(tmp_path: Path, family: str, weights: Weights, bound: float) -> None:
    model = tiny_model(family)
    require_writable(model.config, "reference.engine")
    write_gguf(model, tmp_path / "tiny.gguf", weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    with torch.no_grad():
        gap = (again(IDS).logits - model(IDS).logits).abs().mean()
    assert 0 < gap <= bound
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("weights", TYPES)
def test_matrices_are_rounded_and_vectors_are_not(tmp_path: Path, weights: Weights) -> None:
    """qwen3 has heads of a size of its own, which transformers does not read from GGUF."""
    model = tiny_model("qwen3")
    write_gguf(model, tmp_path / "tiny.gguf", weights)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["qwen3.vocab_size"] == VOCABULARY and fields["qwen3.attention.key_length"] == 8
    assert fields["qwen3.attention.head_count_kv"] == 2 and fields["tokenizer.ggml.model"] == "no_vocab"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(list(model.parameters()))
    norm = tensors["blk.3.attn_q_norm.weight"]
    assert torch.equal(torch.tensor(norm.data), model.state_dict()["model.layers.3.self_attn.q_norm.weight"])
    query = tensors["blk.3.attn_q.weight"]
    assert query.tensor_type == TYPES[weights]
    found = torch.tensor(gguf.quants.dequantize(query.data, query.tensor_type))
    expected = model.state_dict()["model.layers.3.self_attn.q_proj.weight"]
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) / 127)


def test_rows_that_are_no_whole_blocks_stay_in_float16(tmp_path: Path) -> None:
    write_gguf(tiny_model("llama", hidden=48), tmp_path / "tiny.gguf", "Q8_0")
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == TYPES["F16"] and types["blk.0.ffn_down.weight"] == TYPES["Q8_0"]


def test_a_broken_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", breaks)
    with pytest.raises(OSError, match="disk full"):
        write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", "F16")
    assert list(tmp_path.iterdir()) == []


def test_what_llama_cpp_would_compute_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the architecture 'gpt2' cannot be written .* allowed: llama, mistral,"):
        require_writable(tiny_model("gpt2").config, "reference.engine")
    scaled = tiny_model("llama").config
    scaled.rope_parameters = {"rope_theta": 1e4, "rope_type": "llama3"}
    with pytest.raises(
        ValueError, match=r"reference.engine: positions of the kind 'llama3' .* leave reference.engine out"
    ):
        require_writable(scaled, "reference.engine")
    narrow = tiny_model("mistral").config
    narrow.sliding_window = 16
    with pytest.raises(ValueError, match="attention within a window of 16"):
        require_writable(narrow, "reference.engine")

"""Write a causal language model as a GGUF file that llama.cpp can run, for the run that has made it.

The file holds no vocabulary: it is asked about ids only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gguf
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Literal["F16", "Q8_0"]
# How matrices are written for each engine.
WEIGHTS_OF: dict[str, Weights] = {"llama_cpp": "F16", "llama_cpp_q8_0": "Q8_0"}
# What llama.cpp calls the architectures that are written here; mistral differs from llama in nothing but its window.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
TYPES = {"F16": gguf.GGMLQuantizationType.F16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def require_writable(config: Any, key: str) -> None:
    """ValueError where llama.cpp would need more of this architecture than is written here."""
    what = ""
    if config.model_type not in ARCHITECTURES:
        what = f"the architecture {config.model_type!r}"
    elif (rope := _rope(config).get("rope_type", "default")) != "default":
        what = f"positions of the kind {rope!r}"
    elif (window := getattr(config, "sliding_window", None)) and window < config.max_position_embeddings:
        what = f"attention within a window of {window}"
    if what:
        raise ValueError(
            f"{key}: {what} cannot be written as GGUF here; allowed: {', '.join(ARCHITECTURES)} with plain rotary "
            f"positions and full attention; leave {key} out"
        )


def write_gguf(model: PreTrainedModel, file: Path, weights: Weights) -> None:
    """Write a model, whole or not at all: matrices in float16 or Q8_0, vectors in float32."""
    with _whole(file) as partial:
        _write(model, partial, weights)


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[str]:
    """A name beside `file`, which what is written there gets at the end; nothing is left of it otherwise."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=".partial-", suffix=".gguf", dir=file.parent)
    os.close(handle)
    try:
        yield partial
        os.rename(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _write(model: PreTrainedModel, path: str, weights: Weights) -> None:
    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _describe(writer, config, weights)
        tied = config.tie_word_embeddings
        for name, tensor in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, f"{name} has a place in {architecture.name}"
            if architecture == gguf.MODEL_ARCH.LLAMA:
                tensor = _interleaved(name, tensor, config)
            _add(writer, target, tensor, weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def write_adapters(config: Any, tensors: Mapping[str, tuple[Tensor, Tensor]], file: Path, *, alpha: float) -> None:
    """Write LoRA adapters, whole or not at all: A and B in float32 by the name of the weight in the whole model.

    llama.cpp computes W x + alpha / rank * B A x.
    """
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with _whole(file) as partial:
        writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[architecture])
        try:
            writer.add_type(gguf.GGUFType.ADAPTER)
            writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
            writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
            for name, (a, b) in tensors.items():
                target = names.get_name(name, try_suffixes=(".weight",))
                assert target is not None, f"{name} has a place in {architecture.name}"
                if architecture == gguf.MODEL_ARCH.LLAMA:
                    b = _interleaved(name, b, config)
                for end, tensor in (("lora_a", a), ("lora_b", b)):
                    array: Any = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
                    writer.add_tensor(f"{target}.{end}", array)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _describe(writer: gguf.GGUFWriter, config: Any, weights: Weights) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _rope(config: Any) -> dict[str, Any]:
    return config.rope_parameters


def _interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    """llama.cpp turns pairs of neighbours in llama's queries and keys, transformers the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for kind, count in heads.items() if f".{kind}." in name), 0)
    if not count:
        return tensor
    halves = tensor.reshape(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, weights: Weights) -> None:
    array: Any = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    if array.ndim < 2:
        writer.add_tensor(name, array)
        return
    blocks = array.shape[-1] % gguf.GGML_QUANT_SIZES[TYPES[weights]][0] == 0
    kind = TYPES[weights] if blocks else gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

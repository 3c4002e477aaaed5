"""Parameter counts against models that transformers builds, and against a published model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fourfold.planner.architectures import FAMILIES, Architecture

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}
GPT2 = {
    "n_layer": 3,
    "n_embd": 48,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {"num_key_value_heads": 2}
CASES = {
    "llama": ("LlamaConfig", SIZES | GROUPED),
    "llama, no groups, tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaConfig", SIZES | GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("LlamaConfig", SIZES | GROUPED | {"head_dim": 20}),
    "mistral": ("MistralConfig", SIZES | GROUPED),
    "qwen2": ("Qwen2Config", SIZES | GROUPED),
    "qwen3": ("Qwen3Config", SIZES | GROUPED | {"head_dim": 16}),
    "qwen3, biases": ("Qwen3Config", SIZES | GROUPED | {"head_dim": 16, "attention_bias": True}),
    "gemma": ("GemmaConfig", SIZES | {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2Config", SIZES | GROUPED | {"head_dim": 16}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2, narrow, untied": ("GPT2Config", GPT2 | {"n_inner": 72, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "gpt_neox, no biases, tied": ("GPTNeoXConfig", SIZES | {"attention_bias": False, "tie_word_embeddings": True}),
}
SMOLLM2_135M = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def built(case: str) -> tuple[Any, Architecture]:
    name, settings = CASES[case]
    config = getattr(transformers, name)(**settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, Architecture.from_config(config.to_dict())


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_those_of_the_built_model(case: str) -> None:
    model, architecture = built(case)
    assert architecture.parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_a_layer_and_the_head_are_counted_apart(case: str) -> None:
    model, architecture = built(case)
    body = model.base_model
    layer = (body.h if architecture.family == "gpt2" else body.layers)[0]
    assert architecture.layer_parameters == sum(p.numel() for p in layer.parameters())
    body_parameters = sum(p.numel() for p in body.parameters())
    assert architecture.head_parameters == sum(p.numel() for p in model.parameters()) - body_parameters


def test_every_family_has_a_case() -> None:
    assert {case.split(",")[0] for case in CASES} == set(FAMILIES)


def test_smollm2_has_its_published_number_of_parameters() -> None:
    assert Architecture.from_config(SMOLLM2_135M).parameters() == 134_515_008


def test_keys_that_a_config_leaves_out_take_the_family_default() -> None:
    """A config.json holds what differs from the defaults only; null means the same as missing."""
    gemma = {**SMOLLM2_135M, "model_type": "gemma", "tie_word_embeddings": None}
    assert Architecture.from_config(gemma).tied_embeddings
    assert Architecture.from_config(gemma).head_dim == transformers.GemmaConfig().head_dim
    llama = {k: v for k, v in SMOLLM2_135M.items() if k not in ("tie_word_embeddings", "num_key_value_heads")}
    assert not Architecture.from_config(llama).tied_embeddings
    assert Architecture.from_config(llama).kv_heads == 9


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mamba'.*allowed: llama"):
        Architecture.from_config({**SMOLLM2_135M, "model_type": "mamba"})


def test_a_missing_size_is_named() -> None:
    config = {k: v for k, v in SMOLLM2_135M.items() if k != "hidden_size"}
    with pytest.raises(ValueError, match="has no hidden_size"):
        Architecture.from_config(config)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="577 is not a multiple of 9"):
        Architecture.from_config({**SMOLLM2_135M, "hidden_size": 577})

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
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
DEEPSEEK = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
MIXED = {"num_local_experts": 5, "shared_expert_intermediate_size": 56}
OPT = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "ffn_dim": 80,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}
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
    "gemma3_text": ("Gemma3TextConfig", SIZES | GROUPED | {"head_dim": 16, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", SIZES | GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", SIZES | GROUPED | EXPERTS | {"shared_expert_intermediate_size": 56}),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | GROUPED | EXPERTS | {"head_dim": 16}),
    "qwen3_moe, dense layers, biases": (
        "Qwen3MoeConfig",
        SIZES | GROUPED | EXPERTS | {"head_dim": 16, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "qwen3_moe, every second layer": (
        "Qwen3MoeConfig",
        SIZES | GROUPED | EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": ("DeepseekV2Config", SIZES | DEEPSEEK),
    "deepseek_v2, plain queries, biases": (
        "DeepseekV2Config",
        SIZES | DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v3": ("DeepseekV3Config", SIZES | DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "deepseek_v3, biases": (
        "DeepseekV3Config",
        SIZES | DEEPSEEK | {"n_group": 1, "topk_group": 1, "attention_bias": True},
    ),
    "opt": ("OPTConfig", OPT),
    "opt, narrow embedding, norms after": (
        "OPTConfig",
        OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
    ),
    "opt, no biases, plain norms": ("OPTConfig", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
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
    assert architecture.parameters() == count(model)


def layers_of(model: Any, family: str) -> Any:
    body = model.base_model.decoder if family == "opt" else model.base_model
    return body.h if family == "gpt2" else body.layers


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("case", CASES)
def test_each_layer_and_the_head_are_counted_apart(case: str) -> None:
    model, architecture = built(case)
    layers = [count(layer) for layer in layers_of(model, architecture.family)]
    assert [architecture.parameters_of(number, number + 1) for number in range(3)] == layers
    assert architecture.parameters_of(1, 3) == sum(layers[1:])
    assert architecture.layer_parameters == layers[-1]
    assert architecture.head_parameters == count(model) - count(model.base_model)


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_those_of_the_built_layer(case: str) -> None:
    """Of one expert transformers has a slice of a tensor of three dimensions."""
    model, architecture = built(case)
    for number, layer in enumerate(layers_of(model, architecture.family)):
        found = sum(p.numel() for p in layer.parameters() if p.ndim >= 2)
        assert architecture.layer_matrices(number) == found
        experts = sum(p.numel() for p in layer.parameters() if p.ndim == 3)
        used = found - experts + experts * 2 // 5
        assert architecture.layer_matrices(number, active=True) == used


@pytest.mark.parametrize("case", [case for case in CASES if "gpt" not in case])
def test_the_cache_holds_what_transformers_caches(case: str) -> None:
    """Windows are narrower by one token there, which comes with the next query."""
    name, settings = CASES[case]
    config = getattr(transformers, name)(**settings | {"attention_dropout": 0.0})
    architecture = Architecture.from_config(config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = 13
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(tokens)[None], cache=cache, use_cache=True)
    layers: Any = cache.layers
    held = [layer.keys.nbytes + layer.values.nbytes for layer in layers]
    for number, layer in enumerate(layers):
        narrower = int(0 < architecture.window(number) <= tokens)
        assert narrower == int(layer.keys.shape[-2] < tokens)
        expected = architecture.cache_bytes(tokens, 4, number, number + 1) - narrower * 4 * architecture.cached_numbers
        assert held[number] == expected, number
    assert architecture.cache_bytes(7, 4) == 3 * 7 * 4 * architecture.cached_numbers


def test_a_window_bounds_the_cache() -> None:
    gemma = Architecture.from_config(
        {**SMOLLM2_135M, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 100, "head_dim": 64}
    )
    assert gemma.windows == (100, 100, 100, 100, 100, 0) * 2
    assert gemma.cache_bytes(1000, 2) == (10 * 100 + 2 * 1000) * 2 * 3 * 64 * 2


def test_every_family_has_a_case() -> None:
    assert {case.split(",")[0] for case in CASES} == set(FAMILIES)


WINDOWED = {
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral, none": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2, off": ("Qwen2Config", {"sliding_window": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"use_sliding_window": True, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 8, "sliding_window_pattern": 3}),
    "gemma3_text, by layer": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_windows_are_those_of_the_cache_that_transformers_makes(case: str) -> None:
    name, settings = WINDOWED[case]
    config = getattr(transformers, name)(**SIZES, **GROUPED, **settings)
    cache = transformers.DynamicCache(config=config)
    expected = [getattr(layer, "sliding_window", 0) for layer in cache.layers] or [0, 0, 0]
    for given in (config.to_dict(), {"model_type": config.model_type} | SIZES | GROUPED | settings | EXPERTS | MIXED):
        architecture = Architecture.from_config(given)
        assert [architecture.window(layer) for layer in range(3)] == expected


def test_a_window_that_the_config_leaves_out_is_the_family_default() -> None:
    for family, kind in (("mistral", transformers.MistralConfig), ("gemma2", transformers.Gemma2Config)):
        config = {**SMOLLM2_135M, "model_type": family}
        assert Architecture.from_config(config).window(0) == kind().sliding_window


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

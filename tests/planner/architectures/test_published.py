"""The table of published models, against transformers and against the totals that its authors give."""

from __future__ import annotations

import pytest
import torch
import transformers

from fourfold.planner.architectures import Architecture
from fourfold.planner.architectures.published import PUBLISHED

# Billions of parameters in all, and of those that one token passes through, as the papers and model cards have them.
# Qwen3, Pythia: their READMEs; OPT: Zhang et al. 2022, table 1, by name; the others: model cards and the paper named.
TOTALS = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,  # Jiang et al. 2024: 47B, 13B active
    "mixtral-8x22b": 140.6,  # 141B, 39B active
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "gemma-2b": 2.51,  # Gemma Team 2024, table 2: 2.506B and 8.538B
    "gemma-7b": 8.54,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236.0,
    "deepseek-v3": 671.0,
    "pythia-70m": 0.070426624,
    "pythia-160m": 0.162322944,
    "pythia-410m": 0.405334016,
    "pythia-1b": 1.011781632,
    "pythia-1.4b": 1.414647808,
    "pythia-2.8b": 2.775208960,
    "pythia-6.9b": 6.857302016,
    "pythia-12b": 11.846072320,
    "opt-125m": 0.125,
    "opt-350m": 0.331,
    "opt-1.3b": 1.316,
    "opt-2.7b": 2.65,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 29.97,
    "opt-66b": 65.72,
    "gpt2": 0.124,
    "gpt2-medium": 0.355,
    "gpt2-large": 0.774,
    "gpt2-xl": 1.558,
}
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.0,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen2-57b-a14b": 14.0,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "deepseek-v2": 21.0,
    "deepseek-v3": 37.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_those_that_transformers_builds(name: str) -> None:
    config = transformers.AutoConfig.for_model(**PUBLISHED[name].config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    architecture = Architecture.from_config(PUBLISHED[name].config)
    assert architecture == Architecture.from_config(config.to_dict())
    assert architecture.parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    architecture = Architecture.from_config(PUBLISHED[name].config)
    assert architecture.parameters() / 1e9 == pytest.approx(TOTALS[name], rel=0.015)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_that_were_published(name: str) -> None:
    """Authors differ in whether the embedding counts; here it does."""
    architecture = Architecture.from_config(PUBLISHED[name].config)
    assert architecture.active_parameters() / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def test_a_dense_model_has_no_idle_parameters() -> None:
    architecture = Architecture.from_config(PUBLISHED["llama-2-7b"].config)
    assert architecture.active_parameters() == architecture.parameters()


def test_latent_attention_caches_what_its_paper_says() -> None:
    """DeepSeek-V2, table 1: 9/2 d_h l numbers a token, with d_h = 128 and l = 60 layers."""
    architecture = Architecture.from_config(PUBLISHED["deepseek-v2"].config)
    assert architecture.cache_bytes(1, 1) == 9 * 128 * 60 // 2

"""Models of random weights for benchmarks: every supported family small, and real sizes for GPUs.

Weights are saved in bfloat16, as most published models are. The tokenizer knows a few words, enough for prompts of
any length; ids beyond them are drawn all the same.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fourfold.config.loading import parse_config
from fourfold.models.assembly import record_for
from fourfold.models.loading import load_base
from fourfold.models.storage import save_role

WORDS = ("<pad>", "<eos>", "<unk>", "<bos>", *(f"w{number}" for number in range(60)))
PAD, EOS, UNK, BOS = range(4)
# By name: the family and its config. The first is the shape of SmolLM2-135M.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
    "llama": (
        "llama",
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 6, "vocab_size": 8192, "tie_word_embeddings": False},
    ),
    "qwen3": (
        "qwen3",
        {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16384, "tie_word_embeddings": True},
    ),
    "gemma": (
        "gemma",
        {"hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 24576},
    ),
    "gpt2": ("gpt2", {"n_embd": 384, "n_layer": 8, "n_head": 6, "n_positions": 512, "vocab_size": 16384}),
    "gpt_neox": (
        "gpt_neox",
        {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6,
         "vocab_size": 16384, "rotary_pct": 0.25},
    ),
    # The shapes of Qwen2.5, by their sizes.
    **{
        name: (
            "qwen2",
            {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": pairs, "vocab_size": vocabulary,
             "tie_word_embeddings": tied},
        )
        for name, hidden, inner, layers, heads, pairs, vocabulary, tied in (
            ("0.5b", 896, 4864, 24, 14, 2, 151_936, True),
            ("1.5b", 1536, 8960, 28, 12, 2, 151_936, True),
            ("7b", 3584, 18_944, 28, 28, 4, 152_064, False),
        )
    },
    "tiny": (
        "llama",
        {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 3000, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def make_model(name: str, folder: Path) -> Path:
    """A directory with the model and a tokenizer, made once."""
    if (folder / "config.json").is_file():
        return folder
    family, shape = SHAPES[name]
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **ids), dtype=torch.float32)
    with torch.no_grad():
        # Logits of standard deviation 2 beside 0 for EOS, so that hardly a response ends before its longest.
        head = model.get_output_embeddings().weight
        head.normal_(std=2 / math.sqrt(head.shape[1]))
        head[EOS] = 0.0
    model.generation_config.eos_token_id = EOS
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def make_reward(tree: dict[str, Any], folder: Path) -> Path:
    """A reward model of the base's layers, moved a little as training does, with a small random head."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = parse_config({**tree, "memory": {}}, "the benchmark")
    scorer = load_base(config).new_scorer()
    with torch.no_grad():
        for p in scorer.branch.parameters():
            if p.is_floating_point() and p.dtype == torch.float32:
                p.mul_(1.001)
        scorer.head.linear.weight.normal_(std=0.02)
    save_role(folder, scorer, record_for(config, "scorer"))
    return folder

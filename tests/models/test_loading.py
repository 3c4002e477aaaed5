"""Models come from folders, GGUF files and packages; what cannot be used is refused with the way out."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel, PreTrainedTokenizerFast

from fourfold.models.loading import (
    convert_gguf,
    device_of,
    end_ids,
    load_base,
    load_causal_lm,
    resolve_model,
)
from tiny import BOS, EOS, FAMILIES, PAD, UNK, tiny_directory, tiny_model, tiny_tokenizer
from tiny_roles import activations_of, oracle_log_probs, tiny_base, tiny_config, tiny_rollout


def load(path: Path | str, cache: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    return load_causal_lm(str(path), cache, torch.float32)


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["trunk", "none"])
@torch.no_grad()
def test_a_base_computes_what_its_folder_holds(tmp_path: Path, family: str, mode: str) -> None:
    base = tiny_base(tmp_path / "m", family, mode)
    rollout = tiny_rollout([(3, 2), (5, 4)])
    log_probs, _ = base.policy.log_probs(activations_of(base, rollout), rollout, 1.0)
    expected = oracle_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), rollout)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    assert base.shares_head == (mode == "trunk")
    assert base.policy.branch.num_layers == (2 if mode == "trunk" else 4)
    assert base.trunk is None or base.trunk.num_layers == 2
    assert not any(p.requires_grad for part in (base.policy, base.trunk) if part is not None for p in part.parameters())
    assert (base.eos_ids, base.pad_id) == ({EOS}, PAD)


def test_gemma2_loads_though_it_has_no_fused_attention(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gemma2", vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, initializer_range=0.15, final_logit_softcapping=3.0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    tiny_tokenizer(pad_is_eos=False).save_pretrained(tmp_path / "m")
    base = tiny_base(tmp_path / "m")
    rollout = tiny_rollout([(3, 2), (5, 4)])
    log_probs, _ = base.policy.log_probs(activations_of(base, rollout), rollout, 1.0)
    expected = oracle_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval(), rollout)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_bfloat16_keeps_the_trunk_small_and_the_branch_exact(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", precision__compute="bfloat16")
    assert base.trunk is not None
    assert {p.dtype for p in base.trunk.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in base.policy.branch.parameters()} == {torch.float32}
    assert base.trunk.compute_dtype == base.policy.branch.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("layers", [4, 5, 30])
def test_a_branch_as_high_as_the_model_is_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ValueError, match=rf"branch_layers = {layers}: the model has 4 layers, so 1 to 3.*\"none\""):
        tiny_base(tmp_path / "m", trunk__branch_layers=layers)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_branch_has_as_many_layers_as_asked_for(tmp_path: Path, layers: int) -> None:
    base = tiny_base(tmp_path / "m", trunk__branch_layers=layers)
    assert base.trunk is not None
    assert (base.trunk.num_layers, base.policy.branch.num_layers) == (4 - layers, layers)


def test_an_unknown_architecture_is_refused_in_both_modes(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=160, hidden_size=8, word_embed_proj_dim=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    tiny_tokenizer(pad_is_eos=False).save_pretrained(tmp_path / "m")
    for mode in ("trunk", "none"):
        with pytest.raises(ValueError, match="architecture 'opt'"):
            tiny_base(tmp_path / "m", mode=mode)


def test_positions_that_are_learned_are_a_limit(tmp_path: Path) -> None:
    """FAULTS L5 (its kind): a length that the model cannot hold is said before anything is sampled."""
    tiny_directory(tmp_path / "gpt2", "gpt2")
    tiny_directory(tmp_path / "llama", "llama")
    enough: dict[str, Any] = {"data__max_prompt_tokens": 100, "sampling__max_new_tokens": 28}
    long_texts: dict[str, Any] = {"data__max_text_tokens": 500}
    for fitting in (enough, long_texts):  # no stage of the run reads texts
        load_base(tiny_config(tmp_path / "gpt2", **fitting))
    long: dict[str, Any] = {"data__max_prompt_tokens": 100, "sampling__max_new_tokens": 29}
    with pytest.raises(ValueError, match=r"max_prompt_tokens \+ sampling.max_new_tokens = 129: .* 128 positions"):
        load_base(tiny_config(tmp_path / "gpt2", **long))
    load_base(tiny_config(tmp_path / "llama", **long))  # rotary positions go on


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    """FAULTS L8."""
    tiny_directory(tmp_path / "m", vocab_size=150)
    with pytest.raises(ValueError, match=r"tokenizer has 160 ids, the model 150 embedding rows"):
        tiny_base(tmp_path / "m")


# --- what is no model -------------------------------------------------------------------------------------------------


def _nothing(path: Path) -> None:
    pass


def _empty(path: Path) -> None:
    path.mkdir()


def _broken_json(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{nonsense")


def _strange_type(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "strange"}))


def _no_language_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "vit"}))


def _without_weights(path: Path) -> None:
    tiny_directory(path)
    os.remove(path / "model.safetensors")


def _pickled(path: Path) -> None:
    tiny_directory(path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    os.remove(path / "model.safetensors")


def _cut_short(path: Path) -> None:
    tiny_directory(path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    "make", [_nothing, _empty, _broken_json, _strange_type, _no_language_model, _without_weights, _pickled, _cut_short]
)
def test_what_is_no_model_is_refused_with_what_is_allowed(tmp_path: Path, make) -> None:
    """Pickled weights count as none: nothing is unpickled."""
    make(tmp_path / "m")
    with pytest.raises(
        ValueError, match=r"model.path = '.*/m' cannot be loaded \(.*\); allowed: a folder with config.json"
    ):
        load(tmp_path / "m", tmp_path / "cache")


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    """FAULTS E4 (its kind): a checkpoint with a hole would otherwise train on random weights."""
    tiny_directory(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of LlamaForCausalLM, first 'model.layers.2.mlp.up_proj.weight'"
    ):
        load(tmp_path / "m", tmp_path / "cache")


def test_a_package_that_is_not_installed_or_lacks_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"package 'no_such_model' is not installed; try `pip install .*no-such-model`"
    ):
        resolve_model("package:no_such_model/some.gguf", tmp_path)
    with pytest.raises(ValueError, match=r"the package holds no 'some.gguf'; its .gguf files: none"):
        resolve_model("package:torch/some.gguf", tmp_path)


def test_a_package_lists_the_files_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_weights").mkdir()
    for name in ("__init__.py", "b.gguf", "a.gguf"):
        (tmp_path / "tiny_weights" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"holds no 'c.gguf'; its .gguf files: a.gguf, b.gguf"):
        resolve_model("package:tiny_weights/c.gguf", tmp_path)


def test_a_gguf_file_that_is_missing_or_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no GGUF file at '.*absent.gguf'"):
        resolve_model(str(tmp_path / "absent.gguf"), tmp_path / "cache")
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(ValueError, match=r"text.gguf"):
        resolve_model(str(tmp_path / "text.gguf"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_hub_id_is_left_to_transformers_and_a_folder_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("somebody/some-model", tmp_path) == "somebody/some-model"
    assert resolve_model("~/models", tmp_path) == str(tmp_path / "models")


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """A Llama in float32 as llama.cpp's converter writes it, with a byte-level BPE vocabulary."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if i in (PAD, EOS, UNK, BOS) else normal for _, i in vocabulary])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(BOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for projection, count in heads.items():
            if projection in name:  # GGUF interleaves the two halves of each head's rotary pairs
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        its_name = names.get_name(name, try_suffixes=(".weight",))
        assert its_name is not None, name
        writer.add_tensor(its_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_into_the_same_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=False)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    cache = tmp_path / "cache"
    with caplog.at_level(logging.INFO, logger="fourfold.models.loading"):
        loaded, its_tokenizer = load(tmp_path / "tiny.gguf", cache)
        load(tmp_path / "tiny.gguf", cache)
    assert [record.getMessage().split()[0] for record in caplog.records if "converting" in record.getMessage()] == [
        "converting"
    ]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float()), name
    text = "the plot is thin: a long, slow film"
    assert its_tokenizer(text).input_ids == tokenizer(text).input_ids
    assert end_ids(loaded, its_tokenizer, ()) == {EOS}
    (folder,) = cache.iterdir()
    assert folder.name.startswith("tiny-") and {p.suffix for p in folder.iterdir()} <= {
        ".json",
        ".safetensors",
        ".jinja",
    }


def test_a_changed_gguf_file_is_converted_again(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    folders = []
    for seed in (0, 1):
        write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", layers=1, seed=seed), tokenizer)
        folders.append(convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache"))
    first, second = (load_file(folder / "model.safetensors")["lm_head.weight"] for folder in folders)
    assert not torch.equal(first, second)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", layers=1), tiny_tokenizer(pad_is_eos=False))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.undo()
    assert (convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") / "config.json").is_file()


# --- EOS and pad ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "extra", "expected"),
    [
        ([3, 7], EOS, "<eos>", (), {1, 3, 7}),
        ([3, 7], None, None, (), {3, 7}),
        (None, [5, 6], None, (), {5, 6}),
        (None, None, "<eos>", (), {EOS}),
        (None, None, None, (9, 8), {8, 9}),
        (3, 5, "<eos>", (9,), {1, 3, 5, 9}),
    ],
)
def test_every_eos_id_that_anybody_names_ends_a_response(generation, config, tokenizer, extra, expected) -> None:
    """FAULTS B9."""
    model, its_tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=False)
    model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
    its_tokenizer.eos_token = tokenizer
    assert end_ids(model, its_tokenizer, extra) == expected


def test_a_model_without_eos_and_an_eos_outside_the_vocabulary_are_refused() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=False)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"names no EOS token; give sampling.extra_eos_token_ids"):
        end_ids(model, tokenizer, ())
    with pytest.raises(ValueError, match=r"EOS ids \[160, 200\] lie outside the model's 160 embedding rows"):
        end_ids(model, tokenizer, (200, 160, 4))


def test_eos_ids_of_a_folder_reach_the_base(tmp_path: Path) -> None:
    """FAULTS B9."""
    tiny_directory(tmp_path / "m")
    file = tmp_path / "m" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [3, 7]}))
    assert tiny_base(tmp_path / "m", sampling__extra_eos_token_ids=[11]).eos_ids == {EOS, 3, 7, 11}


def test_the_pad_id_is_the_tokenizers_or_an_eos_id(tmp_path: Path) -> None:
    assert tiny_base(tmp_path / "eos", pad_is_eos=True).pad_id == EOS
    tiny_directory(tmp_path / "none")
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "none")
    base = tiny_base(tmp_path / "none", sampling__extra_eos_token_ids=[11])
    assert base.tokenizer.pad_token_id is None
    assert base.pad_id == EOS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch sees no CUDA device; try \"auto\" or \"cpu\""):
        device_of(tiny_config(tmp_path, system__device="cuda"))
    assert device_of(tiny_config(tmp_path, system__device="auto")) == torch.device("cpu")

"""Loading proves that the parts are the model, and shows nothing of the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as library

from fourfold.models import loading
from fourfold.models.loading import load_causal_lm
from fourfold.models.split import Part, cut, verify_whole
from tiny import FAMILIES, tiny_directory, tiny_model
from tiny_roles import MODES, tiny_base

LAYERS = 4


def whole(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Part]:
    model = tiny_model(family)
    return model, cut(model, 0, LAYERS, compute_dtype=dtype)


# --- the parts are the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rebuilt_model_equals_the_whole(family: str, dtype: torch.dtype) -> None:
    """It has the model's own tensors and runs the same kernels, so nothing may differ at all."""
    model, branch = whole(family, dtype)
    assert verify_whole(model, branch, tolerance=0.0) == 0.0


def _swap_layers(body: Any) -> None:
    body.layers = nn.ModuleList(reversed(list(body.layers)))


def _drop_the_norm(body: Any) -> None:
    body.norm = nn.Identity()


def _drop_a_layer(body: Any) -> None:
    body.layers = body.layers[:-1]
    body.config.num_hidden_layers -= 1


def _other_embedding(body: Any) -> None:
    body.embed_tokens = nn.Embedding(160, 32)


@pytest.mark.parametrize("damage", [_swap_layers, _drop_the_norm, _drop_a_layer, _other_embedding])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rebuilt_model_that_differs_is_noticed(damage: Any, dtype: torch.dtype) -> None:
    model, branch = whole("llama", dtype)
    damage(branch.body)
    with pytest.raises(ValueError, match=r"architecture 'llama': its layers, put together again, differ .* by \d"):
        verify_whole(model, branch, tolerance=loading.SPLIT_TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_loading_stops_at_a_part_that_is_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """In both modes of sharing: the final norm is lost where the upper layers are cut."""
    right = loading.cut

    def wrong(model: Any, start: int, stop: int, **settings: Any) -> Part:
        part = right(model, start, stop, **settings)
        if stop == LAYERS:
            part.body.norm = nn.Identity()
        return part

    monkeypatch.setattr(loading, "cut", wrong)
    with pytest.raises(ValueError, match="architecture 'llama'"):
        tiny_base(tmp_path / "m", mode=mode)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_stored_weight_that_is_nan_is_noticed_at_load(tmp_path: Path, mode: str) -> None:
    """FAULTS B10: before anything is sampled."""
    model: Any = tiny_model("llama")
    tiny_directory(tmp_path / "m")
    model.model.layers[3].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"architecture 'llama'.* differ from the whole model by nan"):
        tiny_base(tmp_path / "m", mode=mode)


def test_layers_of_several_kinds_are_rebuilt() -> None:
    """Gemma 2: sliding and full attention in turn; the probe is longer than the window."""
    config = AutoConfig.for_model(
        "gemma2", vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, initializer_range=0.15,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    branch = cut(model, 0, LAYERS, compute_dtype=torch.float32)
    assert verify_whole(model, branch, tolerance=0.0) == 0.0
    branch.body.config.layer_types = ["full_attention"] * LAYERS
    with pytest.raises(ValueError, match="gemma2"):
        verify_whole(model, branch, tolerance=1e-5)


def test_verifying_leaves_the_mode_of_the_model_alone() -> None:
    model, branch = whole("gpt2")
    model.train()
    verify_whole(model, branch, tolerance=1e-5)
    assert model.transformer.training


# --- nothing is shown -------------------------------------------------------------------------------------------------


def test_no_bar_of_loading_weights_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_directory(tmp_path / "m")
    AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert "Loading weights" in capfd.readouterr().err, "the library shows one by itself"
    load_causal_lm(str(tmp_path / "m"), tmp_path / "cache", torch.float32)
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


@pytest.mark.parametrize("damaged", [False, True])
def test_the_librarys_bars_are_as_before_afterwards(tmp_path: Path, damaged: bool) -> None:
    """Also when loading fails; a hook of the user's own comes back."""
    tiny_directory(tmp_path / "m")
    seen: list[str] = []

    def users(factory: Any, args: Any, kwargs: Any) -> Any:
        seen.append(kwargs.get("desc", ""))
        return factory(*args, **kwargs)

    before = library.set_tqdm_hook(users)
    try:
        if damaged:
            (tmp_path / "m" / "model.safetensors").write_bytes(b"nothing")
            with pytest.raises(ValueError, match="cannot be loaded"):
                load_causal_lm(str(tmp_path / "m"), tmp_path / "cache", torch.float32)
        else:
            load_causal_lm(str(tmp_path / "m"), tmp_path / "cache", torch.float32)
        assert library.is_progress_bar_enabled() and seen == []
        assert library.set_tqdm_hook(users) is users
    finally:
        library.set_tqdm_hook(before)

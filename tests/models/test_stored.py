"""A model that is to be quantised is read layer by layer: the same numbers, without its floats as a whole."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fourfold.config.schema import RunConfig
from fourfold.memory.budget import tensor_bytes
from fourfold.memory.quantization import QuantizedLinear, quantize
from fourfold.memory.tensors import LiveTensors
from fourfold.models import loading
from fourfold.models.heads import LanguageHead
from fourfold.models.loading import Base, load_base, load_causal_lm
from fourfold.models.roles import Policy
from fourfold.models.split import cut
from fourfold.models.stored import InFile, stored_model
from fourfold.planner.quantization import QUANTIZED
from tiny import FAMILIES, tiny_directory
from tiny_roles import activations_of, tiny_config, tiny_rollout

CPU = torch.device("cpu")
SHARINGS: dict[str, dict[str, Any]] = {
    "adapters": {"mode": "adapters"},
    "adapters over a trunk": {"mode": "adapters", "adapters__layers": 1},
    "trunk": {"mode": "trunk"},
}


def config_for(model: Path, kind: str, sharing: str, **settings: Any) -> RunConfig:
    return tiny_config(model, **SHARINGS[sharing], precision__frozen=kind, **settings)


def codes(layers: list[nn.Module]) -> list[torch.Tensor]:
    found = [each for layer in layers for each in layer.modules() if isinstance(each, QuantizedLinear)]
    return [p for each in found for p in each.parameters()]


def layers_of(base: Base) -> list[nn.Module]:
    return [*([] if base.trunk is None else base.trunk.layers), *base.policy.branch.layers]


def whole_then_quantized(folder: Path, kind: str, depth: int, *, branch_too: bool) -> Base:
    """All floats first, cut after `depth` layers, then quantised."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    branch = cut(model, depth, 4, compute_dtype=torch.float32)
    trunk = cut(model, 0, depth, compute_dtype=torch.float32, leave_norm=True) if depth else None
    for part in (trunk, branch if branch_too else None):
        if part is not None:
            quantize(nn.ModuleList(part.layers), kind)
    return Base(None, model.config, trunk, Policy(branch, LanguageHead.of(model)), True, frozenset(), 0)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    ("family", "kind"), [(family, "nf4") for family in FAMILIES] + [("llama", kind) for kind in QUANTIZED[:2]]
)
@torch.no_grad()
def test_codes_and_log_probs_are_those_of_a_model_that_was_loaded_whole(
    tmp_path: Path, family: str, kind: str, sharing: str
) -> None:
    folder = tiny_directory(tmp_path / "m", family)
    base = load_base(config_for(folder, kind, sharing))
    depth = {"adapters": 0, "adapters over a trunk": 3, "trunk": 2}[sharing]
    expected = whole_then_quantized(folder, kind, depth, branch_too=sharing != "trunk")
    ours, theirs = (codes(layers_of(each)) for each in (base, expected))
    assert len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))
    rollout = tiny_rollout([(3, 4), (5, 2)])
    log_probs = [b.policy.log_probs(activations_of(b, rollout), rollout, 1.0)[0] for b in (base, expected)]
    assert torch.equal(*log_probs)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_of_the_floats_a_few_layers_are_there_at_a_time(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of gradients aside, whose activations are larger than such weights."""
    monkeypatch.setattr(loading, "_check_gradients", lambda base: None)
    file = tiny_directory(tmp_path / "m", layers=12, hidden=512) / "model.safetensors"
    # Small enough for random layers of this width to bear 8 bits.
    save_file({name: t * 0.1 if t.ndim == 2 else t for name, t in load_file(file).items()}, file, {"format": "pt"})
    branch = {"trunk__branch_layers": 1} if sharing == "trunk" else {"adapters__rank": 1}
    with LiveTensors() as live:
        before = live.bytes
        base = load_base(config_for(file.parent, "int8", sharing, **branch))
        peak = live.peak_bytes - before
    parts = [base.policy, *([] if base.trunk is None else [base.trunk])]
    held = tensor_bytes(p for part in parts for p in part.parameters())
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32)
    layer = tensor_bytes(model.model.layers[0].parameters())
    assert held < 5 * layer, "the whole model has 12"
    assert peak < held + 3 * layer


def rewritten(folder: Path, how: str) -> Path:
    """The same numbers, as others store them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "by the body alone":
        save_file({name.removeprefix("transformer."): t for name, t in tensors.items()}, file, {"format": "pt"})
    elif how == "in pieces":
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
        file.unlink(missing_ok=True)
        assert len(list(folder.glob("*.safetensors"))) > 2
    else:
        file.rename(folder / "other.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    return folder


@pytest.mark.parametrize("how", ["by the body alone", "in pieces", "under another name"])
def test_files_of_other_forms_give_the_same_model(tmp_path: Path, how: str) -> None:
    """The last is one that only transformers finds: it is loaded whole."""
    plain = load_base(config_for(tiny_directory(tmp_path / "plain", "gpt2"), "int8", "adapters"))
    folder = rewritten(tiny_directory(tmp_path / "m", "gpt2"), how)
    found = stored_model(AutoModelForCausalLM, str(folder), torch.float32, InFile(CPU, 0))
    assert (found is None) == (how == "under another name")
    base = load_base(config_for(folder, "int8", "adapters"))
    named = zip(plain.policy.named_parameters(), base.policy.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in named)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_layers_weight_that_is_missing_or_nan_is_noticed_as_ever(tmp_path: Path, sharing: str) -> None:
    file = tiny_directory(tmp_path / "m") / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] * torch.nan}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"architecture 'llama'.* differ from the whole model by nan"):
        load_base(config_for(tmp_path / "m", "int8", sharing))
    save_file({n: t for n, t in tensors.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks 1 weights of LlamaForCausalLM, first '{name}'"):
        load_base(config_for(tmp_path / "m", "int8", sharing))


def test_nothing_is_shown_of_the_layers_that_stay_in_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_directory(tmp_path / "m")
    capfd.readouterr()
    load_causal_lm(str(tmp_path / "m"), tmp_path / "cache", torch.float32, in_file=InFile(CPU, 1))
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


@torch.no_grad()
def test_numbers_are_there_in_a_pass_only_also_in_a_copy_and_after_a_pass_that_fails(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "m")
    found = stored_model(AutoModelForCausalLM, str(tmp_path / "m"), torch.float32, InFile(CPU, 1))
    assert found is not None
    model, expected = found[0], AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ids = torch.arange(24).reshape(3, 8)
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    layers: Any = model.model.layers
    part = cut(model, 2, 4, compute_dtype=torch.float32)
    with pytest.raises(IndexError):
        layers[0].self_attn.register_forward_hook(lambda *_: [][0])
        model(input_ids=ids)
    for layer, away in ((layers[0], True), (layers[3], False), (part.layers[0], True), (part.layers[1], False)):
        assert all(bool(p.isnan().all()) == away for p in layer.parameters())
        assert tensor_bytes(layer.parameters()) < 4 * 10 or not away
    hidden = torch.randn(3, 8, 32)
    mask = torch.ones_like(ids, dtype=torch.bool)
    assert torch.equal(part(hidden, mask), cut(expected, 2, 4, compute_dtype=torch.float32)(hidden, mask))
    part.layers[0].stored.keep()  # pyright: ignore
    assert all(map(torch.equal, part.layers[0].parameters(), copy.deepcopy(expected.model.layers[2]).parameters()))
    assert bool(next(layers[2].parameters()).isnan().all()), "the copy alone"

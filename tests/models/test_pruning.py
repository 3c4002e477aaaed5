"""Pruning a decoder: which layers and neurons go, and that what is left computes what the same layers alone do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fourfold.models import pruning
from tiny import FAMILIES, PAD, tiny_model

TEXTS = [[5, 9, 23, 41, 7], [8, 8, 30], [12, 100, 55, 90, 33, 21, 4]]


def sample() -> list[tuple[Tensor, Tensor]]:
    return list(pruning.batches(TEXTS, 2, PAD))


def test_batches_are_padded_on_the_right() -> None:
    (ids, mask), (last, _) = sample()
    assert ids.tolist() == [[5, 9, 23, 41, 7], [8, 8, 30, PAD, PAD]]
    assert mask.sum(dim=1).tolist() == [5, 3] and last.shape == (1, 7)


def streams(model: PreTrainedModel, text: list[int]) -> list[Tensor]:
    """What goes into each layer [1, time, hidden], and at the end what comes out of the last one."""
    found: list[Tensor] = []

    def before(module: Any, args: Any, named: dict[str, Any]) -> None:
        found.append(args[0] if args else named["hidden_states"])

    def after(module: Any, args: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    layers = pruning.decoder_layers(model)
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(after))
    model(input_ids=torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_block_influence_is_one_minus_the_cosine_of_a_layers_two_sides(family: str) -> None:
    """Against the hidden states that the library itself gives, each text alone."""
    model = tiny_model(family)
    sums, tokens = torch.zeros(4), 0
    with torch.no_grad():
        for text in TEXTS:
            states = streams(model, text)
            for index in range(4):
                a, b = states[index][0], states[index + 1][0]
                sums[index] += (a * b).sum(dim=-1).div(a.norm(dim=-1) * b.norm(dim=-1)).sum()
            tokens += len(text)
    torch.testing.assert_close(
        torch.tensor(pruning.block_influence(model, sample())), 1 - sums / tokens, rtol=1e-4, atol=1e-5
    )


def test_a_layer_that_does_nothing_has_no_influence_and_goes_first() -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[2].get_submodule(name).weight.zero_()
    influence = pruning.block_influence(model, sample())
    assert influence[2] == pytest.approx(0.0, abs=1e-6) and min(influence[:2]) > 1e-3
    assert pruning.most_influential(influence, 3) == [0, 1, 3]
    ids = torch.tensor([TEXTS[2]])
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        pruning.keep_layers(model, [0, 1, 3])
        torch.testing.assert_close(model(input_ids=ids).logits, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_layers_compute_as_a_model_that_never_had_others(family: str) -> None:
    model, short = tiny_model(family), tiny_model(family, layers=2, seed=1)
    pruning.keep_layers(model, [1, 3])
    assert model.config.num_hidden_layers == 2
    short.load_state_dict(model.state_dict())
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, short(input_ids=ids).logits)
    layers: Any = pruning.decoder_layers(model)
    places = [m.layer_idx for layer in layers for m in layer.modules() if hasattr(m, "layer_idx")]
    assert places and sorted(set(places)) == [0, 1], "caches are found by these"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_neurons_that_add_nothing_go_first_and_nothing_changes(family: str) -> None:
    model: Any = tiny_model(family)
    ids = torch.tensor([TEXTS[2]])
    dead = [3, 17, 40, 41]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, dead] = 0.0
        whole = model(input_ids=ids).logits
        pruning.narrow_mlps(model, 60, sample())
        torch.testing.assert_close(model(input_ids=ids).logits, whole, rtol=1e-5, atol=1e-5)
    assert model.config.intermediate_size == 60
    fresh = tiny_model(family, seed=2)
    config = fresh.config
    config.intermediate_size = 60
    other = type(fresh)(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=ids).logits, whole, rtol=1e-4, atol=1e-5)


def test_the_neurons_that_stay_are_those_that_add_most() -> None:
    model: Any = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    seen: list[Tensor] = []
    hook = mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for ids in TEXTS:
            model(input_ids=torch.tensor([ids]))
    hook.remove()
    added = torch.stack(
        [torch.cat([a[0] for a in seen])[:, j].norm() * mlp.down_proj.weight[:, j].norm() for j in range(64)]
    )
    expected, before = added.argsort(descending=True)[:10].sort().values, mlp.up_proj.weight.detach().clone()
    pruning.narrow_mlps(model, 10, sample())
    assert torch.equal(mlp.up_proj.weight, before[expected])


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_mlps_of_another_kind_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"^--mlp: the MLPs of '.*' are not of the kind with gate_proj"):
        pruning.narrow_mlps(tiny_model(family), 10, sample())


def test_widths_and_numbers_of_layers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--mlp 65: the model's MLPs have 64 neurons; allowed: 1 to 64"):
        pruning.narrow_mlps(tiny_model("llama"), 65, sample())
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"^{count} of 4 layers: allowed are 1 to 4"):
            pruning.most_influential([0.1, 0.2, 0.3, 0.4], count)


def test_the_layers_that_fit_are_counted() -> None:
    model = tiny_model("llama")
    layer = sum(p.numel() for p in pruning.decoder_layers(model)[0].parameters())
    whole = pruning.size_of(model)
    assert pruning.layers_that_fit(model, whole) == 4
    assert pruning.layers_that_fit(model, whole - 1) == 3
    assert pruning.layers_that_fit(model, whole - 4 * layer - 1) == pruning.layers_that_fit(model, 1) == 0

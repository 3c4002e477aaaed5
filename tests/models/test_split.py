"""A cut model computes what the whole model computes, alone, padded and step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, PreTrainedModel

from fourfold.models.slot_cache import Places, SlotCache
from fourfold.models.slot_pass import LIKE_LLAMA, slot_pass_of
from fourfold.models.split import LAYOUTS, Part, cut, layout_of, verify_split
from tiny import FAMILIES, tiny_model

LAYERS = 4
# Left padding of 3, none, and 1 beside right padding of 2.
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
IDS = torch.randint(4, 160, MASK.shape, generator=torch.Generator().manual_seed(7))


def gemma2() -> PreTrainedModel:
    """Sliding and full attention in turn, and capped logits: layers that are not all of one kind."""
    config = AutoConfig.for_model(
        "gemma2", vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def sliding(family: str) -> PreTrainedModel:
    """Attention that sees 3 tokens: in every layer (Mistral), or in the upper ones (Qwen2)."""
    config = tiny_model(family).config
    config.sliding_window = 3
    if family == "qwen2":
        config.use_sliding_window, config.max_window_layers = True, 2
        config.layer_types = ["full_attention"] * 2 + ["sliding_attention"] * 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS = {
    **{family: (lambda family=family: tiny_model(family)) for family in FAMILIES},
    "gemma2": gemma2,
    "mistral-sliding": lambda: sliding("mistral"),
    "qwen2-sliding": lambda: sliding("qwen2"),
}


def halves(model: PreTrainedModel, depth: int, dtype: torch.dtype = torch.float32) -> tuple[Part, Part]:
    return cut(model, 0, depth, compute_dtype=dtype), cut(model, depth, LAYERS, compute_dtype=dtype)


@torch.no_grad()
def whole_hidden(model: PreTrainedModel) -> Tensor:
    """Final hidden states of the whole model, every row alone and without padding; NaN on the padding."""
    body = getattr(model, layout_of(model).body)
    expected = torch.full((*MASK.shape, 32), torch.nan)
    for row, mask in enumerate(MASK):
        expected[row, mask] = body(input_ids=IDS[row, mask][None]).last_hidden_state[0]
    return expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_trunk_and_branch_equal_the_whole_model_beside_padding(name: str, depth: int) -> None:
    """FAULTS A3, A6, A14."""
    model = MODELS[name]()
    expected = whole_hidden(model)[MASK]
    trunk, branch = halves(model, depth)
    actual = branch(trunk(IDS, MASK), MASK)[MASK]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert verify_split(model, trunk, branch, tolerance=1e-5) < 1e-6
    assert (trunk.num_layers, branch.num_layers, branch.hidden_size) == (depth, LAYERS - depth, 32)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_whole_model_is_a_branch_from_layer_0(name: str) -> None:
    model = MODELS[name]()
    expected = whole_hidden(model)[MASK]
    torch.testing.assert_close(
        cut(model, 0, LAYERS, compute_dtype=torch.float32)(IDS, MASK)[MASK], expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_slots_step_by_step_equal_one_pass(name: str, quick: bool, by_column: bool) -> None:
    """Two rows, of which the first is two tokens behind, in slots that held other rows before."""
    model = MODELS[name]()
    expected, parts = whole_hidden(model), halves(model, 1)
    rows = [(IDS[row, MASK[row]], expected[row, MASK[row]]) for row in (0, 1)]
    steps = [slot_pass_of(part) if quick else None for part in parts]
    assert not quick or (steps[1] is not None) == (model.config.model_type in LIKE_LLAMA)
    caches = [
        SlotCache(part.num_layers, 4, 12, keys_by_column=by_column, slot_pass=step)
        for part, step in zip(parts, steps, strict=True)
    ]

    def through(ids: Tensor, slots: Tensor | slice, positions: Tensor, length: int) -> Tensor:
        for part, cache in zip(parts, caches, strict=True):
            ids = part(ids, None, cache=cache.at(Places(slots, positions, length)))
        return ids

    through(IDS.flip(1), slice(0, 3), torch.arange(9).expand(3, 9), 9)
    behind = torch.tensor([1, 3])
    first = torch.stack([ids[:3] for ids, _ in rows])
    hidden = through(first, torch.tensor([0, 1]), torch.arange(3).expand(2, 3), 3)
    torch.testing.assert_close(hidden[0, 0], rows[0][1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden[1], rows[1][1][:3], rtol=1e-5, atol=1e-5)
    for t in range(min(len(rows[0][0]) - 1, len(rows[1][0]) - 3)):
        at = behind + t
        ids = torch.stack([real[i] for (real, _), i in zip(rows, at.tolist(), strict=True)])[:, None]
        hidden = through(ids, slice(0, 2), at[:, None], 12 if t % 2 else int(at.max()) + 1)
        for row, i in enumerate(at.tolist()):
            torch.testing.assert_close(hidden[row, 0], rows[row][1][i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_padding_moves_no_log_prob(family: str) -> None:
    """FAULTS A3, A6: [5, 6, 7, 8] alone, with 5 pads on the left, with 3 on the right, with both."""
    model: Any = tiny_model(family)
    trunk, branch = halves(model, 2)

    def log_probs(left: int, right: int, pad: int) -> Tensor:
        ids = torch.tensor([[pad] * left + [5, 6, 7, 8] + [pad] * right])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[0, left : left + 4] = True
        hidden = branch(trunk(ids, mask), mask)[0, left : left + 4]
        return torch.log_softmax(model.get_output_embeddings()(hidden), dim=-1)[[0, 1, 2], [6, 7, 8]]

    alone = log_probs(0, 0, 0)
    torch.testing.assert_close(
        alone, torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)[[0, 1, 2], [6, 7, 8]]
    )
    for left, right, pad in [(5, 0, 0), (0, 3, 0), (5, 3, 0), (5, 0, 8)]:
        torch.testing.assert_close(log_probs(left, right, pad), alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_lies_on_the_padding_of_the_cache_does_not_matter() -> None:
    trunk, branch = halves(tiny_model("gpt2"), 2)
    activations = trunk(IDS, MASK)
    torch.testing.assert_close(
        branch(torch.where(MASK[:, :, None], activations, 1e3), MASK)[MASK], branch(activations, MASK)[MASK]
    )


def test_an_unknown_architecture_is_refused_by_name() -> None:
    config = OPTConfig(
        vocab_size=20, hidden_size=8, word_embed_proj_dim=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"'opt' \(OPTForCausalLM\).*allowed: .*gpt2.*llama") as caught:
        cut(model, 0, 1, compute_dtype=torch.float32)
    assert all(known in str(caught.value) for known in LAYOUTS)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 5), (4, 5)])
def test_a_bad_cut_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"layers {start} to {stop} of a model with 4"):
        cut(tiny_model("llama"), start, stop, compute_dtype=torch.float32)


def _swap_layers(body: Any) -> None:
    body.layers = nn.ModuleList(reversed(list(body.layers)))


def _drop_the_norm(body: Any) -> None:
    body.norm = nn.Identity()


@torch.no_grad()
def _change_one_weight(body: Any) -> None:
    body.layers[1].mlp.down_proj.weight[0, 0] += 0.1


@torch.no_grad()
def _make_nan(body: Any) -> None:
    body.layers[0].mlp.up_proj.weight[0, 0] = torch.nan


@pytest.mark.parametrize("damage", [_swap_layers, _drop_the_norm, _change_one_weight, _make_nan])
def test_a_branch_that_differs_from_the_model_is_noticed(damage) -> None:
    model = tiny_model("llama")
    trunk, branch = halves(model, 2)
    damage(branch.body)
    with pytest.raises(ValueError, match=r"'llama' cannot be split after layer 2.*sharing.mode"):
        verify_split(model, trunk, branch, tolerance=1e-5)


def test_verifying_leaves_the_mode_of_the_model_alone() -> None:
    model: Any = tiny_model("gpt2").train()
    trunk, branch = halves(model, 2)
    verify_split(model, trunk, branch, tolerance=1e-5)
    assert model.transformer.training


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dropout_is_0_in_every_part_whatever_the_config_says(family: str) -> None:
    """FAULTS A13 (its kind): train mode stays on, so a dropout that is left over would change the result."""
    config = tiny_model(family).config
    for name in ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = whole_hidden(model.eval())[MASK]
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits), "the family has no dropout: nothing is tested"
    trunk, branch = halves(model, 2)
    torch.testing.assert_close(branch.train()(trunk.train()(IDS, MASK), MASK)[MASK], expected, rtol=1e-5, atol=1e-5)
    assert not any(module.p for part in (trunk, branch) for module in part.modules() if isinstance(module, nn.Dropout))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_counts_its_layers_from_0_and_leaves_the_model_its_numbers(family: str) -> None:
    model = tiny_model(family)
    body = getattr(model, layout_of(model).body)

    def numbers(module: nn.Module) -> list[int]:
        layers = getattr(module, layout_of(model).layers)
        return [next(m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")) for layer in layers]

    trunk, branch = halves(model, 1)
    assert numbers(trunk.body) == [0]
    assert numbers(branch.body) == [0, 1, 2]
    assert numbers(body) == [0, 1, 2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_shares_the_models_tensors_and_a_branch_has_its_own(family: str) -> None:
    model = tiny_model(family)
    theirs = {p.data_ptr() for p in model.parameters()}
    trunk, branch = halves(model, 2)
    assert {p.data_ptr() for p in trunk.parameters()} < theirs
    assert not {p.data_ptr() for p in branch.parameters()} & theirs
    assert not any(p.is_meta for part in (trunk, branch) for p in part.parameters())
    assert not any(b.is_meta for part in (trunk, branch) for b in part.buffers())


@torch.no_grad()
def test_a_bfloat16_split_follows_the_bfloat16_model() -> None:
    model = tiny_model("llama").bfloat16()
    trunk, branch = halves(copy.deepcopy(model), 2, torch.bfloat16)
    assert trunk(IDS, MASK).dtype == torch.bfloat16
    assert 0 < verify_split(model, trunk, branch.float(), tolerance=3e-2) < 3e-2

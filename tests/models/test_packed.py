"""Packed weights: the same products bit for bit, and every weight back in its place afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.batch import Rollout
from fourfold.memory.tensors import LiveTensors
from fourfold.models import packed as packing
from fourfold.models import products
from fourfold.models.heads import LanguageHead
from fourfold.models.packed import PackedLinear, can_be_packed, packed_head, packed_layers, passes_for_decoding
from fourfold.models.products import is_packable, packed
from fourfold.models.roles import make_trainable
from fourfold.models.slot_cache import Places, SlotCache
from fourfold.models.slot_pass import LlamaPass
from fourfold.models.split import Part, cut
from tiny import tiny_directory, tiny_model
from tiny_roles import random_prompts, tiny_base, tiny_sampler

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not is_packable(torch.zeros(1, dtype=HALF), HALF), reason="this processor does not multiply bfloat16 itself"
)


def half_part(kind: str = "llama") -> Part:
    """All layers of a tiny model, frozen, in bfloat16."""
    model: Any = tiny_model(kind)
    return cut(model.requires_grad_(False).to(HALF), 0, 2, compute_dtype=HALF)


def through(part: Part, by: LlamaPass) -> Tensor:
    """Three tokens of two rows in one pass, then one each."""
    ids, positions = torch.arange(8).reshape(2, 4) + 5, torch.arange(4).expand(2, 4)
    cache = SlotCache(part.num_layers, 2, 4, slot_pass=by)
    first = part(ids[:, :3], None, cache=cache.at(Places(slice(0, 2), positions[:, :3], 3)))
    then = part(ids[:, 3:], None, cache=cache.at(Places(slice(0, 2), positions[:, 3:], 4)))
    return torch.cat((first, then), dim=1)


@given(
    rows=st.integers(1, 70), inputs=st.integers(1, 40), seed=st.integers(0, 9),
    outputs=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=3),
)  # fmt: skip
@torch.no_grad()
def test_joined_products_are_those_of_the_layers(
    rows: int, inputs: int, seed: int, outputs: list[tuple[int, bool]]
) -> None:
    """Of any sizes: each number is a sum of at most 40 products, the same one up to its order."""
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, size, bias=bias).to(HALF) for size, bias in outputs]
    x, weights = torch.randn(rows, inputs).to(HALF), [layer.weight.clone() for layer in layers]
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    product = PackedLinear(*layers)
    torch.testing.assert_close(product(x), expected, rtol=2**-7, atol=1e-2)
    assert all(bool(layer.weight.isnan().all()) for layer in layers)
    product.restore()
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer.weight, weight) and layer.weight.is_contiguous()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma"])
@torch.no_grad()
def test_a_packed_part_computes_what_it_did_and_holds_its_weights_again(kind: str) -> None:
    part = half_part(kind)
    before, expected = copy.deepcopy(part.state_dict()), through(part, LlamaPass(part))
    with packed_layers(part) as by:
        assert torch.equal(through(part, by), expected)
        assert part.layers[0].get_parameter("self_attn.q_proj.weight").isnan().all()
    after = part.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(through(part, LlamaPass(part)), expected)


@torch.no_grad()
def test_weights_come_back_when_the_rollout_fails_or_packing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    part = half_part()
    before = copy.deepcopy(part.state_dict())
    with pytest.raises(KeyboardInterrupt), packed_layers(part):
        raise KeyboardInterrupt
    assert all(torch.equal(part.state_dict()[name], tensor) for name, tensor in before.items())
    made = packing.PackedLinear
    calls: list[int] = []

    def fails(*layers: nn.Linear) -> PackedLinear:
        calls.append(len(layers))
        if len(calls) == 7:
            raise torch.OutOfMemoryError("no room for a packed weight")
        return made(*layers)

    monkeypatch.setattr(packing, "PackedLinear", fails)
    with pytest.raises(torch.OutOfMemoryError), packed_layers(part):
        pass
    assert all(torch.equal(part.state_dict()[name], tensor) for name, tensor in before.items())


def test_what_cannot_be_moved_is_left_where_it_is() -> None:
    assert can_be_packed(half_part()) and not can_be_packed(half_part("gpt2"))
    trained, watched, wide = half_part(), half_part(), cut(tiny_model("llama"), 0, 2, compute_dtype=torch.float32)
    trained.layers[1].get_parameter("mlp.up_proj.weight").requires_grad_(True)
    watched.layers[0].get_submodule("mlp.down_proj").register_forward_hook(lambda *_: None)
    wide.requires_grad_(False)
    assert not any(map(can_be_packed, (trained, watched, wide)))
    twice = half_part()
    twice.layers[1].get_submodule("mlp").up_proj = twice.layers[0].get_submodule("mlp.up_proj")
    assert not can_be_packed(twice)
    widened = half_part()
    widened.compute_dtype = torch.float32
    assert not can_be_packed(widened)


@torch.no_grad()
def test_a_head_is_packed_beside_its_weight() -> None:
    head = LanguageHead(nn.Parameter(torch.randn(1000, 48).to(HALF), requires_grad=False), None, 0.0)
    hidden = torch.randn(5, 48).to(HALF)
    weight, expected = head.weight.clone(), head.logits(hidden, HALF)
    with packed_head(head, HALF):
        assert head.packed is not None and torch.equal(head.logits(hidden, HALF), expected)
        assert torch.equal(head.weight, weight)  # which may be the embedding
    assert head.packed is None
    with packed_head(head, torch.float32):
        assert head.packed is None


@pytest.mark.parametrize("fault", ["refuses", "other numbers"])
def test_a_build_of_torch_that_packs_otherwise_is_left_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def packs_badly(weight: Tensor) -> Tensor:
        if fault == "refuses":
            raise NotImplementedError("no such operator in this build")
        return packed(weight.flip(0))

    products._packs.cache_clear()
    monkeypatch.setattr(products, "packed", packs_badly)
    assert not is_packable(torch.zeros(1, dtype=HALF), HALF)
    products._packs.cache_clear()


def test_bytes_of_packed_weights_are_counted() -> None:
    weight = torch.zeros(64, 32, dtype=HALF)
    with LiveTensors() as live:
        before = live.bytes
        copied = packed(weight)
        assert live.bytes - before == 64 * 32 * 2
        del copied
        assert live.bytes == before


@pytest.mark.parametrize("sharing", ["trunk", "none"])
def test_a_rollout_is_the_same_with_packed_weights(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler packs the trunk, its copy of the policy and the head; tokens and log-probs are the same bits.

    Products of fewer than 4,096 multiplications are another kernel's in torch, so the model is wider than most here.
    """
    tiny_directory(tmp_path / "m", hidden=128)
    drawn: list[Rollout] = []
    for packs in (True, False):
        seen: list[bool] = []

        def asked(part: Part, packs: bool = packs, seen: list[bool] = seen) -> bool:
            seen.append(can_be_packed(part))
            return packs and seen[-1]

        monkeypatch.setattr(packing, "can_be_packed", asked)
        if not packs:
            monkeypatch.setattr(packing, "is_packable", lambda weight, compute_dtype: False)
        base = tiny_base(tmp_path / "m", mode=sharing, precision__compute="bfloat16")
        make_trainable(base.policy, with_language_head=sharing == "none")
        drawn.append(tiny_sampler(base).generate(random_prompts([3, 1, 2]), policy_version=0)[0])
        assert seen and (all(seen) or not packs)
    assert torch.equal(drawn[0].sequences, drawn[1].sequences)
    assert torch.equal(drawn[0].sampler_log_probs, drawn[1].sampler_log_probs)
    assert torch.equal(drawn[0].log_probs, drawn[1].log_probs)


@torch.no_grad()
def test_parts_without_a_pass_of_their_own_are_left_to_the_library(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", precision__compute="bfloat16")
    with passes_for_decoding(base.policy, base.trunk, lambda part: False) as passes:
        assert base.trunk is not None and passes(base.trunk) is None and passes(base.policy.branch) is None
        assert not any(bool(p.isnan().any()) for p in base.trunk.parameters())

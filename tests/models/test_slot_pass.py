"""The step of our own is taken where it computes what the library's layers do, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold.models import slot_pass
from fourfold.models.slot_cache import Places, SlotCache
from fourfold.models.slot_pass import attend, slot_pass_of
from fourfold.models.split import cut
from tiny import tiny_model


def step_by(part: Any, cache: SlotCache) -> Tensor:
    """Three tokens of two rows by the library's layers, then one by whatever the cache says."""
    ids = torch.arange(8).reshape(2, 4) + 5
    positions = torch.arange(4).expand(2, 4)
    part(ids[:, :3], None, cache=cache.at(Places(torch.tensor([0, 1]), positions[:, :3], 3)))
    return part(ids[:, 3:], None, cache=cache.at(Places(slice(0, 2), positions[:, 3:], 4)))


def test_a_step_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    part = cut(tiny_model("llama"), 0, 2, compute_dtype=torch.float32)
    assert slot_pass_of(part) is not None
    monkeypatch.setattr(slot_pass._Rotary, "__call__", lambda self, x: x)
    assert slot_pass_of(part) is None


def test_weights_that_are_not_finite_are_left_to_the_library() -> None:
    part = cut(tiny_model("llama"), 0, 2, compute_dtype=torch.float32)
    with torch.no_grad():
        part.layers[1].get_parameter("self_attn.o_proj.weight")[0, 0] = torch.nan
    assert slot_pass_of(part) is None


@torch.no_grad()
def test_hooks_of_the_layers_are_called_as_the_layers_call_them() -> None:
    """Layers that are watched against a budget, or fetched from elsewhere, work by hooks."""
    part = cut(tiny_model("llama"), 0, 2, compute_dtype=torch.float32)
    seen: list[tuple[str, int, Tensor]] = []

    def before(number: int) -> Callable[..., None]:
        return lambda layer, args: seen.append(("before", number, args[0]))

    def after(number: int) -> Callable[..., None]:
        return lambda layer, args, out: seen.append(("after", number, out))

    for number, layer in enumerate(part.layers):
        layer.register_forward_pre_hook(before(number))
        layer.register_forward_hook(after(number))
    step = slot_pass_of(part)
    assert step is not None
    found = {}
    for name, quick in (("library", None), ("step", step)):
        seen.clear()
        step_by(part, SlotCache(2, 2, 4, slot_pass=quick))
        found[name] = seen[-4:]
    assert [each[:2] for each in found["step"]] == [each[:2] for each in found["library"]]
    for (_, _, ours), (_, _, theirs) in zip(found["step"], found["library"], strict=True):
        torch.testing.assert_close(ours.reshape(2, -1), theirs.reshape(2, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "flex_attention"])
@torch.no_grad()
def test_a_kernel_that_takes_no_such_masks_is_changed_for_the_pass(kernel: str) -> None:
    expected = step_by(cut(tiny_model("llama"), 0, 2, compute_dtype=torch.float32), SlotCache(2, 2, 4))
    model = tiny_model("llama")
    model.set_attn_implementation(kernel)
    other = cut(model, 0, 2, compute_dtype=torch.float32)
    torch.testing.assert_close(step_by(other, SlotCache(2, 2, 4)), expected, rtol=0, atol=1e-5)
    configs: list[Any] = [other.body.config, *(vars(attention)["config"] for attention in other.attentions)]
    assert {config._attn_implementation for config in configs} == {kernel}


@given(
    rows=st.integers(1, 3), heads=st.integers(1, 3), group=st.integers(1, 3), length=st.integers(1, 9),
    window=st.integers(0, 4), seed=st.integers(0, 9),
)  # fmt: skip
def test_attention_is_the_weighted_sum(rows: int, heads: int, group: int, length: int, window: int, seed: int) -> None:
    """Against a loop over rows, heads and keys in float64."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, group, 4, generator=generator)
    keys, values = torch.randn(2, rows, heads, length, 4, generator=generator)
    positions = torch.randint(length, (rows, 1), generator=generator)
    unseen = Places(slice(0, rows), positions, length).unseen(torch.float32, window)
    found = attend(query, keys, values, unseen, 0.5)
    for row, at in enumerate(positions[:, 0].tolist()):
        columns = range(max(at - window + 1, 0) if window else 0, at + 1)
        for head in range(heads):
            for place in range(group):
                scores = [float(query[row, head, place].double() @ keys[row, head, j].double()) / 2 for j in columns]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                expected = sum(w * values[row, head, j].double() for w, j in zip(weights, columns, strict=True))
                torch.testing.assert_close(found[row, head, place].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_step_is_taken(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama")
    assert slot_pass_of(cut(model.to("cuda", dtype), 0, 2, compute_dtype=dtype)) is not None

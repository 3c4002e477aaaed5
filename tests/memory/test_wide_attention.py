"""Attention in float32 from half precision: against the formula in float64, and in every role of a run on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.memory.wide_attention import NAME, wide_attention
from training.runs import by_function, make_config, make_trainer, settings

BATCH, HEADS, GROUPS, TIME, SIZE = 3, 4, 2, 7, 8


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and fewer heads of keys and values, laid out as the layers lay them out."""
    torch.manual_seed(0)
    shapes = [(BATCH, TIME, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes)
    return q, k, v


def left_padded() -> Tensor:
    """Row i begins with i columns of padding: causal masks [batch, 1, time, keys] whose first queries see nothing."""
    causal = torch.ones(TIME, TIME, dtype=torch.bool).tril()
    real = torch.arange(TIME) >= torch.arange(BATCH)[:, None]
    return (causal & real[:, None, :])[:, None]


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(size)) v, step by step, over repeated keys."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) / SIZE**0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def module(**given: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=HEADS // GROUPS, **given)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_the_formula(dtype: torch.dtype, *, padded: bool) -> None:
    given, truth = inputs(dtype), [x.detach().double().requires_grad_() for x in inputs(dtype)]
    mask = left_padded() if padded else torch.ones(TIME, TIME, dtype=torch.bool).tril()
    out, _ = wide_attention(module(is_causal=True), *given, mask if padded else None)
    wanted = formula(truth[0], truth[1], truth[2], mask)
    assert out.dtype == dtype and out.is_contiguous()
    real = mask.any(dim=-1).expand(BATCH, HEADS, TIME).transpose(1, 2)[..., None]
    weight = torch.where(real, torch.randn(out.shape), 0.0).to(dtype)  # nobody reads what padding gives
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double()[real[..., 0]], wanted[real[..., 0]], rtol=step, atol=step / 8)
    found = torch.autograd.grad(out, given, weight)
    for g, w in zip(found, torch.autograd.grad(wanted, truth, weight.double()), strict=True):
        assert g.dtype == dtype
        # The output enters the gradient rounded to `dtype`.
        torch.testing.assert_close(g.double(), w, rtol=4 * step, atol=2 * step)


def test_it_rounds_less_than_torchs_own_kernel() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given, mask, gaps = inputs(torch.bfloat16), torch.ones(TIME, TIME, dtype=torch.bool).tril(), {}
    query, key, value = (x.detach().double() for x in given)
    wanted = formula(query, key, value, mask)
    kernels: dict[str, Any] = {"wide": wide_attention, "torch": sdpa_attention_forward}
    for name, kernel in kernels.items():
        out, _ = kernel(module(is_causal=True), *given, None)
        gaps[name] = float((out.detach() - wanted).norm())
    assert gaps["wide"] < gaps["torch"]


def test_nothing_but_the_inputs_is_kept() -> None:
    given, mask = inputs(torch.bfloat16), left_padded()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        wide_attention(module(is_causal=True), *given, mask)
    same = {x.data_ptr() for x in (*given, mask)}
    others = [x for x in kept if x.data_ptr() not in same]
    assert sum(x.numel() * x.element_size() for x in others) == BATCH * HEADS * TIME * (2 * SIZE + 4)  # output, sums


@pytest.mark.parametrize(
    ("dtype", "time", "keys"), [(torch.float32, TIME, TIME), (torch.bfloat16, 1, TIME), (torch.bfloat16, 2, TIME)]
)
def test_float32_and_decoding_keep_the_kernel_of_transformers(dtype: torch.dtype, time: int, keys: int) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = inputs(dtype)
    q, mask = q[:, :, :time], left_padded()[:, :, TIME - time :]
    assert keys == k.shape[2]
    ours, theirs = (f(module(is_causal=True), q, k, v, mask)[0] for f in (wide_attention, sdpa_attention_forward))
    assert torch.equal(ours, theirs)


def test_auto_is_this_kernel_on_the_cpu_in_every_role(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_by_hash", steps=1))))
    models = trainer.models
    parts = [models.base.trunk, models.actor.branch, models.critic.branch, models.reference.branch]
    assert {part.body.config._attn_implementation for part in parts if part is not None} == {NAME}

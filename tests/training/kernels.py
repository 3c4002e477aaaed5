"""Other kernels than the actor's, as on another device or machine: they round bfloat16 in other places."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold.models import products

_here = threading.local()


def sums_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Within, linear layers of this thread round the sums of both halves of their inputs, as a split-K kernel does."""
    for owner, name in ((functional, "linear"), (products, "linear_in_float32"), (products, "_few_rows_widened")):
        monkeypatch.setattr(owner, name, _in_two_parts(getattr(owner, name)))

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        _here.other = True
        try:
            yield
        finally:
            _here.other = False

    return within


def _in_two_parts(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *more: torch.dtype) -> Tensor:
        if not getattr(_here, "other", False):
            return real(inputs, weight, bias, *more)
        half = inputs.shape[-1] // 2
        parts = [(inputs[..., :half], weight[:, :half]), (inputs[..., half:], weight[:, half:])]
        first, second = (real(x.contiguous(), w.contiguous(), None, *more) for x, w in parts)
        out = first + second
        return out if bias is None else out + bias.to(out.dtype)

    return linear


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Within, torch's own kernels instead of oneDNN's, which differ for matrices of some hundred columns and more."""
    torch.backends.mkldnn.set_flags(_enabled=False)  # `flags` would warn of Intel's GPUs
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


def onednn_multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it; without them torch's own kernels compute anyway."""
    mkldnn: Any = torch.ops.mkldnn
    return bool(mkldnn._is_mkldnn_bf16_supported())


def computed_within(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, within: Callable[[], Any]) -> None:
    """From here on a method runs within a context."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with within():
            return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)

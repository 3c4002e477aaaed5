"""What the gradients of the head cost, and what float16 leaves of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.algorithms import log_probs as module
from fourfold.algorithms.log_probs import fused_log_probs


def test_small_probabilities_survive_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 49,152 tokens has 0.00002, of which float16 would lose a thousandth; their sum is the gradient."""
    vocab, dtype = 49_152, torch.float16
    monkeypatch.setattr(module, "product_dtype", lambda device, dtype: dtype)  # as on a GPU
    hidden = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    weight = torch.ones(vocab, 1, dtype=dtype)
    weight[0] = 0.0
    log_probs, _ = fused_log_probs(hidden, weight, torch.tensor([0]), entropy="none")
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(-(vocab - 1) / vocab, rel=6e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_trained_weight_costs_one_tensor_of_its_size(dtype: torch.dtype) -> None:
    vocab, size = 4096, 64
    hidden, weight = torch.randn(4, size, dtype=dtype), torch.randn(vocab, size, dtype=dtype, requires_grad=True)
    log_probs, _ = fused_log_probs(hidden, weight, torch.arange(4), entropy="none")
    made: list[Tensor] = []

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= weight.nbytes:
                made.append(result)
            return result

    with Large():
        [gradient] = torch.autograd.grad(log_probs.sum(), [weight])
    found = {x.untyped_storage().data_ptr() for x in made}
    widened = module.product_dtype("cpu", dtype) != dtype  # then the float32 product is rounded into a second one
    assert gradient.untyped_storage().data_ptr() in found and len(found) == 1 + widened

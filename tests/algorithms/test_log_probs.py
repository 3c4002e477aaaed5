"""Log-probs in chunks against torch's log-softmax in float64, in value, gradient and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.algorithms import log_probs as module
from fourfold.algorithms.log_probs import (
    Entropy,
    entropy_from_logits,
    fused_full_kl,
    fused_log_probs,
    log_probs_from_logits,
    recomputed_tokens,
)

TOKENS, HIDDEN, VOCAB = 7, 5, 11
HEADS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"softcap": 2.0},
    {"softcap": 1.5, "temperature": 1.7, "scale": 0.5},
]


def inputs(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head weight, bias and labels."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    return hidden, weight, bias, torch.randint(VOCAB, (TOKENS,), generator=generator)


def direct(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The definition, on whole float64 logits, differentiated by torch."""
    logits = scale * hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_the_logits_are_tempered_not_the_log_prob() -> None:
    """FAULTS A10: logits [0, 1, 2] at temperature 0.5 are [0, 2, 4]."""
    logits = torch.tensor([0.0, 1.0, 2.0])
    expected = 4 - math.log(sum(math.exp(v) for v in (0, 2, 4)))
    actual = log_probs_from_logits(logits, torch.tensor(2), temperature=0.5).item()
    assert actual == pytest.approx(expected, abs=1e-6)
    assert actual == pytest.approx(-0.1429, abs=1e-4)
    assert actual != pytest.approx(log_probs_from_logits(logits, torch.tensor(2)).item() / 0.5, abs=0.1)


def test_the_entropy_is_that_of_the_tempered_policy() -> None:
    """FAULTS A9: logits [0, 2] at temperature 0.5 have the entropy of softmax([0, 4])."""

    def binary_entropy(gap: float) -> float:
        p = 1 / (1 + math.exp(gap))
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    logits = torch.tensor([0.0, 2.0])
    tempered = binary_entropy(4.0)
    assert tempered == pytest.approx(0.0901, abs=1e-4)
    assert entropy_from_logits(logits, temperature=0.5).item() == pytest.approx(tempered, abs=1e-6)
    assert entropy_from_logits(logits).item() == pytest.approx(binary_entropy(2.0), abs=1e-6)
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]])
    _, entropy = fused_log_probs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert entropy.item() == pytest.approx(tempered, abs=1e-6)


def test_a_forbidden_token_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([0.0, 0.0, -torch.inf], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(math.log(2))
    entropy.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_half_precision_logits_are_reduced_in_float32() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([0, 5, 10])
    for actual, expected in (
        (log_probs_from_logits(logits, labels), log_probs_from_logits(logits.double(), labels)),
        (entropy_from_logits(logits), entropy_from_logits(logits.double())),
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("head_trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_equal_the_definition(
    head: dict[str, Any], with_bias: bool, head_trained: bool, dtype: torch.dtype
) -> None:
    hidden, weight, bias, labels = inputs(dtype=dtype)
    leaves = [hidden, *([weight] if head_trained else []), *([bias] if head_trained and with_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    chosen_bias = bias if with_bias else None
    upstream = torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64)
    expected = direct(hidden, weight, labels, chosen_bias, **head)
    actual = fused_log_probs(hidden, weight, labels, bias=chosen_bias, chunk_tokens=3, **head)
    tolerance: dict[str, Any] = (
        {"atol": 1e-12, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 1e-5}
    )
    for part in range(2):
        assert actual[part].dtype == dtype
        torch.testing.assert_close(actual[part].double(), expected[part], **tolerance)
    # Log-probs alone, entropies alone, and both: three ways through the backward.
    for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.3)):
        truth, made = (
            torch.autograd.grad(
                sum(w * (upstream.to(o.dtype) * o).sum() for w, o in zip(weights, out, strict=True) if w),  # type: ignore[arg-type]
                leaves,
                retain_graph=True,
            )
            for out in (expected, actual)
        )
        for t, m in zip(truth, made, strict=True):
            assert m.dtype == dtype
            torch.testing.assert_close(m.double(), t.double(), **tolerance)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "trained", [(True, False, False), (True, True, True), (False, True, False), (False, False, True)]
)
def test_gradcheck(head: dict[str, Any], trained: tuple[bool, bool, bool]) -> None:
    """Finite differences, for every combination of what is trained."""
    hidden, weight, bias, labels = inputs(seed=1)
    hidden, weight, bias = (x.requires_grad_(needed) for x, needed in zip((hidden, weight, bias), trained, strict=True))

    def both(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return fused_log_probs(h, w, labels, bias=b, chunk_tokens=4, **head)

    def first(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return both(h, w, b)[0]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(first, (hidden, weight, bias))


def test_a_finite_step_along_the_gradient_changes_the_sum_as_predicted() -> None:
    hidden, weight, _, labels = inputs(seed=2, dtype=torch.float32)
    hidden.requires_grad_()
    log_probs, _ = fused_log_probs(hidden, weight, labels, entropy="none")
    (gradient,) = torch.autograd.grad(log_probs.sum(), hidden)
    step = 1e-2
    ends = [fused_log_probs(hidden.detach() + s * gradient, weight, labels)[0].double().sum() for s in (step, -step)]
    slope = (ends[0] - ends[1]).item() / (2 * step)
    assert slope == pytest.approx(gradient.double().square().sum().item(), rel=1e-3)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_chunk_and_block_sizes_change_nothing(chunk_tokens: int, block: int, head_trained: bool) -> None:
    """FAULTS A11: float32 log-probs in chunks of any size agree to 1e-5; so do gradients."""
    hidden, weight, _, labels = inputs(seed=3, dtype=torch.float32)
    results = []
    for tokens, elements in ((1024, 2**18), (chunk_tokens, block)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(head_trained)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_CPU_BLOCK", elements)
            out = fused_log_probs(h, w, labels, temperature=0.8, softcap=3.0, chunk_tokens=tokens)
            (out[0] + 0.5 * out[1]).sum().backward()
        results.append((*out, h.grad, w.grad) if head_trained else (*out, h.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("entropy", ["none", "report", "learn"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 10])
def test_logits_are_made_again_for_as_many_tokens_as_is_said(
    tokens: int, entropy: Entropy, head_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is still there when the backward pass begins."""
    made: list[int] = []
    make = module._Logits._made

    def counted(self: Any, chunk: slice, *rest: Any) -> Tensor:
        made.append(chunk.stop - chunk.start)
        return make(self, chunk, *rest)

    monkeypatch.setattr(module._Logits, "_made", counted)
    hidden, weight = torch.randn(tokens, 3, requires_grad=True), torch.randn(VOCAB, 3, requires_grad=head_trained)
    labels = torch.zeros(tokens, dtype=torch.int64)
    log_probs, entropies = fused_log_probs(hidden, weight, labels, chunk_tokens=4, entropy=entropy)
    assert sum(made) == tokens
    (log_probs.sum() + entropies.sum()).backward()
    again = recomputed_tokens(tokens, head_trained=head_trained, entropy=entropy, chunk_tokens=4)
    assert sum(made) - tokens == again
    assert again == ((tokens - 1) // 4 * 4 if head_trained or entropy == "learn" else 0)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_bfloat16_is_close_whichever_way_its_products_run(
    native: bool, head_trained: bool, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processor's bfloat16 instructions or without them (then in float32)."""
    product = torch.bfloat16 if native else torch.float32
    monkeypatch.setattr(module, "product_dtype", lambda device, dtype: product)
    monkeypatch.setattr(module, "_WIDENED_ROWS", 4)
    hidden, weight, bias, labels = inputs(seed=4, dtype=torch.bfloat16)
    leaves = [hidden.requires_grad_(), *([weight.requires_grad_(), bias.requires_grad_()] if head_trained else [])]
    expected = direct(hidden, weight, labels, bias, **head)
    actual = fused_log_probs(hidden, weight, labels, bias=bias, chunk_tokens=3, **head)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, atol=0.05 if native else 1e-5, rtol=0.0)
    for use in (lambda out: out[0].sum(), lambda out: (out[0] - out[1]).sum()):
        truth = torch.autograd.grad(use(expected), leaves, retain_graph=True)
        made = torch.autograd.grad(use(actual), leaves, retain_graph=True)
        for t, m in zip(truth, made, strict=True):
            assert m.dtype == torch.bfloat16
            torch.testing.assert_close(m.double(), t.double(), atol=0.1 if native else 0.02, rtol=0.02)


def test_small_gradients_survive_bfloat16() -> None:
    """A token of probability 0.9995 has a gradient of 0.0005, which 1 - bfloat16(p) would round to 0."""
    hidden, weight = torch.tensor([[1.0]]).bfloat16().requires_grad_(), torch.tensor([[7.625], [0.0]]).bfloat16()
    log_probs, _ = fused_log_probs(hidden, weight, torch.tensor([0]), entropy="none")
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(7.625 / (1 + math.exp(7.625)), rel=0.01)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    log_probs, entropy = fused_log_probs(hidden, weight, torch.tensor([0, 0]))
    assert log_probs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    (log_probs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.0], [2.0]]


def test_without_entropy_it_is_zero_and_has_no_gradient() -> None:
    hidden, weight, _, labels = inputs(dtype=torch.float32)
    hidden.requires_grad_()
    log_probs, entropy = fused_log_probs(hidden, weight, labels, entropy="none")
    assert entropy.tolist() == [0.0] * TOKENS
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(log_probs, fused_log_probs(hidden, weight, labels)[0], atol=0, rtol=0)


def test_without_grad_nothing_is_kept_and_the_values_are_the_same() -> None:
    hidden, weight, _, labels = inputs(dtype=torch.float32)
    hidden.requires_grad_()
    with torch.no_grad():
        quiet = fused_log_probs(hidden, weight, labels)
    assert not quiet[0].requires_grad
    for a, b in zip(quiet, fused_log_probs(hidden, weight, labels), strict=True):
        assert torch.equal(a, b)


def test_no_tokens_give_no_log_probs() -> None:
    _, weight, _, _ = inputs(dtype=torch.float32)
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    log_probs, entropy = fused_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, HIDDEN)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("head_trained", [False, True])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_no_tensor_of_all_tokens_by_vocabulary_is_ever_made(head_trained: bool, entropy_coef: float) -> None:
    tokens, hidden_size, vocab, chunk = 64, 4, 512, 8
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=head_trained)
    labels = torch.randint(vocab, (tokens,))
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved = max(saved, tensor.numel())
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs, entropy = fused_log_probs(hidden, weight, labels, softcap=5.0, chunk_tokens=chunk)
        (log_probs + entropy_coef * entropy).sum().backward()
    assert largest.elements == chunk * vocab
    assert saved == vocab * hidden_size
    with LargestTensor() as largest:
        fused_full_kl(hidden, hidden, weight, weight, chunk_tokens=chunk)
    assert largest.elements <= chunk * vocab


def test_the_recorder_sees_a_plain_log_softmax() -> None:
    """The memory test would fail for the ordinary way of doing it."""
    with LargestTensor() as largest:
        torch.log_softmax(torch.randn(64, 4) @ torch.randn(4, 512), dim=-1)
    assert largest.elements == 64 * 512


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_full_kl_equals_the_sum_over_the_vocabulary(head: dict[str, Any], dtype: torch.dtype) -> None:
    """FAULTS C1: exact KL, never negative, token by token."""
    hidden_p, weight_p, bias, labels = inputs(5, dtype)
    hidden_q, weight_q, _, _ = inputs(6, dtype)
    columns = [torch.full_like(labels, v) for v in range(VOCAB)]
    log_p = torch.stack([direct(hidden_p, weight_p, c, bias, **head)[0] for c in columns], dim=1)
    log_q = torch.stack([direct(hidden_q, weight_q, c, **head)[0] for c in columns], dim=1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    for chunk_tokens in (1, 4, 1024):
        kl = fused_full_kl(hidden_p, hidden_q, weight_p, weight_q, bias_p=bias, chunk_tokens=chunk_tokens, **head)
        assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (kl >= 0).all()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(kl.double(), expected, atol=tolerance, rtol=tolerance)


def test_full_kl_of_equal_models_is_exactly_zero() -> None:
    """FAULTS C1, C9: also at another temperature, which both models get."""
    hidden, weight, _, _ = inputs(dtype=torch.float32)
    kl = fused_full_kl(hidden, hidden.clone(), weight, weight.clone(), temperature=0.7)
    assert kl.tolist() == [0.0] * TOKENS


def test_full_kl_allows_models_of_different_widths() -> None:
    hidden, weight, _, _ = inputs(dtype=torch.float64)
    padded = [torch.cat([x, torch.zeros(len(x), 2, dtype=x.dtype)], dim=1) for x in (hidden, weight)]
    assert fused_full_kl(hidden, padded[0], weight, padded[1]).max().item() < 1e-12


def test_bad_inputs_are_refused() -> None:
    hidden, weight, _, labels = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="must agree"):
        fused_log_probs(hidden, weight.detach().bfloat16().requires_grad_(), labels)
    refused: list[dict[str, Any]] = [{"temperature": 0.0}, {"softcap": -1.0}, {"chunk_tokens": 0}]
    for wrong in refused:
        with pytest.raises(ValueError, match="allowed are"):
            fused_log_probs(hidden, weight, labels, **wrong)
    with pytest.raises(ValueError, match="one vocabulary"):
        fused_full_kl(hidden, hidden, weight, weight[:-1])
    with pytest.raises(ValueError, match="temperature = 0"):
        log_probs_from_logits(torch.zeros(2), torch.tensor(0), temperature=0)

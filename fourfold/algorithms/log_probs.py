"""Log-probs, entropies and exact KL from hidden states, without a `[tokens, vocab]` tensor that outlives its chunk.

`fused_log_probs` makes the logits of a chunk of tokens, reduces them, and forgets them; where a gradient needs them
again it makes them again (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"), in plain torch.
Only the last chunk stays, because the backward pass begins with it. Within a chunk the passes over the vocabulary go
by blocks of rows that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.algorithms.products import product_dtype

Entropy = Literal["none", "report", "learn"]
# Rows of logits that exist at a time.
CHUNK_TOKENS = 1024
# Elements of a block of rows: on a CPU 1 MiB of float32 stays in a core's cache, on a GPU launches are what costs.
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**24
# Vocabulary rows that are widened at once where a product has to run in float32 though the weight is narrower.
_WIDENED_ROWS = 8192
# float16 has few digits below 2^-14, and no loss scale has reached probabilities yet: they are multiplied by this.
_FLOAT16_LIFT = 1024.0


def log_probs_from_logits(
    logits: Float[Tensor, "*shape vocab"], labels: Int64[Tensor, "*shape"], temperature: float = 1.0
) -> Float[Tensor, "*shape"]:
    """log softmax(logits / temperature)[label], at least in float32.

    >>> scores = torch.tensor([0.0, 1.0, 2.0])
    >>> round(log_probs_from_logits(scores, torch.tensor(2), temperature=0.5).item(), 4)
    -0.1429
    """
    log_p = torch.log_softmax(_tempered(logits, temperature), dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Float[Tensor, "*shape vocab"], temperature: float = 1.0) -> Float[Tensor, "*shape"]:
    """H = -sum p log p of p = softmax(logits / temperature), at least in float32: the entropy of what is sampled from.

    >>> round(entropy_from_logits(torch.tensor([0.0, 2.0]), temperature=0.5).item(), 4)
    0.0901
    """
    log_p = torch.log_softmax(_tempered(logits, temperature), dim=-1)
    # A forbidden token (-inf) adds 0, the limit of p log p, instead of 0 * inf.
    return -(log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)).sum(dim=-1)


def fused_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int64[Tensor, "tokens"],
    *,
    bias: Float[Tensor, "vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    entropy: Entropy = "learn",
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Log-probs of `labels` and entropies of softmax(logits / temperature).

    Log-probs are differentiable, entropies where they are to "learn" from; "report" gives them without a gradient,
    "none" gives zeros.

    logits = scale * hidden @ weight^T + bias; with `softcap` c they become c * tanh(logits / c).
    The product runs in the dtype of `hidden`, into which a frozen `weight` of another is put a few rows at a time;
    everything after it in float32 (float64 for float64).
    At most `chunk_tokens` rows of logits exist at a time.
    """
    _check_inputs(hidden, weight, temperature, softcap, chunk_tokens)
    shape = _Shape(temperature, softcap, scale, chunk_tokens)
    head_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    learns = torch.is_grad_enabled() and hidden.requires_grad
    ahead = learns and not head_trained and entropy != "learn"
    return _FusedLogProbs.apply(hidden, weight, bias, labels, shape, entropy, ahead)  # type: ignore[return-value]


def recomputed_tokens(tokens: int, *, head_trained: bool, entropy: Entropy, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Tokens whose logits the backward pass of `fused_log_probs` makes again: all but those of the last chunk."""
    if not head_trained and entropy != "learn":
        return 0
    return max(tokens - 1, 0) // chunk_tokens * chunk_tokens


@torch.no_grad()
def fused_full_kl(
    hidden_p: Float[Tensor, "tokens hidden_p"],
    hidden_q: Float[Tensor, "tokens hidden_q"],
    weight_p: Float[Tensor, "vocab hidden_p"],
    weight_q: Float[Tensor, "vocab hidden_q"],
    *,
    bias_p: Float[Tensor, "vocab"] | None = None,
    bias_q: Float[Tensor, "vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Float[Tensor, "tokens"]:
    """KL(p || q) = sum_v p(v) (log p(v) - log q(v)) of every token, over the whole vocabulary, without gradient.

    Rounding may put the sum of two nearly equal distributions below 0; it is returned as 0.
    """
    _check_inputs(hidden_p, weight_p, temperature, softcap, chunk_tokens)
    _check_inputs(hidden_q, weight_q, temperature, softcap, chunk_tokens)
    if len(weight_p) != len(weight_q):
        raise ValueError(
            f"weights of {len(weight_p)} and {len(weight_q)} tokens: KL needs one vocabulary; "
            "try a reference that has the actor's tokenizer"
        )
    # Half a chunk of each of the two models is as much memory as one chunk.
    shape = _Shape(temperature, softcap, scale, max(chunk_tokens // 2, 1))
    kl = hidden_p.new_empty(len(hidden_p), dtype=_working_dtype(hidden_p))
    pairs = zip(
        _Logits(hidden_p, weight_p, shape).each(hidden_p, weight_p),
        _Logits(hidden_q, weight_q, shape).each(hidden_q, weight_q),
        strict=True,
    )
    for (chunk, logits_p), (_, logits_q) in pairs:
        blocks = zip(_blocks(logits_p, bias_p, shape), _blocks(logits_q, bias_q, shape), strict=True)
        for (rows, log_p), (_, log_q) in blocks:
            log_p.sub_(log_p.logsumexp(dim=-1, keepdim=True))
            log_q.sub_(log_q.logsumexp(dim=-1, keepdim=True))
            kl[chunk][rows] = log_p.exp().mul_(log_q.neg_().add_(log_p)).sum(dim=-1).clamp_min_(0.0)
    return kl


@dataclass(frozen=True, slots=True)
class _Shape:
    """What turns products into logits, and how many rows are made at once."""

    temperature: float
    softcap: float
    scale: float
    chunk_tokens: int


class _FusedLogProbs(torch.autograd.Function):
    """With `ahead`, forward also makes d log_prob / d hidden, which no gradient from above is needed for.

    The powers of a block serve both ways then, no logits wait for backward, and backward is a product by one number a
    token. Else it goes back from the last chunk, whose logits are still there, and makes the others again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: _Shape,
        entropies: Entropy,
        ahead: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _working_dtype(hidden)
        log_probs, log_total = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        entropy = hidden.new_zeros(len(hidden), dtype=dtype)
        slopes = torch.empty_like(hidden, dtype=dtype) if ahead else None
        scratch, made = _Scratch(), _Logits(hidden, weight, shape)
        lift = _FLOAT16_LIFT if made.buffer.dtype == torch.float16 else 1.0
        for chunk, logits in made.each(hidden, weight):
            for rows, block in _blocks(logits, bias, shape):
                softcap_slope = _softcap_slope(block, shape) if ahead else None
                top = block.amax(dim=-1)
                block.sub_(top[:, None])
                powers = torch.exp(block, out=scratch.like(block))
                total = powers.sum(dim=-1)
                log_sum = total.log()
                label = labels[chunk][rows, None]
                log_probs[chunk][rows] = block.gather(1, label)[:, 0] - log_sum
                log_total[chunk][rows] = top + log_sum
                if entropies != "none":
                    entropy[chunk][rows] = log_sum - block.mul_(powers).sum(dim=-1) / total
                if ahead:
                    p = torch.div(powers, -total[:, None] / lift, out=block)
                    ones = torch.full_like(label, lift, dtype=dtype)
                    _store(logits, rows, p.scatter_add_(1, label, ones), softcap_slope)
            if slopes is not None:
                slopes[chunk] = _into_hidden(logits, weight)
        if slopes is not None:
            slopes.mul_(shape.scale / shape.temperature / lift)
        ctx.save_for_backward(hidden, weight, bias, labels, log_total, entropy, slopes)
        ctx.shape, ctx.logits = shape, None if ahead else made  # freed with ctx where no gradient is wanted
        ctx.set_materialize_grads(False)
        if entropies != "learn":
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, labels, log_total, entropy, slopes = ctx.saved_tensors
        if grad_entropy is None and grad_log_probs is None:
            return (None,) * 7
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_total)
        if slopes is not None:
            return (slopes * grad_log_probs[:, None]).to(hidden.dtype), *(None,) * 6
        shape: _Shape = ctx.shape
        sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad, shape.scale)
        scratch, made = _Scratch(), ctx.logits or _Logits(hidden, weight, shape)
        ctx.logits = None  # what comes now overwrites them: a second backward pass makes its own
        for chunk, logits in made.each_from_last(hidden, weight):
            for rows, block in _blocks(logits, bias, shape):
                softcap_slope = _softcap_slope(block, shape)
                block.sub_(log_total[chunk][rows, None])
                g = grad_log_probs[chunk][rows, None] / shape.temperature
                if grad_entropy is None:
                    block.exp_().mul_(-g)
                else:
                    # dH/dlogit = -p (log p + H)
                    h = grad_entropy[chunk][rows, None] / shape.temperature
                    p = torch.exp(block, out=scratch.like(block))
                    block.mul_(-h).sub_(g + h * entropy[chunk][rows, None]).mul_(p)
                block.scatter_add_(1, labels[chunk][rows, None], g)
                _store(logits, rows, block, softcap_slope)
                sums.add_bias(block)
            sums.add_products(chunk, logits)
        return *sums.finish(), None, None, None, None


class _Gradients:
    """Gradients of hidden, weight and bias: summed over chunks in the working precision, returned in their own."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...], scale: float
    ) -> None:
        self.inputs = (hidden, weight, bias)
        self.scale = scale
        dtype = _working_dtype(hidden)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = weight.new_zeros(()).expand_as(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add_bias(self, grad_block: Tensor) -> None:
        if self.bias is not None:
            self.bias.add_(grad_block.sum(dim=0))

    def add_products(self, chunk: slice, grad_logits: Tensor) -> None:
        """Both products take the chunk's gradient in the dtype of its logits."""
        hidden, weight, _ = self.inputs
        if self.hidden is not None:
            self.hidden[chunk] = _scale(_into_hidden(grad_logits, weight), self.scale)
        if self.weight is not None:
            rows, dtype = hidden[chunk].to(grad_logits.dtype), _working_dtype(hidden)
            if chunk.stop == len(hidden):  # the first to come; as large as the weight, so it is not added to zeros
                self.weight = grad_logits.t() @ rows
            elif rows.dtype == dtype:
                self.weight.addmm_(grad_logits.t(), rows)
            else:
                self.weight = self.weight.to(dtype).add_(grad_logits.t() @ rows)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _, weight, bias = self.inputs
        return (
            self.hidden,
            None if self.weight is None else _scale(self.weight, self.scale).to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class _Scratch:
    """A block-sized buffer that is made once: fresh memory would cost a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def like(self, block: Tensor) -> Tensor:
        if self.buffer is None or len(self.buffer) < len(block):
            self.buffer = torch.empty_like(block)
        return self.buffer[: len(block)]


class _Logits:
    """hidden @ weight^T for one chunk of rows after the other, in one buffer that the caller may overwrite."""

    def __init__(self, hidden: Tensor, weight: Tensor, shape: _Shape) -> None:
        tokens, size = len(hidden), shape.chunk_tokens
        self.chunks = [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        dtype = product_dtype(hidden.device.type, hidden.dtype)
        self.buffer = hidden.new_empty(min(size, tokens), len(weight), dtype=dtype)
        self.held: slice | None = None

    def each(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """All chunks; the last one stays in the buffer."""
        for chunk in self.chunks:
            yield chunk, self._made(chunk, hidden, weight)
            self.held = chunk

    def each_from_last(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """All chunks from the last to the first; the one in the buffer is not made again."""
        for chunk in reversed(self.chunks):
            held, self.held = self.held == chunk, None
            yield chunk, self.buffer[: chunk.stop - chunk.start] if held else self._made(chunk, hidden, weight)

    def _made(self, chunk: slice, hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden[chunk].to(self.buffer.dtype)
        out = self.buffer[: len(rows)]
        for columns, part in _widened(weight, self.buffer.dtype):
            torch.mm(rows, part.t(), out=out[:, columns])
        return out


def _blocks(products: Tensor, bias: Tensor | None, shape: _Shape) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of a chunk as finished logits in the working precision, in a buffer shared by all blocks."""
    elements = _CPU_BLOCK if products.device.type == "cpu" else _GPU_BLOCK
    size = max(elements // products.shape[1], 1)
    dtype = _working_dtype(products)
    shared = products.new_empty(min(size, len(products)), products.shape[1], dtype=dtype)
    divisor = shape.softcap or shape.temperature
    for start in range(0, len(products), size):
        rows = slice(start, min(start + size, len(products)))
        block = shared[: rows.stop - rows.start].copy_(products[rows])
        if bias is None:
            _scale(block, shape.scale / divisor)
        else:
            _scale(_scale(block, shape.scale).add_(bias), 1.0 / divisor)
        if shape.softcap:
            block.tanh_().mul_(shape.softcap / shape.temperature)
        yield rows, block


def _scale(block: Tensor, factor: float) -> Tensor:
    return block if factor == 1.0 else block.mul_(factor)


def _store(grad_logits: Tensor, rows: slice, block: Tensor, softcap_slope: Tensor | None) -> None:
    """Put a block's gradient, with the softcap's part, where the product with the weight will look for it."""
    if softcap_slope is not None:
        block.mul_(softcap_slope)
    grad_logits[rows] = block


def _into_hidden(grad_logits: Tensor, weight: Tensor) -> Tensor:
    """grad_logits @ weight, in the working precision where the weight had to be widened."""
    out = grad_logits.new_zeros(len(grad_logits), weight.shape[1])
    for columns, part in _widened(weight, grad_logits.dtype):
        out.addmm_(grad_logits[:, columns], part)
    return out


def _softcap_slope(block: Tensor, shape: _Shape) -> Tensor | None:
    """1 - tanh^2, the derivative of the softcap, from logits that are already tempered."""
    if not shape.softcap:
        return None
    return block.mul(shape.temperature / shape.softcap).square_().neg_().add_(1.0)


def _widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in `dtype`: itself where it has it already, else a few rows at a time."""
    step = len(weight) if weight.dtype == dtype else _WIDENED_ROWS
    for start in range(0, len(weight), step):
        columns = slice(start, min(start + step, len(weight)))
        yield columns, weight[columns].to(dtype)


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: logits are divided by it; it must be above 0; try 1.0")
    return logits.to(_working_dtype(logits)) / temperature


def _check_inputs(hidden: Tensor, weight: Tensor, temperature: float, softcap: float, chunk_tokens: int) -> None:
    if hidden.dtype != weight.dtype and weight.requires_grad:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight is {weight.dtype}: trained, they must agree; try weight.to(hidden.dtype)"
        )
    if temperature <= 0 or softcap < 0 or chunk_tokens < 1:
        raise ValueError(
            f"temperature = {temperature}, softcap = {softcap}, chunk_tokens = {chunk_tokens}: "
            "allowed are temperature > 0, softcap >= 0 (0: none) and chunk_tokens >= 1; try 1.0, 0.0 and 1024"
        )

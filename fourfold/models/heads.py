"""What stands on top of a branch: vocabulary logits, or one number a token or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from fourfold.algorithms.log_probs import CHUNK_TOKENS, Entropy, fused_full_kl, fused_log_probs
from fourfold.algorithms.products import product_dtype
from fourfold.memory.budget import Budget
from fourfold.models.products import linear_few_rows, linear_in_pieces, linear_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LanguageHead(nn.Module):
    """logits = softcap(hidden @ weight^T + bias); the weight may be the embedding's own tensor."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, softcap: float, budget: Budget | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.softcap = softcap
        self.budget = budget or Budget()
        # A product in pieces need not be bit-equal to one over the whole vocabulary, so all roles take the same way: it
        # is theirs where the head that they share is held in fewer bytes than they compute in.
        self.widened_in_pieces = False
        self.packed: Tensor | None = None  # while a rollout is drawn: a copy of the weight (models/packed.py)

    @classmethod
    def of(cls, model: PreTrainedModel, budget: Budget | None = None) -> LanguageHead:
        """The head of a transformers causal LM, sharing its tensors."""
        linear: Any = model.get_output_embeddings()
        return cls(linear.weight, linear.bias, getattr(model.config, "final_logit_softcapping", None) or 0.0, budget)

    def logits(self, hidden: Float[Tensor, "rows hidden"], compute_dtype: torch.dtype) -> Float32[Tensor, "rows vocab"]:
        """Float32 logits of a few positions (sampling); training uses `log_probs`."""
        bias = None if self.bias is None else self.bias.to(compute_dtype)
        if self.packed is not None:
            out = linear_packed(hidden.to(compute_dtype), self.packed, bias).float()
        elif self.widened_in_pieces or product_dtype(hidden.device.type, compute_dtype) != compute_dtype:
            out = linear_in_pieces(hidden.to(compute_dtype), self.weight, bias).float()
        else:
            out = linear_few_rows(hidden.to(compute_dtype), self.weight.to(compute_dtype), bias).float()
        return self.softcap * torch.tanh(out / self.softcap) if self.softcap else out

    def _weight(self, compute_dtype: torch.dtype) -> Tensor:
        """The weight for products in `compute_dtype`, or as it is held where those widen it piece by piece."""
        return self.weight if self.widened_in_pieces else self.weight.to(compute_dtype)

    def _check_room(self, tokens: int, compute_dtype: torch.dtype) -> None:
        """OverBudget where the chunk of logits has no room that a pass over so many tokens makes."""
        self.budget.check(min(tokens, CHUNK_TOKENS) * len(self.weight) * compute_dtype.itemsize)

    def log_probs(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        labels: Int64[Tensor, "tokens"],
        temperature: float,
        compute_dtype: torch.dtype,
        *,
        entropy: Entropy,
    ) -> tuple[Float32[Tensor, "tokens"], Float32[Tensor, "tokens"]]:
        """Log-probs of `labels` and entropies, in chunks of tokens; the matrix product runs in `compute_dtype`."""
        self._check_room(len(hidden), compute_dtype)
        return fused_log_probs(
            hidden.to(compute_dtype),
            self._weight(compute_dtype),
            labels,
            bias=None if self.bias is None else self.bias.to(compute_dtype),
            temperature=temperature,
            softcap=self.softcap,
            entropy=entropy,
        )

    def full_kl(
        self,
        hidden: Tensor,
        other: LanguageHead,
        other_hidden: Tensor,
        temperature: float,
        compute_dtypes: tuple[torch.dtype, torch.dtype],
    ) -> Float32[Tensor, "tokens"]:
        """Exact KL(self, other) of every token over the vocabulary, without gradient; each in its own type."""
        own, others = compute_dtypes
        self._check_room(len(hidden), own)
        return fused_full_kl(
            hidden.to(own),
            other_hidden.to(others),
            self._weight(own),
            other._weight(others),
            bias_p=self.bias,
            bias_q=other.bias,
            temperature=temperature,
            softcap=self.softcap,
        )


class ScalarHead(nn.Module):
    """value = scale * (hidden . weight + bias) + shift in float32.

    `scale` and `shift` standardise a reward model's score; they are not trained. A new head has zero weight.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))
        self.register_buffer("shift", torch.zeros((), dtype=torch.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is said of one hidden state."""
        return ()

    def forward(self, hidden: Float[Tensor, "*any hidden"]) -> Float32[Tensor, "*any"]:
        """One float32 number for every hidden state."""
        return self.scale * self.linear(hidden.float()).squeeze(-1) + self.shift


class VectorHead(nn.Module):
    """values = scale * (weight hidden + bias) + shift in float32: a number for each dimension, one linear map for all.

    Each dimension has its `scale` and `shift`, which are not trained. `loss_weights` are what its loss counted last
    (fourfold.algorithms.balance): where they are measured, the next mini-batch begins with them, also after a resume.
    A new head has zero weights.
    """

    scale: Tensor
    shift: Tensor
    loss_weights: Tensor

    def __init__(self, hidden_size: int, dimensions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, dimensions, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        for name, tensor in (("scale", torch.ones), ("shift", torch.zeros), ("loss_weights", torch.ones)):
            self.register_buffer(name, tensor(dimensions, dtype=torch.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is said of one hidden state."""
        return (self.linear.out_features,)

    def forward(self, hidden: Float[Tensor, "*any hidden"]) -> Float32[Tensor, "*any dimensions"]:
        """A float32 number for each dimension of every hidden state."""
        return self.scale * self.raw(hidden.float()) + self.shift

    def raw(self, hidden: Float32[Tensor, "*any hidden"]) -> Float32[Tensor, "*any dimensions"]:
        """The same before scale and shift."""
        return self.linear(hidden)

    @torch.no_grad()
    def start_from(self, head: ScalarHead, dimension: int) -> None:
        """Let a dimension say what a scalar head says."""
        self.linear.weight[dimension], self.linear.bias[dimension] = head.linear.weight[0], head.linear.bias[0]
        self.scale[dimension], self.shift[dimension] = head.scale, head.shift


class MultiHead(VectorHead):
    """A head of its own for each dimension on the shared body: beside the linear map a layer of `width` units.

    raw_k = weight_k . hidden + bias_k + outer_k . gelu(inner_k hidden). `outer` is 0 at the start, so that a new head
    says what a `VectorHead` says; `inner` is drawn with variance 1 / hidden by a generator of its own.
    """

    def __init__(self, hidden_size: int, dimensions: int, width: int, seed: int) -> None:
        super().__init__(hidden_size, dimensions)
        drawn = torch.randn(dimensions * width, hidden_size, generator=torch.Generator().manual_seed(seed))
        self.inner = nn.Parameter(drawn / hidden_size**0.5)
        self.outer = nn.Parameter(torch.zeros(dimensions, width))

    def raw(self, hidden: Float32[Tensor, "*any hidden"]) -> Float32[Tensor, "*any dimensions"]:
        """The linear map, and what the layer of each dimension adds to it."""
        units = nn.functional.gelu(nn.functional.linear(hidden, self.inner)).unflatten(-1, self.outer.shape)
        return self.linear(hidden) + (units * self.outer).sum(dim=-1)


AnyNumberHead = ScalarHead | VectorHead

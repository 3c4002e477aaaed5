"""Weights in the layout that oneDNN multiplies by, for as long as a rollout is drawn.

A product of few rows is little more than reading its weight, and torch's has oneDNN put the weight into a layout of its
own every time: 16 rows, 576 inputs and 1,536 outputs in bfloat16 take 208 us on two cores, 118 with a weight that is
packed already, and a language head of 49,152 tokens 8.0 and 4.0 ms. Matrices that read the same rows are joined. What
comes out is the same, bit for bit.

Layers' weights are moved, not copied: while a layer is packed its modules hold none, and `restore` puts them back. The
head is copied, because the embedding may be the same tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fourfold.memory.offload import absent
from fourfold.models.heads import LanguageHead
from fourfold.models.products import FewRowsLinear, is_packable, linear_packed, packed
from fourfold.models.roles import Policy
from fourfold.models.slot_cache import SlotPass
from fourfold.models.slot_pass import LIKE_LLAMA, LlamaPass, pass_agrees
from fourfold.models.split import Part


class PackedLinear:
    """Linear layers that read the same rows, as one product; their modules hold no weights until `restore`."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        weights = [layer.weight.detach() for layer in layers]
        self.dtype = weights[0].dtype
        self._weight: Tensor | None = packed(_joined(weights))
        biased = any(layer.bias is not None for layer in layers)
        self._bias = torch.cat([_bias_of(layer) for layer in layers]).to(self.dtype) if biased else None
        for layer in layers:
            layer.weight.data = absent(layer.weight)

    def __call__(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """The outputs of all layers side by side."""
        assert self._weight is not None, "the weights are back in their modules"
        return linear_packed(x.to(self.dtype), self._weight, self._bias)

    def restore(self) -> None:
        """Give the modules their weights back."""
        assert self._weight is not None
        pieces, self._weight = self._weight.to_dense().split(self._sizes), None  # one layer's at a time is there twice
        for layer, piece in zip(self._layers, pieces, strict=True):
            layer.weight.data = piece  # one below the other in one piece of memory: to be joined again without a copy


class PackedLayer:
    """The products of a decoder layer like Llama's with packed weights; `pack` makes them."""

    def __init__(self, layer: nn.Module, pack: Callable[..., PackedLinear]) -> None:
        q, k, v, o, gate, up, down = linear_layers(layer)
        self._values = v.out_features
        self._act: Any = layer.get_submodule("mlp").act_fn
        self._qkv, self._o, self._gate_up, self._down = pack(q, k, v), pack(o), pack(gate, up), pack(down)

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of all heads and the keys after them [..., (heads + key heads) x size], and values."""
        out = self._qkv(x)
        return out[..., : -self._values], out[..., -self._values :]

    def attention_output(self, x: Tensor) -> Tensor:
        """[..., heads x size] to [..., hidden]."""
        return self._o(x)

    def mlp(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._act(gate) * up)


@contextlib.contextmanager
def passes_for_decoding(
    policy: Policy, trunk: Part | None, agrees: Callable[[Part], bool] = pass_agrees
) -> Iterator[Callable[[Part], SlotPass | None]]:
    """Within, what can be is packed for drawing from a policy above a trunk; gives the fast pass of each part, if any.

    `agrees` says whether a part has one.
    """
    found: dict[Part, SlotPass] = {}
    with contextlib.ExitStack() as packing:
        packing.enter_context(packed_head(policy.head, policy.branch.compute_dtype))
        for part in (trunk, policy.branch):
            if part is not None and agrees(part):
                found[part] = packing.enter_context(packed_layers(part)) if can_be_packed(part) else LlamaPass(part)
        yield found.get


@contextlib.contextmanager
def packed_layers(part: Part) -> Iterator[LlamaPass]:
    """Within, a part that `can_be_packed` holds the weights of its layers for this pass alone."""
    with contextlib.ExitStack() as restoring:

        def pack(*linears: nn.Linear) -> PackedLinear:
            product = PackedLinear(*linears)
            restoring.callback(product.restore)
            return product

        yield LlamaPass(part, [PackedLayer(layer, pack) for layer in part.layers])


@contextlib.contextmanager
def packed_head(head: LanguageHead, compute_dtype: torch.dtype) -> Iterator[None]:
    """Within, a head that can be gives logits by a packed copy of its weight."""
    if is_packable(head.weight, compute_dtype) and not head.widened_in_pieces:
        head.packed = packed(head.weight.detach())
    try:
        yield
    finally:
        head.packed = None


def can_be_packed(part: Part) -> bool:
    """Whether all weights of its layers may move: frozen, plain, on a CPU, of a type that it has instructions for."""
    if part.body.config.model_type not in LIKE_LLAMA:
        return False
    linears = [linear for layer in part.layers for linear in linear_layers(layer)]
    apart = len({id(linear.weight) for linear in linears}) == len(linears) > 0
    return apart and all(_is_plain(linear) and is_packable(linear.weight, part.compute_dtype) for linear in linears)


def linear_layers(layer: nn.Module) -> Sequence[Any]:
    """Of queries, keys, values and the attention's output, then gate, up and down."""
    names = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    return [layer.get_submodule(name) for name in names]


def _is_plain(linear: Any) -> bool:
    """Whether it is a linear layer and no more, which nothing watches."""
    if type(linear) not in (nn.Linear, FewRowsLinear) or linear._forward_hooks or linear._forward_pre_hooks:
        return False
    return linear._parameters.keys() <= {"weight", "bias"} and linear.weight.is_contiguous()


def _joined(weights: Sequence[Tensor]) -> Float[Tensor, "outputs inputs"]:
    """All rows below each other, as they lie in memory where they do so already."""
    first, rows = weights[0], sum(map(len, weights))
    at = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != at or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(weights))
        at += weight.numel() * weight.element_size()
    return first.as_strided((rows, first.shape[1]), first.stride())


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()

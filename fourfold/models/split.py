"""Cut a decoder into a trunk (lower layers) and branches (upper layers), and prove that the cut is right.

A `Part` is a model of the same transformers class with fewer layers, so masks, positions, caches and attention
kernels stay the library's own. A trunk takes token ids and has no final norm; a branch takes the trunk's activations
and has one. A whole model is a branch that starts at layer 0 and takes ids.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fourfold.algorithms.masking import position_ids
from fourfold.memory.offload import copy_with_absent
from fourfold.models.slot_cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """Where a transformers model class keeps its pieces."""

    body: str
    embedding: str
    layers: str
    norm: str
    attention: str = "self_attn"
    learned_positions: str = ""


_LLAMA = Layout(body="model", embedding="embed_tokens", layers="layers", norm="norm")
LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
    "gpt2": Layout(
        body="transformer", embedding="wte", layers="h", norm="ln_f", attention="attn", learned_positions="wpe"
    ),
    "gpt_neox": Layout(
        body="gpt_neox", embedding="embed_in", layers="layers", norm="final_layer_norm", attention="attention"
    ),
}


class _NoPositions(nn.Module):
    """Stands in for learned positions in a branch: the trunk has already added them."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


class Part(nn.Module):
    """Consecutive decoder layers that turn ids (or the activations below) into activations.

    Linear weights run in `compute_dtype`; parameters keep the type they are stored in, so float32 masters are
    trained through autocast, and frozen parts hold the compute type itself. A frozen part may be given another type to
    compute in than it was cut with. `first_layer` is where in the whole model it begins.
    """

    def __init__(
        self, body: PreTrainedModel, *, takes_ids: bool, compute_dtype: torch.dtype, first_layer: int = 0
    ) -> None:
        super().__init__()
        self.body = body
        self.takes_ids = takes_ids
        self.compute_dtype = compute_dtype
        self.first_layer = first_layer

    @property
    def num_layers(self) -> int:
        """Decoder layers in this part."""
        return self.body.config.num_hidden_layers

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, from the lowest on."""
        return list(getattr(self.body, layout_of_body(self.body).layers))

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention of each decoder layer."""
        return [getattr(layer, layout_of_body(self.body).attention) for layer in self.layers]

    @property
    def hidden_size(self) -> int:
        """Width of the activations."""
        return self.body.config.hidden_size

    def forward(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        positions: Tensor | None = None,
        cache: SlotCache | None = None,
    ) -> Tensor:
        """Activations [batch, time, hidden] for ids [batch, time] or activations [batch, time, hidden].

        `attention_mask` is bool [batch, time]; `positions` default to those of the real tokens of each row. Above a
        `cache` both are what its places say, and no mask is given.
        """
        # A trunk below may compute in another type.
        inputs = inputs if self.takes_ids else inputs.to(self.compute_dtype)
        half = self.compute_dtype != torch.float32
        with torch.autocast(inputs.device.type, dtype=self.compute_dtype, enabled=half):
            if cache is not None:
                return self._above(inputs, cache) if cache.slot_pass is None else cache.slot_pass(inputs, cache)
            assert attention_mask is not None
            if positions is None:
                positions = position_ids(attention_mask)
            return self._body(inputs, attention_mask.long(), positions, None)

    def _above(self, inputs: Tensor, cache: SlotCache) -> Tensor:
        """A pass over tokens that look at those in a cache, under masks that transformers takes as they are."""
        config, places = self.body.config, cache.places
        window, kinds = getattr(config, "sliding_window", None) or 0, set(getattr(config, "layer_types", None) or ())
        mask: Any = places.unseen(self.compute_dtype, 0 if kinds else window)
        if "sliding_attention" in kinds:
            mask = {"full_attention": mask, "sliding_attention": places.unseen(self.compute_dtype, window)}
        with _kernel_with_masks(self):
            return self._body(inputs, mask, places.positions, cache)

    def _body(self, inputs: Tensor, mask: Any, positions: Tensor, cache: SlotCache | None) -> Tensor:
        source = {"input_ids": inputs} if self.takes_ids else {"inputs_embeds": inputs}
        kept: Any = cache  # all that attention layers ask of it is `update`
        out = self.body(**source, attention_mask=mask, position_ids=positions, cache=kept, use_cache=cache is not None)
        return out.last_hidden_state


@contextlib.contextmanager
def _kernel_with_masks(part: Part) -> Iterator[None]:
    """Within, a part whose kernel knows no masks of rows with places of their own (flash, flex) uses torch's."""
    configs: list[Any] = [part.body.config, *(attention.config for attention in part.attentions)]
    before = [config._attn_implementation for config in configs]
    for config, kernel in zip(configs, before, strict=True):
        if kernel not in ("eager", "sdpa"):
            config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for config, kernel in zip(configs, before, strict=True):
            if config._attn_implementation != kernel:
                config._attn_implementation = kernel


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout of a causal LM, or a ValueError that names the architecture."""
    return layout_of_body(model)


def layout_of_body(body: PreTrainedModel) -> Layout:
    """The same for the decoder inside it."""
    kind = body.config.model_type
    if kind not in LAYOUTS:
        raise ValueError(
            f"architecture {kind!r} ({type(body).__name__}) is not known; allowed: {', '.join(sorted(LAYOUTS))}; "
            "try one of these, or add its layout to fourfold/models/split.py"
        )
    return LAYOUTS[kind]


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0, also those that attention reads from a number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def with_layers(config: Any, start: int, stop: int) -> Any:
    """A copy of a model's config for a model of the layers [start, stop) alone."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = stop - start
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[start:stop]
    return config


def keep_lowest(part: Part, count: int) -> None:
    """Leave a part its lowest `count` layers; the norm that stood above all then stands above these."""
    body = part.body
    body.config = with_layers(body.config, 0, count)
    setattr(body, layout_of_body(body).layers, nn.ModuleList(part.layers[:count]))


def cut(model: PreTrainedModel, start: int, stop: int, *, compute_dtype: torch.dtype, leave_norm: bool = False) -> Part:
    """The layers [start, stop) of a causal LM; with the embedding when start is 0, with the norm when stop is the end.

    `leave_norm` is for a trunk of all layers: the norm is the branches'.

    A part from layer 0 shares its tensors with `model`; a part above it gets tensors of its own. Above the last layer
    (start = stop = the end) there is the norm alone.
    """
    layout = layout_of(model)
    whole = getattr(model, layout.body)
    total = len(getattr(whole, layout.layers))
    if not (0 <= start < stop <= total or start == stop == total):
        raise ValueError(
            f"layers {start} to {stop} of a model with {total}: allowed are 0 <= start < stop <= {total}, and "
            f"{total} to {total} for the norm alone"
        )
    config = with_layers(whole.config, start, stop)
    with torch.device("meta"):
        body = type(whole)(config)
    take = (lambda module: module) if start == 0 else copy_with_absent
    layers = [take(layer) for layer in getattr(whole, layout.layers)[start:stop]]
    for layer in layers:
        _renumber(layer, start)
    pieces = {
        layout.layers: nn.ModuleList(layers),
        layout.norm: nn.Identity() if leave_norm or stop < total else take(getattr(whole, layout.norm)),
        layout.embedding: getattr(whole, layout.embedding) if start == 0 else nn.Identity(),
    }
    if layout.learned_positions:
        pieces[layout.learned_positions] = getattr(whole, layout.learned_positions) if start == 0 else _NoPositions()
    for name, child in whole.named_children():
        setattr(body, name, pieces[name] if name in pieces else copy.deepcopy(child))
    disable_dropout(body)
    part = Part(body, takes_ids=start == 0, compute_dtype=compute_dtype, first_layer=start)
    for name in (layout.embedding, layout.learned_positions) if start == 0 else ():
        if name:
            # Bound to the part: a copy of it that computes in another type takes the hook along.
            pieces[name].register_forward_hook(partial(_cast_output, part))
    return part


def cut_whole(model: PreTrainedModel, compute_dtype: torch.dtype) -> Part:
    """All layers of a causal LM, from its ids to its final norm."""
    layout = layout_of(model)
    return cut(model, 0, len(getattr(getattr(model, layout.body), layout.layers)), compute_dtype=compute_dtype)


def _cast_output(part: Part, module: nn.Embedding, args: tuple, output: Tensor) -> Tensor:
    """Embedding look-ups are not autocast: without this, float32 masters and a frozen copy would differ below."""
    dtype, scale, weight = part.compute_dtype, getattr(module, "embed_scale", None), module.weight
    narrow = weight.requires_grad and weight.dtype != torch.float32 and torch.is_grad_enabled()
    if not narrow and (scale is None or output.dtype == dtype):
        return output.to(dtype)
    if narrow:
        weight.grad_dtype = torch.float32
        rows = _WideGradient.apply(args[0], weight, module.padding_idx)
    else:
        rows = nn.functional.embedding(args[0], weight, module.padding_idx)
    # Gemma multiplies the look-up by a scale in the type of its weights: round first, as a frozen copy does.
    return rows.to(dtype) if scale is None else rows.to(dtype) * scale.to(dtype)


class _WideGradient(torch.autograd.Function):
    """A look-up in narrow weights whose gradient is added up in float32: a token that comes often has many addends."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = len(weight), -1 if padding_idx is None else padding_idx
        return nn.functional.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        [gradient] = gradients
        summed = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.rows, ctx.padding_idx, False)
        return None, summed, None


def _renumber(layer: nn.Module, start: int) -> None:
    """Count a layer from the part's own first one, because that is how its cache is indexed."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= start  # pyright: ignore[reportOperatorIssue]


@torch.no_grad()
def verify_split(model: PreTrainedModel, trunk: Part, branch: Part, *, tolerance: float) -> float:
    """Largest difference between trunk + branch and the whole model on a padded probe; ValueError beyond `tolerance`.

    The difference is relative to the largest activation of the whole model.
    """
    gap = _gap(model, branch, lambda ids, mask: branch(trunk(ids, mask), mask))
    if not gap <= tolerance:
        raise ValueError(
            f"architecture {model.config.model_type!r} cannot be split after layer {trunk.num_layers}: trunk and "
            f'branch differ from the whole model by {gap:.2e} (allowed {tolerance:.0e}); try sharing.mode = "none"'
        )
    return gap


@torch.no_grad()
def verify_whole(model: PreTrainedModel, branch: Part, *, tolerance: float) -> float:
    """As `verify_split`, for a branch that starts at layer 0 and so is the whole model."""
    gap = _gap(model, branch, branch)
    if not gap <= tolerance:
        raise ValueError(
            f"architecture {model.config.model_type!r}: its layers, put together again, differ from the whole model by "
            f"{gap:.2e} (allowed {tolerance:.0e}); its weights are not finite, or its layout in "
            "fourfold/models/split.py is wrong; try another model"
        )
    return gap


def _gap(model: PreTrainedModel, branch: Part, parts: Callable[[Tensor, Tensor], Tensor]) -> float:
    whole, device = getattr(model, layout_of(model).body), next(model.parameters()).device
    ids = (torch.arange(3 * 8, device=device).reshape(3, 8) * 37 + 11) % min(model.config.vocab_size, 1000)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = False
    training = whole.training
    whole.eval()
    # The embedding is shared with the parts, which makes it give the compute type: the layers must take that too.
    with torch.autocast(device.type, dtype=branch.compute_dtype, enabled=branch.compute_dtype != torch.float32):
        out = whole(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
    whole.train(training)
    truth = out.last_hidden_state[mask].float()
    return float((parts(ids, mask)[mask].float() - truth).abs().max() / truth.abs().max())

"""Structured pruning of a decoder: whole layers, and neurons of the MLPs, by what they do to texts.

Layers go by block influence, 1 - cosine of what goes into a layer and what comes out of it (Men et al. 2024, "ShortGPT:
Layers in Large Language Models are More Redundant Than You Expect", equation 1). Neurons go by how much they add to the
stream, the root mean square of their activation times the length of their column of the output matrix (as Muralidharan
et al. 2024, "Compact Language Models via Pruning and Knowledge Distillation", rank them by activations). What is left
is a model of the same class with smaller numbers in its config, which any library loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from fourfold.algorithms.masking import position_ids
from fourfold.models.split import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Ids and which of them are real, [batch, time] each.
Texts = Iterable[tuple[Int64[Tensor, "batch time"], Bool[Tensor, "batch time"]]]
# The three matrices of an MLP that multiplies a gate with what goes up.
GATED = ("gate_proj", "up_proj", "down_proj")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model, from the lowest on."""
    layout = layout_of(model)
    return getattr(getattr(model, layout.body), layout.layers)


@torch.no_grad()
def block_influence(model: PreTrainedModel, texts: Texts) -> list[float]:
    """1 - the mean cosine over tokens between a layer's input and its output, for each layer."""
    layers = decoder_layers(model)
    sums, tokens = torch.zeros(len(layers), dtype=torch.float64), 0
    mask = torch.zeros(0)

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
            before = args[0] if args else named["hidden_states"]
            after = output if isinstance(output, Tensor) else output[0]
            cosine = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            sums[index] += float(cosine[mask].double().sum())

        return hook

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(layers):
            handle = layer.register_forward_hook(watch(index), with_kwargs=True)
            hooks.callback(handle.remove)
        for ids, real in texts:
            mask = real
            tokens += int(real.sum())
            _pass(model, ids, real)
    return (1.0 - sums / max(tokens, 1)).tolist()


def most_influential(influence: Sequence[float], count: int) -> list[int]:
    """The `count` layers whose influence is largest, in their order; of equal ones the lower."""
    if not 1 <= count <= len(influence):
        raise ValueError(f"{count} of {len(influence)} layers: allowed are 1 to {len(influence)}")
    ranked = sorted(range(len(influence)), key=lambda layer: (-influence[layer], layer))
    return sorted(ranked[:count])


def require_pruned(layers: int, width: int, parts: Sequence[nn.Module], config: Any) -> None:
    """ValueError where so many layers, or neurons of every MLP, cannot be kept of these `parts`; 0 is not asked for.

    `parts` are a model's decoder layers, `config` is the library's. Nothing is read or changed.
    """
    if layers > len(parts):
        raise ValueError(f"--layers {layers}: the model has {len(parts)} layers; allowed: 1 to {len(parts)}")
    if width:
        for layer in parts:
            _gated_mlp(layer, config)
        if width > config.intermediate_size:
            raise ValueError(_too_wide(width, config.intermediate_size))


def _too_wide(width: int, whole: int) -> str:
    return f"--mlp {width}: the model's MLPs have {whole} neurons; allowed: 1 to {whole}"


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Leave a model these of its layers, in this order; its config says how many there are."""
    layout = layout_of(model)
    body: Any = getattr(model, layout.body)
    layers = [getattr(body, layout.layers)[index] for index in kept]
    for place, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place  # pyright: ignore[reportAttributeAccessIssue]
    setattr(body, layout.layers, nn.ModuleList(layers))
    for config in {id(each.config): each.config for each in (model, body)}.values():
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[index] for index in kept]


@torch.no_grad()
def narrow_mlps(model: PreTrainedModel, width: int, texts: Texts) -> None:
    """Leave every layer's MLP its `width` neurons that add most to the stream; ValueError where it has no such MLP."""
    mlps = [_gated_mlp(layer, model.config) for layer in decoder_layers(model)]
    whole = mlps[0].down_proj.weight.shape[1]
    if not 1 <= width <= whole:
        raise ValueError(_too_wide(width, whole))
    sizes = [torch.zeros(whole, dtype=torch.float64) for _ in mlps]

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            sizes[index].add_(args[0][mask].double().square().sum(dim=0))

        return hook

    mask = torch.zeros(0)
    with contextlib.ExitStack() as hooks:
        for index, mlp in enumerate(mlps):
            hooks.callback(mlp.down_proj.register_forward_pre_hook(watch(index)).remove)
        for ids, real in texts:
            mask = real
            _pass(model, ids, real)
    for mlp, size in zip(mlps, sizes, strict=True):
        added = size.sqrt() * mlp.down_proj.weight.double().norm(dim=0)
        kept = added.topk(width).indices.sort().values
        for name in GATED:
            _narrow(getattr(mlp, name), kept, inputs=name == "down_proj")
    body: Any = getattr(model, layout_of(model).body)
    for config in {id(each.config): each.config for each in (model, body)}.values():
        config.intermediate_size = width


def _gated_mlp(layer: nn.Module, config: Any) -> Any:
    mlp = getattr(layer, "mlp", None)
    if mlp is None or not all(isinstance(getattr(mlp, name, None), nn.Module) for name in GATED):
        raise ValueError(
            f"--mlp: the MLPs of {config.model_type!r} are not of the kind with {', '.join(GATED)}, which is the "
            "one that can be narrowed; leave --mlp out, and drop layers only"
        )
    return mlp


def _narrow(linear: nn.Linear, kept: Tensor, *, inputs: bool) -> None:
    weight = linear.weight[:, kept] if inputs else linear.weight[kept]
    linear.weight = nn.Parameter(weight.clone(), requires_grad=linear.weight.requires_grad)
    if linear.bias is not None and not inputs:
        linear.bias = nn.Parameter(linear.bias[kept].clone(), requires_grad=linear.bias.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape


def _pass(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    body: Any = getattr(model, layout_of(model).body)
    body(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)


def size_of(model: PreTrainedModel) -> int:
    """Parameters of a model below its head."""
    body: Any = getattr(model, layout_of(model).body)
    return sum(p.numel() for p in body.parameters())


def layers_that_fit(model: PreTrainedModel, parameters: int) -> int:
    """How many of a model's layers leave it at most so many parameters; 0 where one is too many."""
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model))
    rest = size_of(model) - sum(p.numel() for layer in decoder_layers(model) for p in layer.parameters())
    return min(max((parameters - rest) // layer, 0), len(decoder_layers(model)))


def batches(texts: Sequence[Sequence[int]], rows: int, pad_id: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts as ids and masks, padded on the right, `rows` at a time."""
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]
        width = max(len(text) for text in some)
        ids = torch.tensor([[*text, *[pad_id] * (width - len(text))] for text in some])
        yield ids, torch.arange(width) < torch.tensor([len(text) for text in some])[:, None]

"""A role of a run as one whole model of transformers, in float32: to export it, or to have another engine run it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fourfold.config.schema import RunConfig
from fourfold.memory.precision import dtype_of
from fourfold.memory.quantization import dequantize, kind_of
from fourfold.models.adapters import is_adapted, merge_adapters
from fourfold.models.loading import Base, load_causal_lm
from fourfold.models.own_critic import VALUE_SHIFT
from fourfold.models.roles import Policy, Scorer
from fourfold.models.split import Part, layout_of
from fourfold.planner.quantization import QUANTIZED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def whole_model(config: RunConfig, base: Base, role: Policy | Scorer) -> tuple[PreTrainedModel, Any]:
    """The run's model with the role's own weights in their places, and the tokenizer; adapters are merged.

    Of a scorer it has all but the number head.
    """
    # Shared weights are read in the type that the run held them in, which float32 holds exactly; trained are float32.
    held, compute = config.precision.frozen, role.branch.compute_dtype
    floats = compute if held in QUANTIZED else dtype_of(held, compute)
    read_in = floats if base.shares_head else torch.float32
    model, tokenizer = load_causal_lm(config.model.path, Path(config.model.cache), read_in)
    model = model.float()
    _copy_branch(role, model)
    _copy_quantized(base.trunk, model)
    return model, tokenizer


def _copy_branch(role: Policy | Scorer, model: PreTrainedModel) -> None:
    """Put the role's own layers in their places of the whole model."""
    if is_adapted(role.branch):
        role = copy.deepcopy(role)  # with a base of its own, in float32: the sum is rounded once, at the very end
        merge_adapters(role.branch.float())
    layout = layout_of(model)
    whole, body = getattr(model, layout.body), role.branch.body
    layers, own = getattr(whole, layout.layers), getattr(body, layout.layers)
    for target, source in zip(layers[len(layers) - len(own) :], own, strict=True):
        _copy_layer(source, target)
    if role.trunk is not None:
        for target, source in zip(layers, role.trunk.layers, strict=False):  # those above are the branch's
            _copy_layer(source, target)
    names = [layout.norm]
    if role.branch.takes_ids:
        names += [name for name in (layout.embedding, layout.learned_positions) if name]
        if isinstance(role, Policy):
            linear: Any = model.get_output_embeddings()
            linear.weight.copy_(role.head.weight)
    for name in names:
        getattr(whole, name).load_state_dict(getattr(body, name).state_dict())


def _copy_quantized(trunk: Part | None, model: PreTrainedModel) -> None:
    """Of a quantised trunk, what the role was trained above."""
    if trunk is not None and kind_of(trunk):
        layers = getattr(getattr(model, layout_of(model).body), layout_of(model).layers)
        for source, target in zip(trunk.layers, layers, strict=False):
            _copy_layer(source, target)


def _copy_layer(source: nn.Module, target: nn.Module) -> None:
    """Put a decoder layer's numbers into another one: quantised ones are what their codes stand for."""
    if kind_of(source):
        source = copy.deepcopy(source)
        dequantize(source)
    state = source.state_dict()
    for name, module in source.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(target.get_submodule(name), nn.Linear):
            state[f"{name}.weight"] = module.weight.t()  # GPT-2's own layers keep [inputs, outputs]
    target.load_state_dict(state)


@torch.no_grad()
def classifier_of(model: PreTrainedModel, scorer: Scorer, pad_id: int) -> PreTrainedModel:
    """A sequence classifier with one label: its logit, and `value_shift` of its config, are the value."""
    from transformers import AutoModelForSequenceClassification

    head = scorer.head
    config: Any = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id, config.problem_type = 1, pad_id, "regression"
    setattr(config, VALUE_SHIFT, float(head.scale * head.linear.bias + head.shift))
    classifier: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    layout = layout_of(model)
    getattr(classifier, layout.body).load_state_dict(getattr(model, layout.body).state_dict())
    classifier.score.weight.copy_(head.scale * head.linear.weight)
    return classifier

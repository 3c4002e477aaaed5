"""One frozen base under four roles: every role has low-rank adapters of its own on the base's matrices.

The adapters are peft's (Hu et al. 2021, "LoRA": W x + alpha / r * B A x; with DoRA Liu et al. 2024; with rsLoRA's scale
alpha / sqrt(r) Kalajdzievski 2023). Each role holds its own modules over the same tensors of the base, so roles never
switch adapters, and the base is resident once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.schema import AdaptersSection
from fourfold.memory.quantization import dequantize, quiet_imports
from fourfold.models.split import Part, keep_lowest, layout_of_body

# What peft calls the tensors of its LoRA layers.
PREFIX = "lora_"


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return any(piece.startswith(PREFIX) for piece in name.split("."))


def is_adapted(part: nn.Module) -> bool:
    """Whether a part has adapters."""
    return any(is_adapter(name) for name, _ in part.named_parameters())


def adapter_parameters(part: nn.Module) -> list[nn.Parameter]:
    """The adapters' own tensors, in the order of their names' appearance."""
    return [p for name, p in part.named_parameters() if is_adapter(name)]


def add_adapters(part: Part, settings: AdaptersSection, *, seed: int) -> None:
    """Put fresh adapters (B = 0, so the part computes what it did) on the part's linear layers."""
    quiet_imports()  # peft imports torchao and bitsandbytes wherever they are installed
    from peft import LoraConfig, inject_adapter_in_model

    layers = nn.ModuleList(part.layers)
    targets = _targets(layers, settings.targets)
    alpha: Any = settings.alpha  # annotated as an integer there, and only ever divided
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,
            target_modules=targets,
            use_dora=settings.dora,
            use_rslora=settings.rslora,
            fan_in_fan_out=_stores_transposed(layers),
        )
        inject_adapter_in_model(config, part.body)
    for p in adapter_parameters(part):
        p.data = p.data.float()
        p.requires_grad_(False)


def _targets(layers: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """Names of the linear layers to adapt; ValueError where one is unknown."""
    known = sorted({name.rsplit(".", 1)[-1] for name, module in layers.named_modules() if _is_linear(module)})
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(
            f"adapters.targets: given {', '.join(unknown)}; this model's linear layers are {', '.join(known)}; "
            "leave it out to adapt them all"
        )
    return list(wanted) or known


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _stores_transposed(layers: nn.Module) -> bool:
    """GPT-2's Conv1D keeps [inputs, outputs]."""
    return any(type(module).__name__ == "Conv1D" for module in layers.modules())


def copy_part(part: Part, layers: int | None = None) -> Part:
    """A part with tensors of its own; of an adapted part only the adapters are its own, the base is the same.

    With `layers`, of the lowest so many of its layers, and the norm that stands above all.
    """
    upper = [] if layers is None else part.layers[layers:]
    memo: dict[int, Any] = {id(layer): layer for layer in upper}  # left out below: not worth a copy
    if is_adapted(part):
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if not is_adapter(name):
                memo[id(tensor)] = tensor
    copied = copy.deepcopy(part, memo)
    if layers is not None:
        keep_lowest(copied, layers)
    return copied


@torch.no_grad()
def merge_adapters(part: Part) -> None:
    """Add the adapters to the base's matrices and take them off; the part must own its base.

    The sum is formed in float32 if the part is: W + alpha / r * B A then differs from the adapted product by rounding.
    Of a quantised base W is what its codes stand for: the adapters were trained above these numbers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    dequantize(part)
    for name, module in list(part.named_modules()):
        if isinstance(module, BaseTunerLayer):
            merging: Any = module
            merging.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(part.get_submodule(parent), child, merging.get_base_layer())


def adapters_of(branch: Part) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, inputs] and B [outputs, rank] of every adapted matrix, by the name of its weight in the whole model."""
    from peft.tuners.lora import LoraLayer

    layout = layout_of_body(branch.body)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for number, layer in enumerate(branch.layers):
        for name, module in layer.named_modules():
            if isinstance(module, LoraLayer):
                [a], [b] = (list(part.values()) for part in (module.lora_A, module.lora_B))
                whole = f"{layout.body}.{layout.layers}.{branch.first_layer + number}.{name}.weight"
                found[whole] = (_weight(a), _weight(b))
    return found


def _weight(linear: nn.Module) -> Tensor:
    return linear.get_parameter("weight")

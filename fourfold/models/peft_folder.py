"""A LoRA adapter in peft's files: one that peft has saved as a stored policy of a run, and one of a run for others.

What peft's config says must be what the run's `[adapters]` say, and what it does beyond low-rank products on the base's
own weights is refused by name. Which layers are adapted, and at which rank, the tensors say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fourfold.config.schema import AdaptersSection
from fourfold.models.split import Part, layout_of_body
from fourfold.tensor_files import Source

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What peft calls the only adapter of a layer; in its files the name is left out.
ADAPTER = "default"
# Settings of peft that put something beside or into the base's weights, and what they are where they do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    # Others (PiSSA, OLoRA, LoftQ, CorDA) take something out of the base's weights when they begin.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),
}


def is_peft_folder(folder: Path) -> bool:
    """Whether peft has saved an adapter there."""
    return (folder / CONFIG).is_file()


def peft_record(folder: Path, *, model: str, adapters: str, layers: int) -> dict[str, Any]:
    """What a stored role of ours with this adapter would say of itself; ValueError where none could.

    `model`, `adapters` and `layers` are the run's own. A base of the same name elsewhere is the same model, and where
    the run adapts all linear layers, or upper ones only, the tensors' names decide.
    """
    given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if given.get("peft_type") != "LORA":
        raise ValueError(
            f"{str(folder)!r} holds a peft adapter of the type {given.get('peft_type')!r}; allowed: 'LORA'"
        )
    for name, plain in PLAIN.items():
        if given.get(name, plain[0]) not in plain:
            raise ValueError(
                f"{str(folder)!r}: {name} = {given[name]!r} in {CONFIG} does more than low-rank adapters do; allowed: "
                f"{', '.join(map(repr, plain))}; try merging the adapter into its model, and give that as model.path"
            )
    kinds = "+".join(kind for kind in ("dora", "rslora") if given.get(f"use_{kind}")) or "lora"
    targets = given.get("target_modules")
    named = ",".join(sorted(targets)) if isinstance(targets, list) else str(targets)
    wanted = "all" if adapters.endswith(" on all") else named
    base = str(given.get("base_model_name_or_path"))
    return {
        "kind": "policy",
        "model": model if _name(base) == _name(model) else base,
        "sharing": "adapters",
        "branch_layers": layers,
        "adapters": f"{kinds} rank {given['r']} alpha {given['lora_alpha']:g} on {wanted}",
        "schema": 1,
    }


def _name(model: str) -> str:
    """The last part of a path or hub id."""
    return model.rstrip("/").rpartition("/")[2]


def own_names(tensors: Mapping[str, Source], branch: Part) -> dict[str, Source]:
    """The tensors by the names that they have in a policy with this branch; others keep peft's."""
    layout = layout_of_body(branch.body)
    above = f"base_model.model.{layout.body}."
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(above)
        layers, _, rest = inner.partition(".")
        number, _, rest = rest.partition(".")
        if inner == name or layers != layout.layers or int(number) < branch.first_layer:
            found[name] = tensor
            continue
        module, _, last = rest.rpartition(".")
        rest = f"{module}.{ADAPTER}.{last}" if last == "weight" else f"{rest}.{ADAPTER}.weight"
        found[f"branch.body.{layers}.{int(number) - branch.first_layer}.{rest}"] = tensor
    return found


def write_peft_folder(
    folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], settings: AdaptersSection, model: str
) -> None:
    """Write A and B by the names of the weights that they adapt (`adapters_of`) as peft saves an adapter of `model`."""
    from peft import LoraConfig

    numbers = sorted({int(piece) for name in pairs for piece in name.split(".") if piece.isdigit()})
    targets = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in pairs})
    alpha: Any = settings.alpha  # annotated as an integer there
    LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        use_rslora=settings.rslora,
        target_modules=targets,
        layers_to_transform=numbers,
        base_model_name_or_path=model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight": tensor.detach()
        .float()
        .cpu()
        .contiguous()
        for name, pair in pairs.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / TENSORS, {"format": "pt"})

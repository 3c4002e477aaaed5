"""Decoder layers that stay in their safetensors until they are quantised: in floats, one is in memory at a time.

What it saves: while a model is loaded that is to be held in fewer bits, the floats of all its layers but one. What it
costs: reading the file again for each of the few passes that check the load. What it changes: nothing, the same numbers
are quantised. What it excludes: files in which a weight is not under the name and in the shape that the model gives it;
such models are loaded as a whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from fourfold.memory.budget import trim
from fourfold.memory.offload import absent
from fourfold.models.split import LAYOUTS, Layout, layout_of, with_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors names them
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # as transformers names them


class InFile(NamedTuple):
    """All decoder layers but the `upper` ones stay in their file, and compute on `device`."""

    device: torch.device
    upper: int


class Source(NamedTuple):
    """Where a parameter's numbers are."""

    file: str
    name: str


class StoredLayer:
    """A decoder layer whose numbers are in memory while it computes, and from `keep` on for good.

    Between passes NaN stands in for them. A deep copy of the layer is stored likewise.
    """

    def __init__(
        self, layer: nn.Module, sources: Mapping[str, Source], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layer = layer
        self._sources = dict(sources)
        for name, p in list(layer.named_parameters()):
            parent, _, last = name.rpartition(".")
            held = nn.Parameter(absent(p, dtype=dtype, device=device), requires_grad=False)
            setattr(layer.get_submodule(parent), last, held)
        self._hooks = (
            layer.register_forward_pre_hook(self._fetch),
            # Also when the layer raises: a failed pass must not leave its numbers behind.
            layer.register_forward_hook(self._leave, always_call=True),
        )
        layer.stored = self  # pyright: ignore[reportArgumentType]

    def _fetch(self, *_: Any) -> None:
        files: dict[str, list[tuple[nn.Parameter, str]]] = defaultdict(list)
        for name, p in self._layer.named_parameters():
            file, stored = self._sources[name]
            files[file].append((p, stored))
        for file, wanted in files.items():
            # Opened anew and copied: pages of a mapping count as resident as long as one tensor is left in it.
            with safe_open(file, framework="pt") as opened:
                for p, stored in wanted:
                    p.data = opened.get_tensor(stored).to(p.device, p.dtype, copy=True)

    def _leave(self, *_: Any) -> None:
        for p in self._layer.parameters():
            p.data = absent(p)

    def keep(self) -> None:
        """Bring the numbers into memory, where they stay from here on."""
        for hook in self._hooks:
            hook.remove()
        del self._layer.stored
        self._fetch()


def into_memory(layer: nn.Module) -> None:
    """Bring a layer's numbers into memory where they are still in their file."""
    stored: StoredLayer | None = getattr(layer, "stored", None)
    if stored is not None:
        stored.keep()
        trim()  # what quantising the layer below took for a moment


def stored_model(
    kind: Any, place: str, dtype: torch.dtype, in_file: InFile
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """A model of one of transformers' auto classes with layers in their file, and the report on what is missing.

    It is on the device of `in_file`. None where the files do not fit the model name by name.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    if config.model_type not in LAYOUTS or hasattr(config, "quantization_config"):
        return None
    with _silent_about_layers():
        model, report = kind.from_pretrained(
            place,
            config=with_layers(config, 0, 0),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model.config.num_hidden_layers = config.num_hidden_layers
    if getattr(config, "layer_types", None) is not None:
        model.config.layer_types = config.layer_types
    layout = layout_of(model)
    layers = _layers_without_numbers(model, layout)
    prefix = f"{layout.body}.{layout.layers}."
    sources = _sources(place, {prefix + name: p.shape for name, p in layers.named_parameters()}, layout.body)
    if sources is None:
        return None
    for number, layer in enumerate(layers):
        mine = {name: sources[f"{prefix}{number}.{name}"] for name, _ in layer.named_parameters()}
        stored = StoredLayer(layer, mine, dtype, in_file.device)
        if number >= len(layers) - in_file.upper:
            stored.keep()
    setattr(getattr(model, layout.body), layout.layers, layers)
    return model.to(in_file.device).eval(), report


def _layers_without_numbers(model: PreTrainedModel, layout: Layout) -> nn.ModuleList:
    """All layers that the config of a model without layers asks for; buffers are there, parameters are not."""
    from accelerate import init_empty_weights

    body: Any = getattr(model, layout.body)
    with init_empty_weights(include_buffers=False):
        return getattr(type(body)(body.config), layout.layers)


@contextlib.contextmanager
def _silent_about_layers() -> Iterator[None]:
    """Within, transformers does not report weights that a model of no layers has no use for."""

    def says_more(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return "LOAD REPORT" not in said or "MISSING" in said or "MISMATCH" in said

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _sources(place: str, shapes: Mapping[str, Iterable[int]], body: str) -> dict[str, Source] | None:
    """Where each of these parameters is; a file that was written by the body alone leaves its name out. None where one
    is not there in this shape, as floats."""
    there: dict[str, Source] = {}
    for file in weight_files(place):
        with safe_open(file, framework="pt") as opened:
            for stored in opened.keys():  # noqa: SIM118 - not a mapping
                piece = opened.get_slice(stored)
                name = stored if stored in shapes else f"{body}.{stored}"
                if name in shapes and piece.get_dtype() in FLOATS and piece.get_shape() == list(shapes[name]):
                    there[name] = Source(file, stored)
    return there if there.keys() == shapes.keys() else None


def weight_files(place: str) -> list[str]:
    """The safetensors of a folder, or those of a hub id that are on this machine."""
    if single := _file(place, SINGLE):
        return [single]
    index = _file(place, INDEX)
    parts = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"] if index else {}
    return [file for part in sorted(set(parts.values())) if (file := _file(place, part))]


def _file(place: str, name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    if Path(place).is_dir():
        return str(Path(place) / name) if (Path(place) / name).is_file() else None
    found = try_to_load_from_cache(place, name)
    return found if isinstance(found, str) else None

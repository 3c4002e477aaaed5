"""Optimizers and random generators as named tensors and plain JSON, and back, bit for bit: nothing is pickled."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from fourfold.tensor_files import Source, Unread

log = logging.getLogger(__name__)


def flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Source], dict[str, Any]]:
    """Split an optimizer's `state_dict()` into tensors, named 'state.<parameter>.<name>', and JSON."""
    tensors: dict[str, Source] = {}
    record = {
        "state": [[key, _flatten(entry, f"state.{key}", tensors)] for key, entry in state["state"].items()],
        "param_groups": _flatten(state["param_groups"], "group", tensors),
    }
    return tensors, record


def restore_optimizer(tensors: Mapping[str, Source], record: dict[str, Any]) -> dict[str, Any]:
    """The `state_dict` that `flatten_optimizer` took apart, every type as it was: for `load_state_dict`.

    For torch's own optimizers the tensors must be read; `States` of fourfold.memory.optimizers reads what is `Unread`.
    """
    return {
        "state": {key: _unflatten(entry, tensors) for key, entry in record["state"]},
        "param_groups": _unflatten(record["param_groups"], tensors),
    }


def _flatten(value: Any, name: str, tensors: dict[str, Source]) -> Any:
    """JSON in which a tensor stands as {"tensor": name} and a tuple as {"tuple": [...]}; a dict as {"dict": ...}."""
    if isinstance(value, Tensor | Unread):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": {key: _flatten(inner, f"{name}.{key}", tensors) for key, inner in value.items()}}
    if isinstance(value, list | tuple):
        items = [_flatten(inner, f"{name}.{index}", tensors) for index, inner in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(
        f"optimizer: {name} is a {type(value).__name__}; allowed: tensors, numbers, texts, lists, tuples, dicts"
    )


def _unflatten(value: Any, tensors: Mapping[str, Source]) -> Any:
    if isinstance(value, list):
        return [_unflatten(inner, tensors) for inner in value]
    if isinstance(value, dict):
        [(kind, inner)] = value.items()
        if kind == "tensor":
            if inner not in tensors:
                raise ValueError(f"optimizer: the checkpoint has no tensor {inner!r}; it holds {len(tensors)} others")
            return tensors[inner]
        if kind == "tuple":
            return tuple(_unflatten(item, tensors) for item in inner)
        return {key: _unflatten(item, tensors) for key, item in inner.items()}
    return value


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every global generator: torch (CPU and each GPU), Python's random, numpy."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    version, numbers, next_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors["python"] = torch.tensor(numbers, dtype=torch.int64)
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys).astype(numpy.int64))
    return tensors, {
        "python": [version, next_gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
    }


def restore_rng(tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Put every global generator back where `rng_state` found it."""
    torch.set_rng_state(tensors["torch"])
    saved = [tensors[f"cuda.{index}"] for index in range(sum(name.startswith("cuda.") for name in tensors))]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(saved) != here:
        log.warning(
            "random states: saved with %d GPUs, resumed with %d: what follows is not equal bit for bit",
            len(saved),
            here,
        )
    for index, state in enumerate(saved[:here]):
        torch.cuda.set_rng_state(state, index)
    version, next_gauss = record["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    kind, position, has_gauss, gauss = record["numpy"]
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state((kind, keys, position, has_gauss, gauss))

"""Models of transformers as they are stored: safetensors only, no remote code, every weight there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from fourfold.models.stored import InFile, stored_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pretrained(
    kind: Any, place: str, dtype: torch.dtype, *, given: str, allowed: str, instead: str, in_file: InFile | None = None
) -> tuple[PreTrainedModel, Any]:
    """A model of one of transformers' auto classes in `dtype`, and its tokenizer.

    Layers that are to stay `in_file` do so where that is possible. ValueError where the model cannot be read or lacks
    weights: `given` is the setting, `allowed` what may stand there, `instead` what to do where weights are missing.
    """
    import_models()
    from transformers import AutoTokenizer

    try:
        # Without use_safetensors a folder that holds pickled weights only would be unpickled; without a word on remote
        # code transformers would ask.
        with no_loading_bar():
            loaded = None if in_file is None else stored_model(kind, place, dtype, in_file)
            if loaded is None:
                loaded = kind.from_pretrained(
                    place, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
                )
        # The library's annotation leaves out the report.
        model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{given} cannot be loaded ({str(error).splitlines()[0]}); allowed: {allowed}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{given} lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]!r}: they "
            f"would be random; {instead}"
        )
    return model, tokenizer


def architectures_named(place: str, *, given: str, allowed: str) -> list[str]:
    """The classes that a model's config says it was saved as; none where it says nothing."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{given} cannot be loaded ({str(error).splitlines()[0]}); allowed: {allowed}") from error
    return list(getattr(config, "architectures", None) or [])


def import_models() -> None:
    """Import what every model of transformers is made of, without scipy.

    Losses of object detection, which come with it, import scipy.optimize where scipy is installed, and nothing else
    does: 0.3 to 0.4 s of every start (docs/log.md).
    """
    library: Any = importlib.import_module("transformers.utils")
    has_scipy = library.is_scipy_available
    library.is_scipy_available = lambda: False
    try:
        importlib.import_module("transformers.modeling_utils")
    finally:
        library.is_scipy_available = has_scipy


def without_weights(kind: Any, place: str, *, given: str, allowed: str) -> tuple[PreTrainedModel, Any]:
    """The shape of such a model, on the device "meta", and its tokenizer: the weights are not read."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False), tokenizer
    except (OSError, ValueError) as error:
        raise ValueError(f"{given} cannot be loaded ({str(error).splitlines()[0]}); allowed: {allowed}") from error


@contextlib.contextmanager
def no_loading_bar() -> Iterator[None]:
    """Within, transformers shows no bar of weights being put in place; downloads from the hub still show theirs."""
    from transformers.utils import logging as library

    def silent(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    previous = library.set_tqdm_hook(silent)
    try:
        yield
    finally:
        library.set_tqdm_hook(previous)

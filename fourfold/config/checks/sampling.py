"""Samplers with another distribution than the trained one: where they can stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fourfold.config.checks.service import problem_of_url

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig


def sampling(config: RunConfig) -> Iterator[str]:
    given = config.sampling
    if given.engine != "local":
        yield from _another_engine(config)
    if given.engine == "vllm":
        yield from _vllm(config)
    if given.engine == "local" and given.weights != "as_trained" and config.sharing.mode == "adapters":
        yield (
            f"sampling.weights: given {given.weights!r} beside sharing.mode = 'adapters', which holds one base for all "
            f"roles, the sampler too; leave it out and set precision.frozen = {given.weights!r}: adapters are then "
            "trained above what is drawn from"
        )


def _vllm(config: RunConfig) -> Iterator[str]:
    if problem := problem_of_url(config.sampling.url, "sampling"):
        yield (
            f"sampling.url: {problem}, but sampling.engine = 'vllm' needs the address of a vLLM server, such as "
            "'http://127.0.0.1:8000'"
        )
    path = config.model.path
    if path.endswith(".gguf"):
        yield (
            f"sampling.engine: given 'vllm' beside model.path = {path!r}, which vLLM would read into weights of "
            "its own rounding; write it as a Hugging Face folder first (from_pretrained with gguf_file, then "
            "save_pretrained), and give that to both"
        )


def _another_engine(config: RunConfig) -> Iterator[str]:
    engine = config.sampling.engine
    of = "vLLM" if engine == "vllm" else "llama.cpp"
    if config.sharing.mode != "adapters":
        yield (
            f"sampling.engine: given {engine!r} beside sharing.mode = {config.sharing.mode!r}, whose actor would have "
            "to be written and read as a whole for every rollout; set sharing.mode = 'adapters', or leave "
            "sampling.engine out"
        )
    if config.adapters.dora:
        yield (
            f"sampling.engine: given {engine!r} beside adapters.dora = true, which {of} does not compute; set "
            "adapters.dora = false, or leave sampling.engine out"
        )
    if config.sampling.overlap_scoring:
        yield (
            f"sampling.overlap_scoring: true beside sampling.engine = {engine!r}, whose responses have no activations "
            "before all are drawn; set it to false"
        )

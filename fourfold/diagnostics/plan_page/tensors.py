"""Tensors that one phase hands to the next (fourfold.batch), with their shapes and bytes in a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fourfold.planner.bill import Phase
from fourfold.planner.scene import Scene
from fourfold.planner.units import size

Dim = Literal["rollout", "prompt", "response", "prompt+response", "hidden", "parts", "*values"]
Dtype = Literal["int64", "bool", "float32", "bfloat16", "float16"]
BYTES: Mapping[Dtype, int] = {"int64": 8, "bool": 1, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, who makes it and in which phase; "" is what is worked out from the others' tensors.

    The dimension "*values" is there where the critic has several values for a token (`critic.heads`).
    """

    name: str
    dtype: Dtype
    dims: tuple[Dim, ...]
    maker: str
    phase: Phase

    @property
    def shape(self) -> str:
        """Its dimensions by name."""
        return f"[{', '.join(dim for dim in self.dims if dim != '*values')}]"

    def sizes(self, scene: Scene) -> tuple[int, ...]:
        """Its dimensions in numbers, of the whole rollout and all texts as long as the longest."""
        known = dimensions(scene)
        return tuple(known[dim] for dim in self.dims if dim in known)

    def numbers(self, scene: Scene) -> str:
        """Its dimensions in numbers, for people."""
        return f"[{', '.join(map(str, self.sizes(scene)))}]"

    def weight(self, scene: Scene) -> str:
        """Its type, and what it takes in words."""
        return f"{self.dtype}, {small(self.bytes(scene))}"

    def bytes(self, scene: Scene) -> int:
        """What it takes."""
        return BYTES[self.dtype] * math.prod(self.sizes(scene))


def small(count: int) -> str:
    """Bytes of a tensor, which are often few."""
    return size(count) if count >= 2**20 else f"{count / 2**10:,.3g} KiB" if count >= 2**10 else f"{count} B"


def dimensions(scene: Scene) -> dict[Dim, int]:
    """What the names of dimensions stand for."""
    prompt, response = scene.lengths.prompt, scene.lengths.response
    rows = scene.config.ppo.rollout_batch_size
    both = prompt + response
    known: dict[Dim, int] = {
        "rollout": rows, "prompt": prompt, "response": response, "prompt+response": both, "hidden": scene.base.hidden,
        "parts": len(scene.config.reward.dimensions),
    }  # fmt: skip
    values = len(scene.config.value_dimensions)
    return {**known, "*values": values} if values else known


_ROWS: tuple[Dim, ...] = ("rollout",)
_RESPONSE: tuple[Dim, ...] = ("rollout", "response")
_TEXT: tuple[Dim, ...] = ("rollout", "prompt+response")

# The fields of Rollout, ScoredRollout and Experience.
BATCH: tuple[Tensor, ...] = (
    Tensor("prompt_mask", "bool", ("rollout", "prompt"), "", "generate"),
    Tensor("response_mask", "bool", _RESPONSE, "actor", "generate"),
    Tensor("sequences", "int64", _TEXT, "actor", "generate"),
    Tensor("log_probs", "float32", _RESPONSE, "actor", "generate"),
    Tensor("sampler_log_probs", "float32", _RESPONSE, "actor", "generate"),
    Tensor("truncated", "bool", _ROWS, "actor", "generate"),
    Tensor("policy_version", "int64", _ROWS, "actor", "generate"),
    Tensor("prompt_id", "int64", _ROWS, "", "generate"),
    Tensor("ref_log_probs", "float32", _RESPONSE, "reference", "score"),
    Tensor("kl", "float32", _RESPONSE, "", "score"),
    Tensor("values", "float32", (*_RESPONSE, "*values"), "critic", "score"),
    Tensor("last_values", "float32", (*_ROWS, "*values"), "critic", "score"),
    Tensor("scores", "float32", _ROWS, "reward", "score"),
    Tensor("score_parts", "float32", ("rollout", "parts"), "reward", "score"),
    Tensor("score_weights", "float32", ("rollout", "parts"), "", "score"),
    Tensor("rewards", "float32", (*_RESPONSE, "*values"), "", "learn"),
    Tensor("advantages", "float32", _RESPONSE, "", "learn"),
    Tensor("returns", "float32", (*_RESPONSE, "*values"), "", "learn"),
)
PROMPTS = Tensor("prompts", "int64", ("rollout", "prompt"), "", "generate")


def named(name: str) -> Tensor:
    """A tensor of the batch."""
    return next(tensor for tensor in BATCH if tensor.name == name)


def trunk_cache(scene: Scene) -> Tensor:
    """The frozen trunk's output, kept from sampling for all later passes, in the type that the trunk computes in."""
    held = scene.config.precision.frozen
    dtype: Dtype = held if held in ("float32", "bfloat16", "float16") else scene.compute
    return Tensor("trunk cache", dtype, ("rollout", "prompt+response", "hidden"), "trunk", "generate")

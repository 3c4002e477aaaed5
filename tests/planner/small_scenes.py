"""Scenes for the planner's tests: settings on a small architecture, on a CPU."""

from __future__ import annotations

from typing import Any

from fourfold.config.loading import apply_override, parse_config
from fourfold.planner.architectures import Architecture
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.scene import Lengths, Scene

CPU = Device("a CPU", "cpu", 2**34, 1e10, {"float32": 1e11})
GPU = Device("a GPU", "cuda", 2**36, 1e12, {"float32": 1e13, "bfloat16": 1e14, "float16": 1e14}, pcie=2e10)


def architecture(layers: int = 4, **changes: Any) -> Architecture:
    """A Llama of 16 numbers a token, with two heads for queries and one for keys."""
    shape: dict[str, Any] = {
        "family": "llama", "layers": layers, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8,
        "intermediate": 24, "vocabulary": 100, "tied_embeddings": False, "gated_mlp": True,
    }  # fmt: skip
    return Architecture(**shape | changes)


def scene(
    *overrides: str,
    model: Architecture | None = None,
    rows: int = 8,
    prompt: int = 6,
    response: int = 10,
    padded: bool = False,
    device: Device = CPU,
) -> Scene:
    """PPO with a trained reward model, four separate models in float32; `overrides` as `--set` takes them.

    Branches have 2 layers and adapters rank 4 unless they say otherwise.
    """
    tree: dict[str, Any] = {
        "output": "unused",
        "stages": ["ppo"],
        "model": {"path": "unused"},
        "sharing": {"mode": "none"},
        "precision": {"compute": "float32"},
        "data": {"prompts": {"path": "unused.jsonl"}},
        "reward": {"source": "checkpoint", "checkpoint": "unused"},
        "ppo": {"rollout_batch_size": rows, "mini_batch_size": rows, "micro_batch_size": rows},
    }
    for override in overrides:
        apply_override(tree, override)
    # A setting that would be ignored is refused.
    if tree["reward"]["source"] != "checkpoint":
        del tree["reward"]["checkpoint"]
    small = {"trunk": ("trunk", "branch_layers", 2), "adapters": ("adapters", "rank", 4)}
    if tree["sharing"]["mode"] in small:
        section, key, value = small[tree["sharing"]["mode"]]
        tree[section] = {key: value} | tree.get(section, {})
    lengths = Lengths(prompt, response, prompt - padded, response)
    return Scene(parse_config(tree, "a test"), {"base": model or architecture()}, Cluster(Node(device)), lengths)

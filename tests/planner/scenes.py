"""Scenes for the planner's tests: a Llama-2-7B, a small one, plain hardware, settings from a few changed keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.config import RunConfig
from fourfold.config.loading import parse_config
from fourfold.planner.architectures import Architecture, Experts
from fourfold.planner.hardware.machine import GB, Cluster, Device, Node
from fourfold.planner.layout import Layout
from fourfold.planner.scene import Lengths, Scene

LLAMA_2_7B = Architecture(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=11008,
    vocabulary=32000,
    tied_embeddings=False,
    gated_mlp=True,
)
LLAMA_2_13B = replace(LLAMA_2_7B, layers=40, hidden=5120, heads=40, kv_heads=40, intermediate=13824)
MIXTRAL_8X7B = replace(LLAMA_2_7B, kv_heads=8, intermediate=14336, experts=Experts(8, 2, 14336))
LLAMA_2_70B = replace(LLAMA_2_7B, layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672)


def opt(layers: int, hidden: int) -> Architecture:
    """OPT (Zhang et al. 2022, table 1)."""
    return Architecture(
        family="opt", layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=hidden // 64, head_dim=64,
        intermediate=4 * hidden, vocabulary=50272, tied_embeddings=True, gated_mlp=False, qkv_bias=True,
        output_bias=True, mlp_bias=True, norm_vectors=2, learned_positions=2050,
    )  # fmt: skip


OPT = {"350M": opt(24, 1024), "2.7B": opt(32, 2560), "6.7B": opt(32, 4096), "13B": opt(40, 5120), "30B": opt(48, 7168)}

A100 = Device(
    name="A100-80G",
    kind="cuda",
    memory=80 * GB,
    bandwidth=2039e9,
    flops={"float32": 156e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
    pcie=31.5e9,
    source="NVIDIA A100 80GB datasheet",
)
CPU = Device(
    name="CPU",
    kind="cpu",
    memory=24 * GB,
    bandwidth=38e9,
    flops={"float32": 200e9, "bfloat16": 880e9},
    source="measured: 2 cores of an AMD EPYC",
)


def cluster(devices: int = 1, nodes: int = 1, device: Device = A100) -> Cluster:
    """Nodes with NVLink of 300 GB/s one way, 200 Gbit/s InfiniBand a device."""
    node = Node(
        device, devices, link=300e9, link_name="NVLink", host_memory=1000 * GB, disk=4000 * GB, disk_bandwidth=3e9
    )
    return Cluster(node, nodes, network=25e9 * devices, network_name="InfiniBand")


def config(**changes: Any) -> RunConfig:
    """Settings from dotted keys with "__" for the dot; four models, actor and critic trained in full, unless changed.

    A None leaves a key out.
    """
    tree: dict[str, Any] = {"output": "run", "stages": ["ppo"], "model": {"path": "model"}}
    given = {
        "sharing__mode": "none",
        "precision__compute": "bfloat16",
        "reward__source": "checkpoint",
        "reward__checkpoint": "reward",
        "data__prompts__path": "prompts.jsonl",
    } | changes
    for key, value in given.items():
        if value is None:
            continue
        *tables, name = key.split("__")
        table = tree
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
    return parse_config(tree, source="test")


def scene(
    model: Architecture = LLAMA_2_7B,
    where: Cluster | None = None,
    lengths: Lengths | None = None,
    layout: Layout | None = None,
    **changes: Any,
) -> Scene:
    """A scene; keywords as `config` takes them."""
    lengths = lengths or Lengths.longest(256, 256)
    return Scene(config(**changes), {"base": model}, where or cluster(), lengths, layout or Layout())


def in_this_process(tree: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """`work` for benchmarks/planner.py: tensors are counted one by one, and a process of its own would only import
    everything once more."""
    from benchmarks.planner_worker import measured  # needs torch, which the planner's own tests do without

    return measured(parse_config(tree, "a test"), steps)

"""Which layouts make sense on which hardware: tensor parallelism inside a node, data parallelism and ZeRO across.

Tensor parallelism waits for four all-reduces in every layer, data parallelism for one of all gradients in every step:
the first belongs on NVLink, the second can go over InfiniBand (Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fourfold.planner.hardware.machine import GB, Cluster
from fourfold.planner.layout import Layout, ZeroStage
from fourfold.planner.scene import Scene

# From so many tokens a row on, activations of one row are worth splitting over devices.
LONG = 16_384


def check_layout(scene: Scene) -> None:
    """ValueError for a layout that the model or the hardware makes no sense of."""
    layout, cluster, base = scene.layout, scene.cluster, scene.base
    node = cluster.node
    if node.devices % layout.tensor:
        raise ValueError(
            f"layout {layout}: tensor = {layout.tensor} on nodes of {node.devices} devices would all-reduce the "
            f"activations of every layer {_between(cluster)}; allowed: a divisor of {node.devices}; try tensor = "
            f"{_largest_divisor(node.devices, layout.tensor)} and data parallelism across the nodes"
        )
    if base.heads % layout.tensor:
        raise ValueError(
            f"layout {layout}: tensor = {layout.tensor} does not divide the model's {base.heads} attention heads; try "
            f"tensor = {_largest_divisor(base.heads, layout.tensor)}"
        )
    if layout.pipeline > base.layers:
        raise ValueError(f"layout {layout}: {layout.pipeline} stages of {base.layers} layers; try fewer stages")
    experts = base.experts.count if base.experts is not None else 1
    if experts % layout.expert:
        raise ValueError(
            f"layout {layout}: expert = {layout.expert} does not divide the model's {experts} experts; try expert = "
            f"{_largest_divisor(experts, layout.expert)}"
        )
    mini = scene.config.ppo.mini_batch_size
    if mini % layout.data:
        raise ValueError(
            f"layout {layout}: ppo.mini_batch_size = {mini} rows cannot be shared out among data = {layout.data} "
            f"devices; try data = {_largest_divisor(mini, layout.data)} or ppo.mini_batch_size = "
            f"{-(-mini // layout.data) * layout.data}"
        )


def _between(cluster: Cluster) -> str:
    """The two rates that a group over nodes has."""
    node = cluster.node
    inside = f"at {node.link / GB:.0f} GB/s ({node.link_name or 'inside a node'})" if node.link else "inside a node"
    if not cluster.network:
        return f"between nodes instead of {inside}"
    network = f"{cluster.network / node.devices / GB:.0f} GB/s a device ({cluster.network_name or 'between nodes'})"
    return f"over {network} instead of {inside}"


def choose_layouts(scene: Scene) -> list[Layout]:
    """Layouts of all devices that make sense, those with the least traffic first.

    Tensor parallelism and experts stay inside a node, pipelines go over nodes, sequences are split where they are long.
    Adapters have too few states for ZeRO; frozen weights are sharded only where ZeRO-3 shards all the rest.
    """
    found = [layout for layout in _all(scene) if _makes_sense(scene, layout)]
    return sorted(
        found, key=lambda layout: (layout.pipeline, layout.tensor, layout.context, layout.zero, layout.shard_frozen)
    )


def _all(scene: Scene) -> Iterator[Layout]:
    cluster = scene.cluster
    inside = _divisors(cluster.node.devices)
    tokens = scene.lengths.prompt + scene.lengths.response
    for pipeline in _divisors(cluster.nodes):
        for tensor in inside:
            for context in inside if tokens >= LONG else [1]:
                data, left = divmod(cluster.devices, pipeline * tensor * context)
                if left or not data:
                    continue
                expert = _experts_apart(scene, data, cluster.node.devices // (tensor * context))
                for zero, frozen in _zero(scene, data):
                    yield Layout(data, tensor, pipeline, context, expert, zero, frozen)


def _experts_apart(scene: Scene, data: int, room: int) -> int:
    """The most devices of one node that the experts can be spread over."""
    count = scene.base.experts.count if scene.base.experts is not None else 1
    return max(each for each in _divisors(math.gcd(count, data)) if each <= max(room, 1))


def _zero(scene: Scene, data: int) -> list[tuple[ZeroStage, bool]]:
    if data == 1:
        return [(0, False)]
    if scene.config.sharing.mode == "adapters":
        return [(0, False), (3, True)]  # the latter for the base alone: it may be too large for a device
    return [(0, False), (1, False), (2, False), (3, False), (3, True)]


def _makes_sense(scene: Scene, layout: Layout) -> bool:
    inside = layout.tensor * layout.context <= scene.cluster.node.devices
    fits = not scene.base.heads % layout.tensor and layout.pipeline <= scene.base.layers
    return inside and fits and not scene.config.ppo.mini_batch_size % layout.data


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _largest_divisor(number: int, at_most: int) -> int:
    return max(each for each in _divisors(number) if each <= at_most)

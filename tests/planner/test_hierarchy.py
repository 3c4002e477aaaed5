"""Which layouts are offered, and which are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.planner.hierarchy import check_layout, choose_layouts
from fourfold.planner.layout import Layout
from fourfold.planner.scene import Lengths
from planner.scenes import LLAMA_2_7B, LLAMA_2_70B, MIXTRAL_8X7B, cluster, scene


def test_tensor_parallelism_across_nodes_is_refused_with_both_rates() -> None:
    with pytest.raises(
        ValueError, match=r"25 GB/s a device \(InfiniBand\) instead of at 300 GB/s \(NVLink\).*try tensor = 8"
    ):
        check_layout(scene(where=cluster(8, 2), layout=Layout(tensor=16)))


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (Layout(tensor=3), "does not divide the model's 32 attention heads"),
        (Layout(data=5), "5 devices; try data = 4 or ppo.mini_batch_size = 35"),
        (Layout(data=2, expert=2), "does not divide the model's 1 experts"),
        (Layout(pipeline=40), "40 stages of 32 layers"),
    ],
)
def test_what_the_model_or_the_batch_cannot_be_divided_by_is_refused(layout: Layout, what: str) -> None:
    devices = 3 if layout.tensor == 3 else layout.devices
    with pytest.raises(ValueError, match=what):
        check_layout(scene(where=cluster(devices), layout=layout))


def test_one_device_has_one_layout() -> None:
    assert choose_layouts(scene()) == [Layout()]


def test_two_nodes_of_eight() -> None:
    """Tensor parallelism of 1 to 8, data parallelism for the rest, pipelines over the two nodes last."""
    found = choose_layouts(scene(where=cluster(8, 2)))
    assert found[0] == Layout(data=16)
    assert {each.tensor for each in found} == {1, 2, 4, 8}
    assert all(each.devices == 16 and each.context == each.expert == 1 for each in found)
    assert {each.pipeline for each in found} == {1, 2} and found[-1].pipeline == 2
    assert Layout(data=2, tensor=8, zero=2) in found and Layout(data=16, zero=3) in found
    for layout in found:
        check_layout(scene(where=cluster(8, 2), layout=layout))


def test_heads_decide_about_tensor_parallelism() -> None:
    """Three cards of 70B's 64 heads: no tensor parallelism, so data parallelism with everything sharded or nothing."""
    found = choose_layouts(
        scene(LLAMA_2_70B, cluster(3), ppo__rollout_batch_size=30, ppo__mini_batch_size=30, ppo__micro_batch_size=1)
    )
    assert {each.tensor for each in found} == {1}


def test_adapters_have_no_use_for_zero_but_to_share_out_the_base() -> None:
    found = choose_layouts(scene(where=cluster(8), sharing__mode="adapters"))
    assert {(each.zero, each.shard_frozen) for each in found} == {(0, False), (3, True)}


def test_experts_are_spread_inside_one_node() -> None:
    found = choose_layouts(scene(MIXTRAL_8X7B, cluster(8, 2)))
    by_tensor = {(each.tensor, each.expert) for each in found if each.pipeline == 1}
    assert by_tensor == {(1, 8), (2, 4), (4, 2), (8, 1)}


def test_long_rows_are_split_over_devices() -> None:
    short, long = (choose_layouts(scene(where=cluster(8), lengths=Lengths.longest(n, 256))) for n in (256, 32_768))
    assert {each.context for each in short} == {1}
    assert {each.context for each in long} == {1, 2, 4, 8}


def test_more_devices_than_there_are_rows_are_not_offered() -> None:
    few: dict[str, Any] = {"ppo__rollout_batch_size": 4, "ppo__mini_batch_size": 4, "ppo__micro_batch_size": 4}
    assert max(each.data for each in choose_layouts(scene(LLAMA_2_7B, cluster(8), **few))) == 4

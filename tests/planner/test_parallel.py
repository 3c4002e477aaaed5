"""Bills of several devices against closed forms, from bills of one device that are written down here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.bill import Footprint, Item, Kind, Moment
from fourfold.planner.layout import Layout
from fourfold.planner.parallel import sharded
from fourfold.planner.scene import Scene
from planner.scenes import LLAMA_2_7B, MIXTRAL_8X7B, cluster, scene

ALWAYS = frozenset(
    {Moment("generate", "actor"), Moment("score", "reference"), Moment("learn", "critic"), Moment("learn", "actor")}
)
LEARN, GENERATE = Moment("learn", "actor"), Moment("generate", "actor")
SEVEN = LLAMA_2_7B.parameters()


def a_bill() -> Footprint:
    """7B trained in full with float32 masters, a frozen reference, and what passes hold."""
    learns, samples = frozenset({LEARN}), frozenset({GENERATE})
    items = (
        Item("actor", "masters", 4 * SEVEN, ALWAYS),
        Item("actor", "weights", 2 * SEVEN, ALWAYS, why="the sampler's copy"),
        Item("actor", "buffers", 2 * SEVEN + 1_000, learns, why="what autocast keeps"),
        Item("actor", "gradients", 4 * SEVEN, learns),
        Item("actor", "optimizer", 8 * SEVEN, ALWAYS),
        Item("reference", "weights", 2 * SEVEN, ALWAYS),
        Item("run", "activations", 34_000, learns),
        Item("actor", "logits", 6_400, learns),
        Item("actor", "KV cache", 3_200, samples),
        Item("run", "experience", 800, ALWAYS),
        Item("run", "framework", 500, ALWAYS),
    )
    return Footprint(items)


def spread(layout: Layout, *, nodes: int = 1, **changes: Any) -> tuple[Footprint, Scene]:
    """The bill under a layout, on nodes of 8."""
    devices = -(-layout.devices // nodes)
    there = scene(where=cluster(max(devices, 8), nodes), layout=layout, **changes)
    return sharded(a_bill(), there), there


def held(bill: Footprint, kind: Kind, holder: str = "actor", moment: Moment = LEARN) -> int:
    """Bytes of a kind by a holder in a moment."""
    return sum(i.bytes for i in bill.items if (i.kind, i.holder) == (kind, holder) and moment in i.moments)


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(tensor=2), 0.5),
        (Layout(pipeline=4), 0.25),
        (Layout(data=4, zero=2), 1.0),
        (Layout(data=4, zero=3), 0.25),
    ],
)
def test_loading_is_divided_as_the_weights_are(layout: Layout, share: float) -> None:
    """Of a 7B model 4 bytes a number are read: by each device its own part, but for embedding, norms and head."""
    load = Item("run", "buffers", 4 * SEVEN, frozenset({Moment("load")}))
    there = scene(where=cluster(8), layout=layout)
    [found] = [item for item in sharded(Footprint((load,)), there).items if item.holder == "run"]
    assert found.bytes / load.bytes == pytest.approx(share, abs=0.03)


def test_layers_that_are_quantised_one_by_one_are_not_divided_by_a_pipeline() -> None:
    load = Item("run", "buffers", 3_000_000_000, frozenset({Moment("load")}))
    frozen: dict[str, Any] = {"sharing__mode": "adapters", "precision__frozen": "nf4"}
    shares = []
    for layout in (Layout(pipeline=4), Layout(tensor=4)):
        there = scene(where=cluster(8), layout=layout, **frozen)
        [found] = sharded(Footprint((load,)), there).items
        shares.append(found.bytes / load.bytes)
    assert shares[0] == 1 and shares[1] == pytest.approx(0.25, abs=0.1)


def test_one_device_holds_all_of_it() -> None:
    assert sharded(a_bill(), scene()) == a_bill()


@pytest.mark.parametrize(
    ("zero", "sharded_kinds"), [(0, ""), (1, "optimizer masters"), (2, "optimizer masters gradients")]
)
def test_zero_shards_what_its_stage_names(zero: Any, sharded_kinds: str) -> None:
    """Rajbhandari et al. 2020, figure 1, with 2 + 4 + 4 + 8 bytes a parameter; the frozen reference stays whole."""
    bill, _ = spread(Layout(data=8, zero=zero))
    for kind, width in (("masters", 4), ("gradients", 4), ("optimizer", 8)):
        whole = width * SEVEN
        assert held(bill, kind) == (pytest.approx(whole / 8, abs=1) if kind in sharded_kinds else whole)  # type: ignore[arg-type]
    assert held(bill, "weights") == 2 * SEVEN  # the sampler's copy, or the narrow weights
    assert held(bill, "buffers") == (1_000 if zero else 2 * SEVEN + 1_000)
    assert held(bill, "weights", "reference") == 2 * SEVEN


def test_zero_3_shards_all_that_is_trained() -> None:
    """2 + 4 + 8 eighths of the trained, two gathered layers of 2 bytes a number, and what a pass needs besides."""
    bill, _ = spread(Layout(data=8, zero=3))
    assert held(bill, "masters") + held(bill, "gradients") + held(bill, "optimizer") == pytest.approx(2 * SEVEN, abs=3)
    assert held(bill, "weights") == 0
    assert held(bill, "buffers") == 1_000 + 2 * 2 * LLAMA_2_7B.layer_parameters
    assert held(bill, "buffers", moment=GENERATE) == 2 * SEVEN
    assert held(bill, "weights", "reference") == 2 * SEVEN


def test_in_float32_masters_are_the_weights() -> None:
    """Nothing is narrowed: no copy of the sampler, and under ZeRO-3 the weights come together in float32."""
    bill, _ = spread(Layout(data=8, zero=3), precision__compute="float32")
    assert held(bill, "buffers", moment=GENERATE) == 4 * SEVEN


def test_frozen_roles_are_sharded_by_choice() -> None:
    bill, _ = spread(Layout(data=8, zero=3, shard_frozen=True))
    assert held(bill, "weights", "reference") == pytest.approx(SEVEN / 4, abs=1)


def test_data_parallelism_divides_rows_that_are_passed_at_once() -> None:
    """32 rows a mini-batch and as many at once are 4 of each device; 4 at once stay 4."""
    bill, _ = spread(Layout(data=8))
    assert held(bill, "activations", "run") == 34_000 / 8
    assert held(bill, "KV cache", moment=GENERATE) == 3_200 / 8
    assert held(bill, "experience", "run") == 100
    few, _ = spread(Layout(data=8), ppo__micro_batch_size=4, sampling__batch_size=4)
    assert held(few, "activations", "run") == 34_000
    assert held(few, "KV cache", moment=GENERATE) == 3_200


def test_tensor_parallelism_leaves_embedding_and_norms_whole() -> None:
    bill, _ = spread(Layout(tensor=8))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096  # with the untied head
    whole = SEVEN - matrices
    assert whole == 32000 * 4096 + 65 * 4096
    assert held(bill, "masters") == pytest.approx(4 * (matrices / 8 + whole), rel=1e-9)
    assert held(bill, "optimizer") == pytest.approx(8 * (matrices / 8 + whole), rel=1e-9)
    # Korthikanti et al. 2022, equation 2: s b h (10 + 24 / t) of 34.
    assert held(bill, "activations", "run") == 34_000 / 34 * (10 + 24 / 8)
    assert held(bill, "KV cache", moment=GENERATE) == 400
    assert held(bill, "logits") == 800


def test_keys_and_values_are_divided_by_no_more_than_their_heads() -> None:
    grouped = replace(LLAMA_2_7B, kv_heads=2)
    there = scene(grouped, cluster(8), layout=Layout(tensor=8))
    assert held(sharded(a_bill(), there), "KV cache", moment=GENERATE) == 1_600


def test_inputs_of_checkpointed_layers_are_on_every_tensor_parallel_device() -> None:
    bill, _ = spread(Layout(tensor=8), memory__checkpointing="layers")
    kept = 2 * 32 + 34
    assert held(bill, "activations", "run") == pytest.approx(34_000 * (2 * 32 + 10 + 24 / 8) / kept, abs=1)


def test_context_parallelism_divides_tokens_only() -> None:
    bill, _ = spread(Layout(context=4))
    assert held(bill, "activations", "run") == 34_000 / 4
    assert held(bill, "KV cache", moment=GENERATE) == 3_200 / 4
    assert held(bill, "masters") == 4 * SEVEN


@pytest.mark.parametrize(("micro", "in_flight"), [(32, 1), (16, 2), (4, 4)])
def test_a_pipelines_first_stage_has_as_many_micro_batches_in_flight_as_stages(micro: int, in_flight: int) -> None:
    bill, _ = spread(Layout(pipeline=4), ppo__micro_batch_size=micro)
    assert held(bill, "activations", "run") == 34_000 / 4 * in_flight
    layers = 32 * LLAMA_2_7B.layer_parameters / 4
    assert held(bill, "masters") == pytest.approx(4 * (layers + 32000 * 4096), rel=1e-4)
    assert held(bill, "logits") == 0


def test_the_last_stage_is_the_answer_where_its_logits_are_more() -> None:
    large = Footprint(tuple(replace(i, bytes=10**12) if i.kind == "logits" else i for i in a_bill().items))
    bill = sharded(large, scene(where=cluster(8), layout=Layout(pipeline=4)))
    assert held(bill, "logits") == 10**12


def test_a_host_holds_what_all_its_devices_have_below_them() -> None:
    """Two devices of 8 on a node: each shard is an eighth of its replica's, and eight lie in one host's memory."""
    there = scene(where=cluster(8, 2), layout=Layout(data=16, zero=1))
    offloaded = Footprint((Item("actor", "optimizer", 16_000, ALWAYS, tier="host"),))
    assert held(sharded(offloaded, there), "optimizer") == 8_000
    plain = replace(there, layout=Layout(data=16))
    assert held(sharded(offloaded, plain), "optimizer") == 8 * 16_000


def test_adapters_are_whole_on_tensor_parallel_devices_and_their_base_is_not() -> None:
    bill = Footprint(
        (
            Item("base", "weights", 2 * SEVEN, ALWAYS),
            Item("actor", "weights", 1_000, ALWAYS),
            Item("actor", "optimizer", 2_000, ALWAYS),
        )
    )
    found = sharded(bill, scene(where=cluster(8), layout=Layout(tensor=4), sharing__mode="adapters"))
    assert held(found, "weights") == 1_000 and held(found, "optimizer") == 2_000
    assert held(found, "weights", "base") < 2 * SEVEN / 3.5


def test_a_trunk_and_its_branches_are_divided_each_by_its_own_layers() -> None:
    """Branches of 4 layers have no embedding: all but their norms is divided."""
    branch = 4 * LLAMA_2_7B.layer_parameters + 4096
    bill = Footprint(
        (Item("actor", "masters", 4 * branch, ALWAYS), Item("trunk", "weights", 2 * (SEVEN - branch), ALWAYS))
    )
    found = sharded(bill, scene(where=cluster(8), layout=Layout(tensor=8), sharing__mode="trunk"))
    assert held(found, "masters") == pytest.approx(4 * branch / 8, rel=1e-3)
    embedding = 2 * 32000 * 4096
    assert held(found, "weights", "trunk") == pytest.approx(2 * (SEVEN - branch) / 8 + embedding * 7 / 8, rel=1e-3)


def test_states_of_a_frozen_trunk_are_not_zeros() -> None:
    found = sharded(
        Footprint((Item("trunk", "weights", 1_000, ALWAYS),)),
        scene(where=cluster(8), layout=Layout(data=8, zero=3), sharing__mode="trunk"),
    )
    assert held(found, "weights", "trunk") == 1_000


@pytest.mark.parametrize(
    ("zero", "kind", "experts", "rest"), [(0, "masters", 4, 1), (1, "optimizer", 8, 8), (1, "gradients", 4, 1)]
)
def test_experts_are_divided_and_nothing_else_is(zero: Any, kind: Kind, experts: int, rest: int) -> None:
    """Over 4 of 8 devices: two have each expert, and ZeRO shards its states between them: an eighth, as of the rest."""
    whole, mixture = MIXTRAL_8X7B.parameters(), 32 * 8 * MIXTRAL_8X7B.expert_parameters
    bill = Footprint((Item("actor", kind, whole, ALWAYS),))
    found = sharded(bill, scene(MIXTRAL_8X7B, cluster(8), layout=Layout(data=8, expert=4, zero=zero)))
    assert held(found, kind) == pytest.approx(mixture / experts + (whole - mixture) / rest, abs=1)

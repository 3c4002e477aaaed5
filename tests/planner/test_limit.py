"""The limit of a step against sums by hand, and what it must not depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.limit import ADAMW_BYTES, Rates, limits, products_of
from fourfold.planner.scene import Lengths, Scene
from planner.scenes import CPU, LLAMA_2_7B, cluster, scene

# Two layers of 8 numbers, 2 heads of 4, an MLP of 16, 32 tokens: small enough to count by hand.
SMALL = replace(LLAMA_2_7B, layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocabulary=32)
MATRICES = 2 * (4 * 8 * 8 + 3 * 8 * 16)
HEAD = 8 * 32
LENGTHS = Lengths.longest(3, 5)


def small(**changes: Any) -> Scene:
    sizes = {"rollout_batch_size": 4, "mini_batch_size": 4, "micro_batch_size": 4, "num_epochs": 1}
    given: dict[str, Any] = {f"ppo__{key}": n for key, n in sizes.items()} | changes
    return scene(SMALL, cluster(device=CPU), LENGTHS, **given)


def alike(where: Scene, rate: float, bandwidth: float) -> Rates:
    return Rates({product: rate for product in products_of(where)}, bandwidth)


def attention(tokens: int, before: int = 0) -> int:
    """FLOPs of scores and sums of one row's tokens after those `before`, in both layers."""
    return sum(2 * 2 * 2 * 2 * 4 * keys for keys in range(before + 1, before + tokens + 1))


def test_where_memory_is_free_a_phase_takes_its_flops() -> None:
    """generate: 4 rows x (7 states decoded, then read again for log-probs), a head on the 5 response tokens."""
    found = limits(small(), alike(small(), 1e9, 1e30))["generate"]
    states = 4 * (2 * MATRICES * 7 + attention(7) + 2 * HEAD * 5)
    assert found.flops == pytest.approx(2 * states)
    assert found.seconds == pytest.approx(2 * states / 1e9)


def test_where_products_are_free_decoding_reads_every_weight_for_each_token() -> None:
    """Four rows at once take 5 steps and the prompts' pass; log-probs are one more pass."""
    where = small()
    found = limits(where, alike(where, 1e30, 1e9))["generate"]
    layers, head = 2 * SMALL.parameters_of(0, 2), 2 * HEAD  # bytes in bfloat16
    # Keys that the states after the prompt attend to: 4 + 5 + 6 + 7, of 2 layers x 16 numbers x 2 bytes, for 4 rows.
    cached = 4 * (4 + 5 + 6 + 7) * 2 * 16 * 2
    assert found.bytes == pytest.approx(7 * (layers + head) + cached)
    assert found.seconds == pytest.approx(found.bytes / 1e9)


def test_fewer_rows_at_once_read_the_weights_more_often() -> None:
    whole, halves = (limits(w, alike(w, 1e30, 1e9))["generate"] for w in (small(), small(sampling__batch_size=2)))
    assert halves.seconds > 1.5 * whole.seconds


def test_learning_moves_what_adamw_touches_and_gradients_once() -> None:
    where = small()
    found = limits(where, alike(where, 1e30, 1e9))["learn"]
    body = SMALL.parameters_of(0, 2) + 8 + HEAD  # final norm, embedding
    actor, critic = body + HEAD, body + 9
    read = 2 * 4 * SMALL.parameters_of(0, 2) / 2  # forward and backward of both, narrowed to 2 bytes
    assert found.bytes == pytest.approx(2 * read + 2 * 2 * HEAD + (ADAMW_BYTES + 4) * (actor + critic))


@pytest.mark.parametrize(("epochs", "mini"), [(1, 2), (4, 4), (3, 1)])
def test_learning_is_done_in_every_epoch_on_every_mini_batch(epochs: int, mini: int) -> None:
    """The same FLOPs an epoch however it is cut; weights, gradients and moments are moved in every mini-batch."""
    one, several = small(), small(ppo__num_epochs=epochs, ppo__mini_batch_size=mini, ppo__micro_batch_size=mini)
    once, often = (limits(where, alike(where, 1e9, 1e9))["learn"] for where in (one, several))
    assert once.flops > 0 and often.flops == pytest.approx(epochs * once.flops)
    assert often.bytes == pytest.approx(epochs * 4 // mini * once.bytes)


def test_a_stretch_takes_what_is_slower() -> None:
    where = small()
    free = limits(where, alike(where, 1e9, 1e30)), limits(where, alike(where, 1e30, 1e9))
    both = limits(where, alike(where, 1e9, 1e9))
    for phase, found in both.items():
        assert found.product_seconds == pytest.approx(free[0][phase].seconds)
        assert found.memory_seconds == pytest.approx(free[1][phase].seconds)
        longer = max(found.product_seconds, found.memory_seconds)
        assert longer <= found.seconds <= found.product_seconds + found.memory_seconds


def test_a_slower_shape_slows_its_own_products_only() -> None:
    where = small()
    rates = alike(where, 1e9, 1e30)
    head = [product for product in rates.products if product.outputs == 32]
    slower = Rates({**rates.products, **{product: 0.5e9 for product in head}}, 1e30)
    gained = limits(where, slower)["score"].seconds - limits(where, rates)["score"].seconds
    # The reference's head runs at half the rate; its FLOPs are spread over a pass that also has attention.
    states = 2 * MATRICES * 7 + attention(7) + 2 * HEAD * 5
    share = 2 * HEAD * 5 / (2 * MATRICES * 7 + 2 * HEAD * 5)
    assert gained == pytest.approx(4 * states * share / 1e9)


@pytest.mark.parametrize(
    "changes",
    [{"ppo__micro_batch_size": 1}, {"memory__checkpointing": "layers"}, {"reference__residency": "park"}],
    ids=str,
)
def test_how_a_run_saves_memory_does_not_move_the_limit(changes: dict[str, Any]) -> None:
    plain, other = small(), small(**changes)
    assert limits(other, alike(other, 1e9, 1e9)) == limits(plain, alike(plain, 1e9, 1e9))


def test_a_frozen_trunk_leaves_branches_to_learn() -> None:
    shared = small(sharing__mode="trunk", trunk__branch_layers=1, precision__compute="bfloat16")
    whole = small()
    learned = [limits(where, alike(where, 1e9, 1e30))["learn"].flops for where in (shared, whole)]
    # One layer of two, and of the head dX alone.
    branch = 2 * (MATRICES / 2) * 7 + attention(7) / 2
    assert learned[0] == pytest.approx(4 * (2 * 3 * branch + 2 * 2 * HEAD * 5 + 2 * 3 * 8 * 5))
    assert learned[0] < learned[1]


def test_the_best_rate_is_that_of_the_type() -> None:
    where = small()
    some = next(iter(products_of(where)))
    other = some._replace(dtype="float32")
    assert Rates({some: 3.0, other: 9.0}, 1.0).best("bfloat16") == 3.0

"""Streams against closed forms: bytes of one device, their link, and what hides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.bill import Footprint, Item, Moment
from fourfold.planner.costs import costs
from fourfold.planner.layout import Layout
from fourfold.planner.links import LATENCY, REACHED, Cover, behind, road
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.work import Flow
from planner.scenes import CPU, LLAMA_2_7B, MIXTRAL_8X7B, cluster, scene

EMPTY = Footprint(())
SEVEN = LLAMA_2_7B.parameters()
CRITIC = SEVEN - 32000 * 4096 + 4097
TOKENS = 32 * 511  # of a pass that does not see the last token
ONE_NODE: dict[str, Any] = {"where": cluster(8), "ppo__num_epochs": 1}


def streams(one: Scene, what: str, footprint: Footprint = EMPTY) -> list[Flow]:
    """All whose name begins so."""
    return [flow for flow in costs(one, footprint).flows if flow.what.startswith(what)]


def total(found: list[Flow]) -> float:
    assert found
    return sum(flow.bytes for flow in found)


def test_one_device_with_all_in_memory_has_no_traffic() -> None:
    assert costs(scene(), EMPTY).flows == ()


def test_gradients_go_around_a_ring_once_a_step() -> None:
    """2 (n - 1) / n of 4 bytes a parameter, however many micro-batches a step adds up."""
    for micro in (32, 4):
        found = streams(scene(layout=Layout(data=8), ppo__micro_batch_size=micro, **ONE_NODE), "gradients of the actor")
        assert total(found) == pytest.approx(2 * 7 / 8 * 4 * SEVEN)
        assert {flow.link for flow in found} == {"inside the node"}


def test_zero_sends_as_much_in_two_halves_and_zero_3_half_as_much_again() -> None:
    """Rajbhandari et al. 2020, section 7: 2, 2 and 3 volumes; here gradients have 4 bytes and gathered weights 2."""
    plain = total(streams(scene(layout=Layout(data=8), **ONE_NODE), "gradients of the actor"))
    for zero, gathers in ((1, 1), (2, 1), (3, 2)):
        one = scene(layout=Layout(data=8, zero=zero), **ONE_NODE)  # type: ignore[arg-type]
        assert total(streams(one, "gradients of the actor")) == pytest.approx(plain / 2)
        learn = [f for f in streams(one, "") if f.phase == "learn" and "weights of the actor" in f.what]
        assert total(learn) == pytest.approx(gathers * 7 / 8 * 2 * SEVEN)
    assert total([f for f in streams(one, "weights of the actor") if f.phase == "generate"]) == pytest.approx(
        7 / 8 * 2 * SEVEN
    )


def test_zero_2_scatters_gradients_of_every_micro_batch() -> None:
    one, four = (
        total(
            streams(
                scene(layout=Layout(data=8, zero=2), ppo__micro_batch_size=micro, **ONE_NODE), "gradients of the actor"
            )
        )
        for micro in (4, 1)
    )
    assert four == pytest.approx(4 * one)


def test_frozen_roles_are_gathered_only_where_they_are_sharded() -> None:
    whole, apart = (scene(layout=Layout(data=8, zero=3, shard_frozen=each), **ONE_NODE) for each in (False, True))
    assert not [f for f in costs(whole, EMPTY).flows if "reference" in f.what]
    layers = 32 * LLAMA_2_7B.layer_parameters
    assert total(streams(apart, "weights of the reference")) == pytest.approx(7 / 8 * 2 * layers)


def test_a_sharded_base_of_adapters_is_gathered_for_every_token_that_is_sampled() -> None:
    one = scene(layout=Layout(data=8, zero=3, shard_frozen=True), sharing__mode="adapters", **ONE_NODE)
    found = [f for f in streams(one, "frozen weights below the actor") if f.phase == "generate"]
    passes = 256 + 1 + 1  # tokens, prompts, log-probs
    assert total(found) == pytest.approx(passes * 7 / 8 * 2 * 32 * LLAMA_2_7B.layer_parameters)


def test_tensor_parallelism_reduces_twice_in_every_layer_of_every_pass() -> None:
    one = scene(layout=Layout(tensor=8), **ONE_NODE)
    [found] = [f for f in streams(one, "activations of the reference")]
    assert found.bytes == pytest.approx(2 * 32 * 2 * 7 / 8 * TOKENS * 4096 * 2)
    # 64 all-reduces of 8 hops each.
    assert found.seconds == pytest.approx(found.bytes / (REACHED * 300e9) + 64 * 8 * LATENCY)
    learn = [f for f in streams(one, "activations of the actor") if f.phase == "learn"]
    assert total(learn) == pytest.approx(2 * found.bytes)  # forward and backward


def test_data_parallelism_across_nodes_goes_over_the_network() -> None:
    """Eight rings of tensor-parallel ranks share a node's 200 GB/s: 25 each."""
    layout = Layout(data=2, tensor=8)
    found = streams(scene(layout=layout, where=cluster(8, 2)), "gradients of the actor")
    assert {flow.link for flow in found} == {"between nodes"}
    assert road(cluster(8, 2), layout, "data").rate == pytest.approx(REACHED * 25e9)
    assert road(cluster(8, 2), layout, "tensor") == ("inside the node", REACHED * 300e9)
    # One ring over all 16 devices has the whole network of each node.
    assert road(cluster(8, 2), Layout(data=16), "data").rate == pytest.approx(REACHED * 200e9)


def test_a_pipeline_hands_on_activations_and_gradients() -> None:
    found = streams(scene(layout=Layout(pipeline=2), **ONE_NODE), "activations of the critic, to the next")
    by_phase = {flow.phase: flow.bytes for flow in found}
    assert by_phase["score"] == 32 * 512 * 4096 * 2
    assert by_phase["learn"] == 2 * TOKENS * 4096 * 2


def test_keys_and_values_go_around_the_context_ring() -> None:
    found = streams(scene(layout=Layout(context=4), **ONE_NODE), "keys and values of the reference")
    assert total(found) == pytest.approx(3 * TOKENS / 4 * 32 * 2 * 4096 * 2)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Two experts a token, 7 of 8 elsewhere, both ways, in each of 32 layers; the backward pass the same again."""
    one = scene(MIXTRAL_8X7B, layout=Layout(data=8, expert=8), **ONE_NODE)
    score, learn = (
        [f for f in streams(one, "tokens of the critic") if f.phase == phase] for phase in ("score", "learn")
    )
    assert total(score) == pytest.approx(2 * 32 * 2 * 7 / 8 * (32 * 512 / 8) * 4096 * 2)
    assert total(learn) == pytest.approx(2 * total(score) * 511 / 512)
    assert {f.link for f in score} == {"inside the node"}


def test_a_parked_role_comes_in_once_and_a_streamed_one_for_every_micro_batch() -> None:
    few: dict[str, Any] = {"ppo__micro_batch_size": 8}
    assert total(streams(scene(reference__residency="park", **few), "weights of the reference, parked")) == 2 * SEVEN
    streamed = streams(scene(reference__residency="stream", **few), "weights of the reference, streamed")
    assert total(streamed) == pytest.approx(4 * 2 * SEVEN)
    assert {flow.link for flow in streamed} == {"pcie"}
    # Layers are read while others compute: max(transfer, compute), so what is not hidden is the difference.
    work = next(w for w in costs(scene(**few), EMPTY).work if w.moment == Moment("score", "reference"))
    visible = sum(f.seconds for f in streamed if not f.hidden)
    assert visible == pytest.approx(4 * 2 * SEVEN / (REACHED * 31.5e9) - work.seconds)


def test_overlapped_scoring_parks_once_a_sampling_batch() -> None:
    one = scene(reference__residency="park", sampling__overlap_scoring=True, sampling__batch_size=8)
    assert total(streams(one, "weights of the reference")) == 4 * 2 * SEVEN


def test_parked_moments_cross_twice_a_step() -> None:
    """Two float32 moments out and back; one byte each where they have eight bits."""
    one = scene(memory__optimizer_residency="park", ppo__num_epochs=2)
    assert total(streams(one, "moments of the actor")) == 2 * 2 * 8 * SEVEN
    narrow = scene(memory__optimizer_residency="park", ppo__num_epochs=2, critic__optimizer="adamw_8bit")
    assert total(streams(narrow, "moments of the critic")) == 2 * 2 * 2 * CRITIC


def test_zero_offload_takes_gradients_down_and_weights_up() -> None:
    """Ren et al. 2021, section 4.1: 2 bytes a parameter each way; gradients for every micro-batch, hidden."""
    one = scene(memory__optimizer_residency="offload", ppo__num_epochs=1, ppo__micro_batch_size=8)
    down, up = streams(one, "gradients of the actor"), streams(one, "new weights of the actor")
    assert total(down) == 4 * 2 * SEVEN and total(up) == 2 * SEVEN
    assert down[0].hidden and down[0].link == "pcie"
    step = next(w for w in costs(one, EMPTY).work if w.moment == Moment("learn", "actor"))
    kept = next(
        w for w in costs(scene(ppo__num_epochs=1, ppo__micro_batch_size=8), EMPTY).work if w.moment == step.moment
    )
    assert step.seconds > kept.seconds + 28 * SEVEN / 204.8e9  # Adam at the host's bandwidth


def on_a_cpu(**changes: Any) -> Scene:
    return scene(where=cluster(device=CPU), precision__compute="float32", **changes)


def test_below_a_cpu_lies_the_disk() -> None:
    found = streams(
        on_a_cpu(memory__optimizer_residency="offload", ppo__num_epochs=1), "gradients and states of the actor"
    )
    assert total(found) == pytest.approx((2 * 4 + 2 * 8) * SEVEN)  # written and read
    assert {flow.link for flow in found} == {"disk"} and found[0].seconds == pytest.approx(24 * SEVEN / 3e9)


def test_offloaded_activations_go_out_and_back_for_every_micro_batch() -> None:
    bill = Footprint((Item("run", "activations", 10**6, frozenset({Moment("learn", "actor")}), tier="host"),))
    one = scene(memory__activation_offload=True, ppo__num_epochs=2, ppo__micro_batch_size=8)
    assert total(streams(one, "activations of the actor", bill)) == 2 * 2 * 4 * 10**6
    assert not streams(one, "activations of the critic", bill)


def test_ids_go_out_to_a_service_and_numbers_come_back() -> None:
    """Requirement 32's messages: 8 + 1 bytes a token out, 4 a response token or a row back."""
    one = scene(
        lengths=Lengths.longest(100, 50),
        reference__residency="service",
        reward__residency="service",
        service__url="http://127.0.0.1:1",
    )
    sent = [f for f in costs(one, EMPTY).flows if f.what == "ids and masks"]
    assert [f.bytes for f in sent] == [32 * 150 * 9] * 2 and {f.target for f in sent} == {"reference", "reward"}
    assert total(streams(one, "log-probs")) == 32 * 50 * 4
    assert total(streams(one, "scores")) == 32 * 4


def test_a_role_on_the_host_reads_the_trunks_activations() -> None:
    one = scene(sharing__mode="trunk", reference__residency="cpu", system__device="cuda")
    [sent] = streams(one, "activations and masks")
    assert sent.bytes == 32 * 512 * (4096 * 2 + 1) and sent.link == "pcie"


def test_what_does_not_fit_behind_work_is_waited_for() -> None:
    flow = Flow("x", "a", "b", "learn", 100.0, "pcie", 10.0)
    hidden, rest = behind(flow, 4.0)
    assert (hidden.seconds, hidden.bytes, hidden.hidden) == (4.0, 40.0, True)
    assert (rest.seconds, rest.bytes, rest.hidden) == (6.0, 60.0, False)
    assert [f.hidden for f in behind(flow, 11.0)] == [True]
    assert behind(flow, 0.0) == [flow]


def test_two_transfers_on_one_link_share_the_work_that_hides_them() -> None:
    flow = Flow("x", "a", "b", "learn", 100.0, "pcie", 10.0)
    cover = Cover({("learn", "actor"): 12.0})
    assert [f.seconds for f in cover.behind(flow, "actor", share=0.5)] == [6.0, 4.0]
    assert [f.hidden for f in cover.behind(replace(flow, seconds=6.0), "actor")] == [True]
    assert cover.behind(flow, "actor") == [flow]
    assert cover.behind(replace(flow, link="inside the node"), "actor")[0].hidden
    assert cover.behind(flow, "critic") == [flow]

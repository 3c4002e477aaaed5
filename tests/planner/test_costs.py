"""Seconds of a step: by hand on hardware of round numbers, and how they move with levers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.bill import Footprint, Moment
from fourfold.planner.costs import costs
from fourfold.planner.layout import Layout
from fourfold.planner.lever import Lever
from fourfold.planner.levers import LEVERS
from fourfold.planner.passes import passes
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.timing import HOST, SHARES, decoding, reached_flops, roofline
from fourfold.planner.work import Costs, Work
from planner.scenes import A100, CPU, LLAMA_2_7B, MIXTRAL_8X7B, cluster, scene

EMPTY = Footprint(())
SEVEN = LLAMA_2_7B.parameters()
PLAIN = replace(A100, flops={"bfloat16": 1e12 / 0.68, "float32": 1e12}, bandwidth=1e9 / 0.82, source="measured here")


def of(one: Scene) -> Costs:
    return costs(one, EMPTY)


def work_of(found: Costs, phase: str, role: str) -> Work:
    [one] = [each for each in found.work if each.moment == Moment(phase, role)]  # type: ignore[arg-type]
    return one


def test_the_slower_of_products_memory_and_calls_is_what_a_gpu_waits_for() -> None:
    """1e12 FLOP/s reached, 1e9 bytes/s reached, 1.2 ms a layer."""
    assert roofline(PLAIN, "bfloat16", 3e12, 1e9, 100) == pytest.approx((3.0, 1.0, 0.12, 3.0))
    assert roofline(PLAIN, "bfloat16", 1e12, 3e9, 100).bound == "memory"
    assert roofline(PLAIN, "bfloat16", 1e9, 1e6, 100).total == pytest.approx(0.12)


def test_a_measured_machine_reached_what_is_left_of_a_published_rate() -> None:
    """0.68 of 100 GFLOP/s that were measured, 0.73 of that of what a maker gives."""
    rates = {"float32": 100e9}
    published, measured = (replace(A100, flops=rates, source=source) for source in ("datasheet", "measured"))
    assert roofline(measured, "float32", 68e9, 0.0, 0).total == pytest.approx(1.0)
    assert roofline(published, "float32", 68e9, 0.0, 0).total == pytest.approx(1 / 0.73)


def test_a_cpu_makes_its_calls_first() -> None:
    found = roofline(CPU, "float32", 160e9, 0.0, 1000)
    assert found.total == pytest.approx(1.0 + 0.25)


def test_products_of_few_rows_go_by_what_was_measured_of_them() -> None:
    """Seconds are linear in the rows between those that were measured, and go on so beyond them."""
    measured = replace(CPU, few_rows={"float32": ((1, 10e9), (8, 40e9), (64, 160e9))}, source="measured here")
    seconds = [rows / rate for rows, rate in measured.few_rows["float32"]]
    for rows, expected in ((1, seconds[0]), (8, seconds[1]), (64, seconds[2]), (36, (seconds[1] + seconds[2]) / 2)):
        assert rows / (measured.flops_of_rows("float32", rows) or 0) == pytest.approx(expected)
    assert 120 / (measured.flops_of_rows("float32", 120) or 0) == pytest.approx(2 * seconds[2] - seconds[1])
    assert measured.flops_of_rows("float16", 8) is None
    found = decoding(measured, "float32", 40e9, 8, weights=1e12, other=0.0)
    assert found.total == pytest.approx(1.0)  # the weights are in what was measured
    assert found.compute == pytest.approx(40e9 / reached_flops(measured, "float32"))
    more = decoding(measured, "float32", 40e9, 8, weights=1e12, other=measured.bandwidth)
    assert more.total == pytest.approx(1.0 + 1 / SHARES["cpu"].bandwidth)


def test_a_layers_step_beside_its_products_grows_with_rows_and_hidden() -> None:
    measured = replace(CPU, layer_step=((1, 1e-3), (64, 3e-3)), source="measured here")
    assert measured.seconds_of_layer_step(1, 4096) == pytest.approx(1e-3)
    assert measured.seconds_of_layer_step(64, 576) == pytest.approx(3e-3)
    assert measured.seconds_of_layer_step(32.5, 1152) == pytest.approx(1e-3 + 2e-3)
    assert CPU.seconds_of_layer_step(1, 576) is None
    plain, slow = (of(scene(where=cluster(device=device))) for device in (CPU, measured))
    more = slow.seconds["generate"] - plain.seconds["generate"]
    steps = scene().lengths.response * LLAMA_2_7B.layers
    rows = scene().config.ppo.rollout_batch_size
    beside = measured.seconds_of_layer_step(rows, LLAMA_2_7B.hidden) or 0.0
    assert more == pytest.approx(steps * (beside - SHARES["cpu"].layer_seconds))


def test_scoring_waits_for_products_and_decoding_for_memory_or_calls() -> None:
    found = of(scene())
    assert work_of(found, "score", "reference").bound == "compute"
    assert work_of(found, "learn", "actor").bound == "compute"
    assert work_of(found, "generate", "actor").bound in ("memory", "overhead")
    assert found.step_seconds == sum(found.seconds.values())


def test_a_scoring_pass_by_hand() -> None:
    """FLOPs over half of the peak: 0.73 that large products reach, and 0.68 of that."""
    flops = next(p.flops for p in passes(scene()) if p.role == "reward")
    assert work_of(of(scene()), "score", "reward").seconds == pytest.approx(flops / (0.68 * 0.73 * 312e12))


def test_decoding_reads_every_weight_for_every_token() -> None:
    """One row of Llama-2-7B on an A100, calls compiled away: gpt-fast's README has 104.9 tokens/s."""
    one = scene(
        lengths=Lengths.longest(5, 200), ppo__rollout_batch_size=1, ppo__mini_batch_size=1, ppo__micro_batch_size=1
    )
    decode = next(p for p in passes(one) if p.decodes)
    read = (SEVEN - 32000 * 4096) * 2  # all but the embedding, of which one line is read
    cached = 32 * 2 * 4096 * 2 * (204 * 205 / 2 - 5 * 6 / 2)
    memory = 0.82 * 0.83 * 2039e9
    compiled = {"cuda": replace(SHARES["cuda"], layer_seconds=0.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.planner.timing.SHARES", compiled)
        from fourfold.planner.timing import pass_seconds

        seconds, moved = pass_seconds(one, decode)
    assert moved == pytest.approx(201 * read + cached, rel=1e-3)
    assert 200 / seconds.total == pytest.approx(104.9, rel=0.05)
    assert seconds.total == pytest.approx(moved / memory, rel=0.01)


def test_experts_that_no_token_of_a_step_reaches_are_not_read() -> None:
    """One row: two of eight experts; 32 rows reach all."""
    few: dict[str, Any] = {"ppo__rollout_batch_size": 1, "ppo__mini_batch_size": 1, "ppo__micro_batch_size": 1}
    one, all_ = (work_of(of(scene(MIXTRAL_8X7B, **each)), "generate", "actor").bytes_read for each in (few, {}))
    assert one < 0.32 * all_


def test_a_cached_trunk_makes_later_passes_short() -> None:
    """28 of 32 layers pass once; what reference, critic and epochs pay is the branch of four, and the head."""
    whole, trunk = of(scene()), of(scene(sharing__mode="trunk"))
    assert trunk.seconds["score"] < 0.2 * whole.seconds["score"]
    assert trunk.seconds["learn"] < 0.2 * whole.seconds["learn"]
    assert work_of(trunk, "generate", "trunk").seconds > work_of(trunk, "generate", "actor").seconds


def test_checkpointing_adds_a_forward_pass_to_every_backward_pass() -> None:
    plain, again = (
        work_of(of(scene(memory__checkpointing=each)), "learn", "critic").flops for each in ("none", "layers")
    )
    assert again / plain == pytest.approx(4 / 3, rel=0.01)


def test_adapters_leave_out_the_products_for_weights_gradients() -> None:
    full, low = (work_of(of(scene(sharing__mode=each)), "learn", "critic").flops for each in ("none", "adapters"))
    assert low / full == pytest.approx(2 / 3, rel=0.03)


def test_an_optimizer_step_moves_gradients_weights_and_moments() -> None:
    """AdamW on 4-byte numbers: 28 bytes a parameter, 12 more to clip; moments of one byte are 12 fewer."""
    settings: dict[str, Any] = {"ppo__max_grad_norm": 0.0, "ppo__num_epochs": 1}
    base = work_of(of(scene(**settings)), "learn", "actor")
    clipped = work_of(of(scene(ppo__num_epochs=1)), "learn", "actor")
    narrow = work_of(of(scene(ppo__optimizer="adamw_8bit", **settings)), "learn", "actor")
    assert clipped.bytes_read - base.bytes_read == pytest.approx(12 * SEVEN)
    assert base.bytes_read - narrow.bytes_read == pytest.approx(12 * SEVEN)
    assert clipped.seconds - base.seconds == pytest.approx(12 * SEVEN / (0.82 * 0.83 * 2039e9))


def test_utilisation_is_flops_over_what_the_device_could_have_done() -> None:
    found = of(scene())
    assert found.utilisation == pytest.approx(found.flops / (312e12 * found.step_seconds))
    assert 0.2 < found.utilisation < 0.5


OVERLAP: dict[str, Any] = {"sampling__batch_size": 8, "sampling__overlap_scoring": True}


def test_scoring_after_sampling_is_a_bubble_and_overlap_hides_most_of_it() -> None:
    """Of four sampling batches three are scored while the next is sampled; the critic always comes after."""
    plain, ahead = of(scene(sampling__batch_size=8)), of(scene(**OVERLAP))
    assert plain.hidden == 0 and plain.bubble == plain.seconds["score"]
    frozen = sum(work_of(plain, "score", role).seconds for role in ("reference", "reward"))
    assert ahead.hidden == pytest.approx(0.75 * frozen)
    assert ahead.bubble == pytest.approx(plain.bubble - ahead.hidden)


def test_on_a_cpu_scoring_and_sampling_share_the_cores() -> None:
    one = scene(where=cluster(device=CPU), precision__compute="float32", **OVERLAP)
    assert of(one).hidden == 0


def test_a_role_on_the_host_is_slow_and_hidden_only_as_long_as_sampling_lasts() -> None:
    settings: dict[str, Any] = {"reference__residency": "cpu", "system__device": "cuda"}
    plain = of(scene(**settings))
    reference = work_of(plain, "score", "reference")
    assert reference.seconds > reference.flops / (0.8 * 0.8 * HOST.flops["float32"])
    ahead = of(scene(**settings, **OVERLAP))
    generate = sum(each.seconds for each in ahead.work if each.moment.phase == "generate")
    assert ahead.hidden <= 2 * 0.75 * generate
    assert ahead.bubble < plain.bubble


def test_a_service_works_beside_the_critic() -> None:
    url: dict[str, Any] = {"service__url": "http://127.0.0.1:1"}
    both = of(scene(reference__residency="service", reward__residency="service", **url))
    service = sum(work_of(both, "score", role).seconds for role in ("reference", "reward"))
    messages = sum(flow.seconds for flow in both.flows)
    assert both.seconds["score"] == pytest.approx(max(service, work_of(both, "score", "critic").seconds) + messages)


def test_more_devices_divide_the_work() -> None:
    one, eight = of(scene()), of(scene(where=cluster(8), layout=Layout(data=8)))
    assert eight.flops == pytest.approx(one.flops / 8)
    assert one.seconds["learn"] / 9 < eight.seconds["learn"] < one.seconds["learn"] / 5


def test_a_pipeline_of_few_micro_batches_waits_in_its_bubble() -> None:
    """(p - 1) / m of the time (Narayanan et al. 2021, section 2.2.1)."""
    few, many = (
        work_of(of(scene(where=cluster(8), layout=Layout(pipeline=4), ppo__micro_batch_size=micro)), "score", "reward")
        for micro in (32, 1)
    )
    assert few.seconds / many.seconds == pytest.approx(4 / (1 + 3 / 32), rel=0.05)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="try tensor = 8"):
        of(scene(where=cluster(8, 2), layout=Layout(tensor=16)))


@pytest.mark.parametrize("lever", LEVERS, ids=lambda each: each.name)
def test_every_lever_has_costs(lever: Lever) -> None:
    """On a GPU and on a CPU: seconds that are finite, and a utilisation that no device exceeds."""
    given = {"precision.compute": "float32", **lever.baseline, **lever.settings}
    settings: dict[str, Any] = {key.replace(".", "__"): value for key, value in given.items()}
    sizes = dict.fromkeys(("rollout", "mini", "micro"), 4)
    settings |= {f"ppo__{name}_batch_size": size for name, size in sizes.items()} | {
        key: value for key, value in settings.items() if key == "ppo__micro_batch_size"
    }
    if "service" in lever.name:
        settings["service__url"] = "http://127.0.0.1:1"
    if settings.get("reward__source") == "model":
        settings |= {"reward__model": "a/b", "reward__checkpoint": None}
    for device in (A100,) if lever.only_on else (A100, CPU):
        found = of(scene(where=cluster(device=device), **settings))
        assert 0 < found.step_seconds < math.inf and 0 < found.utilisation < 1
        assert min(found.seconds.values()) > 0

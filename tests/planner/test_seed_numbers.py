"""The figures of the source documents and of publications, each by the convention that gives it (docs/planner.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.planner.adapters import adapter_parameters
from fourfold.planner.architectures import Architecture
from fourfold.planner.conventions import (
    CONVENTIONS,
    activation_bytes,
    adapter_run,
    deepspeed_chat_bytes,
    devices_needed,
    four_models,
    torchtune_bytes,
    training_bytes,
    weight_bytes,
    zero_offload_bytes,
)
from fourfold.planner.hardware.machine import GB, GIB
from planner.scenes import LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_70B, MIXTRAL_8X7B, OPT

MISTRAL_7B = replace(LLAMA_2_7B, kv_heads=8, intermediate=14336)
LLAMA_65B = replace(LLAMA_2_70B, kv_heads=64, intermediate=22016)
SEVEN = 7 * 10**9  # "7B" as the estimates take it; Llama-2-7B has 6.74e9
QV, QKV = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")
QKVO = (*QKV, "o_proj")


@pytest.mark.parametrize(
    ("convention", "gigabytes"),
    [
        ("all in 16 bits", 56),
        ("mixed precision without masters", 84),
        ("mixed precision", 112),
        ("mixed precision, float32 gradients too", 140),
        ("float32 masters under autocast", 112),
    ],
)
def test_a_trained_7b_model_by_convention(convention: str, gigabytes: int) -> None:
    """The public estimators' four figures are four conventions, not four measurements."""
    assert training_bytes(SEVEN, convention) == gigabytes * GB


def test_the_source_documents_bill_of_a_7b_model() -> None:
    """14 GB of weights, 14 of gradients, 56 of moments; the float32 masters of 28 GB are left out of it."""
    one = CONVENTIONS["mixed precision without masters"]
    assert [each * SEVEN / GB for each in (one.weights, one.gradients, one.moments)] == [14, 14, 56]
    assert training_bytes(SEVEN, "mixed precision") - training_bytes(SEVEN) == 4 * SEVEN == 28 * GB


def test_four_models_of_7b() -> None:
    bill = four_models(SEVEN)
    assert bill["reference"] == bill["reward"] == 14 * GB
    assert bill["actor"] + bill["critic"] == 168 * GB
    assert bill["reference"] + bill["reward"] == 28 * GB


@pytest.mark.parametrize(
    ("model", "targets", "count"),
    [
        (LLAMA_2_7B, QV, 8_388_608),
        (LLAMA_2_7B, QKV, 12_582_912),
        (LLAMA_2_7B, QKVO, 16_777_216),
        (LLAMA_2_7B, (), 39_976_960),
        (MISTRAL_7B, QKVO, 13_631_488),
    ],
)
def test_adapters_of_rank_16(model: Architecture, targets: tuple[str, ...], count: int) -> None:
    """The 14 M of the source documents are none of Llama-2-7B's; Mistral-7B, with fewer KV heads, has 13.6 M."""
    assert adapter_parameters(model, 16, targets) == count


def test_fourteen_million_is_a_fifth_of_a_percent_of_seven_billion() -> None:
    assert pytest.approx(0.002) == 14e6 / SEVEN
    assert adapter_parameters(MISTRAL_7B, 16, QKVO) / MISTRAL_7B.parameters() == pytest.approx(0.0019, abs=0.0001)


def test_a_tenth_of_a_percent_of_70b_is_half_of_140_million() -> None:
    assert 0.001 * 70e9 == 70e6
    assert adapter_parameters(LLAMA_2_70B, 16, QKVO) == 65_536_000  # 0.095 %
    assert adapter_parameters(LLAMA_2_70B, 16) == 207_093_760  # 0.3 %


def test_adapters_lie_on_every_linear_layer_that_there_is() -> None:
    """OPT's MLP has two matrices; Mixtral has a router and eight experts of three; and on upper layers alone."""
    attention = 4 * (1024 + 1024)
    assert adapter_parameters(OPT["350M"], 1) == 24 * (attention + 2 * (1024 + 4096))
    grouped = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    mixed = 8 + 4096 + 8 * 3 * (4096 + 14336)
    assert adapter_parameters(MIXTRAL_8X7B, 1, layers=2) == 2 * (grouped + mixed)


def total(**settings: object) -> float:
    """Of a 70B model's adapters, GB."""
    return sum(adapter_run(LLAMA_2_70B, **settings).values()) / GB  # type: ignore[arg-type]


def test_70b_by_adapters_takes_200_to_240_gb() -> None:
    """One or two rows of 2,048 tokens without checkpointing above a base of 140 GB that all four models share."""
    assert 2 * 70 == 140 and weight_bytes(LLAMA_2_70B) / GB == pytest.approx(138, abs=0.1)
    one, two = (total(targets=QKVO, rows=rows) for rows in (1, 2))
    assert 180 < one < 200 < two < 240
    assert devices_needed(two * GB, 80 * GB) == 3
    assert devices_needed(one * GB, 80 * GB) == 3 and devices_needed(241 * GB, 80 * GB) == 4


def test_three_cards_have_no_tensor_parallel_layout_of_70b_and_four_have() -> None:
    """Why four A100 and three H100 of the same 80 GB: three hold it, with 64 heads only four divide it."""
    assert LLAMA_2_70B.heads % 4 == 0 and LLAMA_2_70B.heads % 3 and LLAMA_2_70B.kv_heads % 3


def test_a_reference_of_its_own_adds_a_base() -> None:
    shared, apart = total(rows=2), total(rows=2, frozen_copies=1)
    assert apart - shared == pytest.approx(138, abs=0.1)
    assert devices_needed(apart * GB, 80 * GB) == 5


def test_70b_in_four_bits_on_two_cards_and_on_one_with_checkpointing() -> None:
    """Two A100-80G without checkpointing; one with it, where reference and reward share the base or are offloaded."""
    assert weight_bytes(LLAMA_2_70B, "nf4") / GB == pytest.approx(36.4, abs=0.1)
    assert 80 < total(kind="nf4") < 160
    assert total(kind="nf4", checkpointing=True) < 48
    # With copies of reference and reward that are not offloaded it would not be one card.
    assert total(kind="nf4", checkpointing=True, frozen_copies=2) > 80


def test_13b_by_adapters_on_48_gb() -> None:
    fits = sum(adapter_run(LLAMA_2_13B, checkpointing=True).values())
    assert fits < 40 * GB
    assert sum(adapter_run(replace(LLAMA_2_13B, layers=80), checkpointing=True).values()) > 48 * GB  # a 26B


def test_65b_in_four_bits_takes_about_40_gb() -> None:
    """Dettmers et al. 2023, "QLoRA": one card of 48 GB; rows of 512 tokens, adapters on all linear layers."""
    found = adapter_run(LLAMA_65B, "nf4", tokens=512, checkpointing=True)
    one_role = found["base"] + found["adapters"] // 2 + found["activations"]
    assert one_role / GB == pytest.approx(40, abs=2)
    assert weight_bytes(LLAMA_65B) > 2 * 48 * GB


def test_activations_grow_with_the_square_of_the_length_only_where_attention_keeps_its_weights() -> None:
    """Half the tokens are half the bytes with fused attention; with eager attention nearly a third."""
    for fused, ratio in ((True, 0.5), (False, 0.32)):
        long, short = (activation_bytes(LLAMA_2_7B, 1, n, checkpointing=False, fused=fused) for n in (2048, 1024))
        assert short / long == pytest.approx(ratio, abs=0.02)


def test_zero_offload_trains_13b_on_a_v100_of_32_gb() -> None:
    """Ren et al. 2021, "ZeRO-Offload", abstract: 13 billion parameters on one V100; of 20 the weights are 40 GB."""
    assert zero_offload_bytes(13 * 10**9) == 26 * GB < 32 * GB
    assert zero_offload_bytes(20 * 10**9) > 32 * GIB
    assert training_bytes(13 * 10**9, "mixed precision") > 6 * 32 * GB


@pytest.mark.parametrize(
    ("card", "gib", "largest", "next_size"),
    [
        ("V100", 32, "2.7B", "6.7B"),
        ("A6000", 48, "6.7B", "13B"),
        ("A100", 40, "6.7B", "13B"),
        ("A100", 80, "13B", "30B"),
    ],
)
def test_the_largest_models_of_deepspeed_chat(card: str, gib: int, largest: str, next_size: str) -> None:
    """Table 3 of its announcement (microsoft/DeepSpeed, blogs/deepspeed-chat), OPT with a reward model of 350M."""
    assert deepspeed_chat_bytes(OPT[largest], OPT["350M"]) < gib * GB
    assert deepspeed_chat_bytes(OPT[next_size], OPT["350M"]) > gib * GIB


def test_torchtune_holds_four_7b_models_on_an_a100_of_80_gb() -> None:
    assert torchtune_bytes(MISTRAL_7B) / GB == pytest.approx(57.9, abs=0.1)
    assert torchtune_bytes(LLAMA_2_13B) > 80 * GIB
    assert four_models(SEVEN)["actor"] > 80 * GB  # one of them alone, with its states on the device


def test_mixtral_by_count() -> None:
    """46.7 B, and 12.9 B a token. "14B" is twice the 7 B of its name; by that count the whole would be 8 x 7 = 56 B."""
    assert MIXTRAL_8X7B.parameters() == 46_702_792_704
    assert MIXTRAL_8X7B.active_parameters() == 12_879_925_248
    assert 2 * SEVEN == 14e9 and 8 * SEVEN == 56e9
    # What the name's eight and two multiply is the experts only, 45.1 B of it.
    assert 32 * 8 * MIXTRAL_8X7B.expert_parameters == 45_097_156_608

"""The setting that saves most, by arithmetic that can be done by hand; every setting named exists."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from fourfold.config.describe import all_settings
from fourfold.config.loading import parse_config, with_settings
from fourfold.config.schema import RunConfig
from fourfold.planner.advice import RESUMABLE, Held, advice

PHASES = ("load", "generate", "score", "learn", "sft", "reward", "save")


def config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output": "runs/x",
        "model": {"path": "m"},
        "stages": ["ppo"],
        "data": {"prompts": {"path": "p.jsonl"}, "max_prompt_tokens": 8},
        "reward": {"source": "function", "function": "m:f"},
        "critic": {"init": "actor"},
        "precision": {"compute": "bfloat16"},
        "sampling": {"max_new_tokens": 24},
    }
    return parse_config(tree | sections, "test")


def by_setting(phase: str, held: Held, settings: RunConfig) -> dict[str, tuple[str, int]]:
    return {each.setting: (each.value, each.saves) for each in advice(phase, held, settings)}


STORED = {"source": "checkpoint", "checkpoint": "r"}
FOUR = {"actor": 400, "critic": 400, "reference": 400, "reward": 400}


def test_separate_models_would_share() -> None:
    """10 layers, branches of 4: 0.6 of one model in half the bytes, and 0.4 of everything that there is now."""
    held = Held(weights=FOUR, trained=800, gradients=400, states=1600, layers=10, own_layers=10, hidden=64)
    found = advice("load", held, config(sharing={"mode": "none"}, precision={"compute": "bfloat16"}))
    saves = {each.value: each.saves for each in found if each.setting == "sharing.mode"}
    assert saves['"trunk"'] == 3600 - (0.6 * 400 * 0.5 + 0.4 * 3600)
    assert saves['"adapters"'] == 3600 - (200 + 9 * 400 * 32 / 64)
    assert found[0].saves == max(saves.values())


def test_a_shorter_branch_halves_what_lies_above_the_trunk() -> None:
    held = Held(weights={"trunk": 1000, "actor": 100, "critic": 100, "reference": 50}, states=400, gradients=100)
    found = by_setting("load", held, config(trunk={"branch_layers": 4}))
    assert found["trunk.branch_layers"] == ("2", (250 + 500) // 2)
    assert found["memory.optimizer_residency"] == ('"park"', 400) and found["reference.residency"] == ('"park"', 50)
    parked = {"memory": {"optimizer_residency": "park"}}
    for compute, narrower in (("float32", 0), ("bfloat16", 100)):
        settings = config(trunk={"branch_layers": 4}, precision={"compute": compute}, **parked)
        found = by_setting("load", replace(held, trained=200), settings)
        assert found["memory.optimizer_residency"] == ('"offload"', 100 + narrower)
    for refused in ({"precision": {"compute": "float16"}}, {"trunk": {"branch_layers": 4, "train": True}}):
        found = by_setting("load", replace(held, trained=200), config(**parked, **refused))
        assert "memory.optimizer_residency" not in found


def test_no_advice_to_hold_a_trained_trunk_otherwise() -> None:
    held = Held(weights={"trunk": 1000, "trained trunk": 500, "actor": 100}, trained=600, matrix_shares=(1.0, 1.0))
    assert "precision.frozen" in by_setting("load", held, config(precision={"compute": "float32"}))
    trained = config(precision={"compute": "float32"}, trunk={"train": True})
    assert "precision.frozen" not in by_setting("load", held, trained)


def test_a_trunk_that_is_not_trained_needs_no_copy_gradients_or_moments() -> None:
    """Every trained byte has 700 / 700 of gradients and 1,400 / 700 of moments."""
    weights = {"trunk": 1000, "trained trunk": 500, "actor": 100, "critic": 100, "reference": 50}
    held = Held(weights=weights, trained=700, gradients=700, states=1400, trunk_layers=10, own_layers=2)
    found = by_setting("load", held, config(trunk={"branch_layers": 2, "train": True}))
    assert found["trunk.train"] == ("false", 500 + 500 + 1000)
    # Half of the branches: 250 of weights, 200 x 3 of what they learn with, less what the trunk takes over for both: a
    # trained copy with what it learns with, and a frozen one in bfloat16.
    assert found["trunk.branch_layers"] == ("1", (250 + 600 - 100 * (1 + 0.5 + 3)) // 2)
    held = Held(weights=weights, passing=1200, own_layers=2, trunk_layers=10)
    assert by_setting("learn", held, config())["memory.checkpointing"] == ('"layers"', 1100)


def test_checkpointing_keeps_one_layer_of_activations() -> None:
    held = Held(weights={"trunk": 10}, passing=1000, own_layers=4)
    found = by_setting("learn", held, config())
    assert found["memory.checkpointing"] == ('"layers"', 750)
    assert found["memory.activation_offload"] == ("true", 750)
    assert found["sampling.max_new_tokens"] == ("12", 375)
    assert "memory.checkpointing" not in by_setting("score", held, config())


def test_a_lever_that_is_on_is_not_proposed() -> None:
    held = Held(weights={"trunk": 10}, passing=1000, own_layers=4)
    on = config(memory={"checkpointing": "layers", "activation_offload": True})
    assert not {"memory.checkpointing", "memory.activation_offload"} & by_setting("learn", held, on).keys()


def test_models_of_their_own_are_parked_but_share_nothing() -> None:
    held = Held(weights=FOUR | {"reward": 9000}, states=1600, layers=10, own_layers=10, hidden=64)
    own: dict[str, Any] = {"source": "model", "model": "owner/judge"}
    found = by_setting("learn", held, config(sharing={"mode": "none"}, reward=own))
    assert found["reward.residency"] == ('"park"', 9000)
    without = by_setting(
        "learn", Held(FOUR | {"reward": 0}, states=1600, layers=10, own_layers=10), config(sharing={"mode": "none"})
    )
    assert found["sharing.mode"][1] <= without["sharing.mode"][1] < 9000
    engine = config(sharing={"mode": "none"}, reward=own | {"engine": "onnx"})
    assert "reward.residency" not in by_setting("learn", held, engine)
    fewer = {"precision.reference", "precision.reward"}
    held = replace(held, matrix_shares=(0.0, 0.9))
    assert fewer <= by_setting("learn", held, config(sharing={"mode": "none"}, reward=STORED)).keys()
    theirs = config(sharing={"mode": "none"}, reward=own, reference={"model": "owner/larger"})
    assert not fewer & by_setting("learn", held, theirs).keys(), "refused beside models of their own"


SUPERVISED: dict[str, dict[str, Any]] = {
    "sft": {"data": {"texts": {"path": "t.jsonl"}, "max_text_tokens": 64}},
    "reward": {
        "data": {"pairs": {"path": "t.jsonl"}, "max_text_tokens": 64},
        "reward": {"standardise": False},
        "critic": {},
    },
}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_supervised_stage_is_helped_by_its_own_settings(stage: str) -> None:
    """Not by those of ppo, which come later: its cache is of texts, and its optimizer is one."""
    held = Held(weights={"trunk": 10}, states=1600, cache=800, passing=200, own_layers=4)
    found = by_setting(stage, held, config(stages=[stage], **SUPERVISED[stage]))
    assert found["data.max_text_tokens"] == ("32", 500) and found[f"{stage}.optimizer"] == ('"adamw_8bit"', 1200)
    assert not [name for name in found if name.startswith(("ppo.", "sampling."))]


def test_a_step_within_the_backward_pass_is_proposed_where_its_conditions_hold() -> None:
    """Without clipping by the norm, and with mini-batches that are one pass: no gradients wait for the step."""
    held = Held(weights=FOUR, gradients=700)
    whole = {
        "ppo": {"max_grad_norm": 0.0, "mini_batch_size": 8, "micro_batch_size": 8},
        "critic": {"max_grad_norm": 0.0},
    }
    whole["critic"] |= {"init": "actor"}
    assert by_setting("learn", held, config(**whole))["memory.optimizer_in_backward"] == ("true", 700)
    for changes in (
        {"ppo": whole["ppo"] | {"micro_batch_size": 4}},
        {"memory": {"optimizer_residency": "offload"}},
        {},
    ):
        given = whole | changes if changes else {}
        assert "memory.optimizer_in_backward" not in by_setting("learn", held, config(**given))
    assert "memory.optimizer_in_backward" not in by_setting("generate", held, config(**whole))


@pytest.mark.parametrize(
    "settings",
    [
        {"reference": {"prior": "moving"}},
        {"sharing": {"mode": "none"}, "precision": {"compute": "float32", "reference": "int8"}},
        {"precision": {"compute": "float32", "frozen": "float16"}},
        {"precision": {"compute": "float16"}},
    ],
)
@pytest.mark.parametrize("phase", ["load", "generate", "score", "learn"])
def test_nothing_is_proposed_that_the_other_settings_refuse(settings: dict[str, Any], phase: str) -> None:
    """FAULTS J10."""
    held = Held(weights=FOUR | {"trunk": 500}, trained=100, gradients=200, states=1600, cache=90, passing=80, layers=10,
                own_layers=10, matrix_shares=(0.9, 0.9), hidden=64)  # fmt: skip
    given = config(**settings)
    proposed = advice(phase, held, given)
    assert proposed
    for each in proposed:
        with_settings(given, {each.setting: json.loads(each.value)})


def test_what_another_engine_or_the_host_holds_is_not_to_be_moved() -> None:
    """FAULTS J10: such advice would be refused."""
    held = Held(weights=FOUR, states=1600, layers=10, own_layers=10)
    separate: dict[str, Any] = {"sharing": {"mode": "none"}}
    assert "reference.residency" in by_setting("learn", held, config(**separate))
    engine = config(**separate, reference={"engine": "llama_cpp"})
    for phase in ("score", "learn"):
        assert "reference.residency" not in by_setting(phase, held, engine)
    paged = config(**separate, ppo={"optimizer": "paged_adamw"}, system={"device": "cuda"})
    assert "memory.optimizer_residency" not in by_setting("learn", held, paged)


@pytest.mark.parametrize("mode", ["none", "trunk", "adapters"])
def test_every_setting_that_is_proposed_exists_and_load_says_nothing_of_batches(mode: str) -> None:
    """FAULTS J5, J10."""
    weights = {"none": FOUR, "trunk": {"trunk": 900} | FOUR, "adapters": {"base": 900} | FOUR}[mode]
    held = Held(weights, 800, 400, 1600, 700, 900, 100, layers=8, own_layers=8, hidden=64)
    settings = config(
        sharing={"mode": mode}, precision={"compute": "float32"}, ppo={"mini_batch_size": 8, "micro_batch_size": 8}
    )
    named = {phase: set(by_setting(phase, held, settings)) for phase in PHASES}
    assert all(named.values())
    assert set(itertools.chain(*named.values())) | RESUMABLE <= all_settings().keys()
    assert not any("batch" in name or "max_new" in name for name in named["load"])
    for phase in PHASES:
        saves = [each.saves for each in advice(phase, held, settings)]
        assert saves == sorted(saves, reverse=True) and min(saves) > 0


def test_what_is_exact_can_be_switched_on_in_the_same_folder() -> None:
    held = Held(weights={"trunk": 10}, passing=1 << 20, own_layers=4)
    texts = {each.setting: str(each) for each in advice("learn", held, config())}
    assert texts["memory.checkpointing"] == 'memory.checkpointing = "layers" (about 0.8 MiB less)'
    assert "in a new output folder" in texts["sampling.max_new_tokens"]


def test_frozen_matrices_in_fewer_bits() -> None:
    """bfloat16 to NF4 (0.516 bytes) in what is shared, to int8 in what a role owns; not where it is on already."""
    weights = {"trunk": 1_000_000, "actor": 400_000, "critic": 400_000, "reference": 200_000, "reward": 100_000}
    held = Held(weights=weights, trained=800_000, matrix_shares=(0.5, 0.8), hidden=64)
    found = by_setting("score", held, config(reward=STORED))
    nf4, int8 = (64 * 64 / 2 + 64 + 4 + 4) / 64**2, 1 + 4 / 64
    assert found["precision.frozen"] == ('"nf4"', round(500_000 - 250_000 * nf4))
    assert found["precision.reference"] == ('"int8"', round(160_000 - 80_000 * int8))
    assert found["precision.reward"] == ('"int8"', round(80_000 - 40_000 * int8))
    on = {"compute": "float32", "frozen": "int8", "reference": "nf4"}
    found = by_setting("score", held, config(precision=on))
    assert "precision.frozen" not in found and "precision.reference" not in found
    # What is in fewer bits is not halved: the reward model is the only frozen weight left.
    assert found.get("precision.compute", ("", 0))[1] == max(900_000 - 800_000, 0) // 2

"""Predicted against measured seconds of a step's phases, on the machine that benchmarks/results are of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.planner.architectures import find_architecture
from fourfold.planner.bill import Footprint
from fourfold.planner.costs import costs
from fourfold.planner.scene import Lengths
from planner.scenes import CPU, cluster, scene

RESULTS = Path(__file__).parents[2] / "benchmarks/results/2026-11-30-2-x-amd-epyc-24-gib-no-gpu-peer.json"
SIDES = {
    "Fourfold separate float32": ("none", "float32"),
    "Fourfold trunk float32": ("trunk", "float32"),
    "Fourfold trunk bfloat16": ("trunk", "bfloat16"),
}
# Of both cores, as docs/log.md says: products of 1024 x 1024 at 101 and 450 GFLOP/s a core, copies at 38 GB/s.
MACHINE = replace(CPU, flops={"float32": 202e9, "bfloat16": 900e9}, bandwidth=38e9)


@pytest.mark.parametrize("side", SIDES)
def test_phases_take_the_share_of_a_step_that_was_predicted(side: str) -> None:
    """Within 25 % each: generate, score, learn of 16 rows, 4 + 24 tokens, 4 epochs of SmolLM2-135M."""
    found = json.loads(RESULTS.read_text())
    asked, figures = found["config"], {each["name"]: each["value"] for each in found["figures"]}
    measured = {phase: figures[f"{side}: {phase}"] for phase in ("generate", "score", "learn")}
    rows, mode = asked["batch"], SIDES[side]
    mean = figures[f"{side}: response tokens per update"] / rows
    planned = scene(
        find_architecture("smollm2-135m").architecture,
        cluster(device=MACHINE),
        Lengths(asked["prompt_tokens"], asked["new_tokens"], asked["prompt_tokens"], mean),
        sharing__mode=mode[0],
        precision__compute=mode[1],
        ppo__rollout_batch_size=rows,
        ppo__mini_batch_size=rows,
        ppo__micro_batch_size=rows,
        ppo__num_epochs=asked["epochs"],
    )
    seconds = costs(planned, Footprint(())).seconds
    for phase, measured_seconds in measured.items():
        share = measured_seconds / sum(measured.values())
        assert seconds[phase] / sum(seconds.values()) == pytest.approx(share, rel=0.25), phase  # type: ignore[index]
    assert sum(seconds.values()) == pytest.approx(sum(measured.values()), rel=0.25)

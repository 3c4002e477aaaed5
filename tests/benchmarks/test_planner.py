"""The benchmark of the planner: what its cases are, and what its table says."""

from __future__ import annotations

import pytest

from benchmarks.planner import CASES, Case, settings
from benchmarks.planner_models import SHAPES
from benchmarks.planner_table import planner_table
from benchmarks.results import Figure, Result
from fourfold.config.loading import parse_config
from fourfold.planner.levers import LEVERS


def figure(name: str, value: float, unit: str = "MiB", target: str | None = None) -> Figure:
    return Figure(name=name, value=value, unit=unit, spread=None, against=None, target=target)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_run(case: Case, tmp_path) -> None:
    config = parse_config(settings(case, tmp_path), "a test")
    assert case.model in SHAPES and config.memory.count_tensors
    assert config.ppo.rollout_batch_size % config.ppo.micro_batch_size == 0


def test_cases_are_many_and_cover_what_they_are_to_cover() -> None:
    """At least 24 configs: architectures x sharing x levers x precisions x batch shapes."""
    assert len(CASES) >= 24 and len({case.name for case in CASES}) == len(CASES)
    assert {"smollm2-135m", "llama", "qwen3", "gemma", "gpt2", "gpt_neox"} <= {case.model for case in CASES}
    said = {setting for case in CASES for setting in case.settings}
    here = [each for each in LEVERS if not each.only_on and each.name != "sdpa attention"]  # that is the default
    levers = {f'{key}="{value}"' for each in here for key, value in each.settings.items() if isinstance(value, str)}
    # Services need a second process, llama.cpp a package; overlapped scoring cannot be counted; float16 is held in
    # tests/planner. ONNX Runtime's bytes are in no bill, and dynamic int8 has those of int8.
    others = ("service", "llama_cpp", 'compute="float16"', "reward.source", "reward.engine", "int8_dynamic")
    left_out = {setting for setting in levers if any(other in setting for other in others)}
    of_roles = {f'precision.{role}="{kind}"' for role in ("reference", "reward") for kind in ("int8", "nf4")}
    assert levers - left_out <= said | of_roles


def test_the_table_shows_the_error_of_every_phase() -> None:
    phases = {"generate": (10.0, 11.0), "score": (20.0, 19.0), "learn": (40.0, 40.0)}
    figures = [figure("error of tensors, worst", 0.1, "share", "<= 0.15")]
    for phase, (measured, predicted) in phases.items():
        figures += [figure(f"a: {phase} measured", measured), figure(f"a: {phase} predicted", predicted)]
    result = Result(
        name="planner", date="2026-01-31", hardware="a machine", versions={"torch": "2"}, commit="0" * 40,
        config={"planner": ["a"]}, figures=tuple(figures),
    )  # fmt: skip
    assert planner_table(result) == [
        "* error of tensors, worst: 10.0% (target <= 0.15: met)",
        "",
        "| config | generate MiB | score MiB | learn MiB |",
        "|---|---|---|---|",
        "| a | 10.0 (+10.0%) | 20.0 (-5.0%) | 40.0 (+0.0%) |",
    ]

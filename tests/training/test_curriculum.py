"""A curriculum: responses and rollouts grow from step to step as the settings say, also after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fourfold.config import ConfigError
from fourfold.config.schema import CurriculumSection
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import Interrupted
from fourfold.rollout.prompts import PromptStream
from training.runs import (
    Tree,
    by_function,
    interrupt_at,
    make_config,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    steps_of,
)

GROWING: Tree = {
    "curriculum": {"steps": 3, "start_new_tokens": 2, "start_rollout_batch_size": 4},
    "sampling": {"max_new_tokens": 7, "extra_eos_token_ids": []},
    "ppo": {"rollout_batch_size": 16, "mini_batch_size": 4, "steps": 5},
}
LENGTHS, ROWS = [2, 3, 5, 7, 7], [4, 8, 12, 16, 16]


def growing(folder: Path, function: str = "pays_by_hash", **changes: Any) -> Tree:
    return settings(folder, merged(merged(by_function(function), GROWING), changes))


@given(st.integers(1, 60), st.integers(0, 90), st.integers(1, 40), st.integers(0, 60), st.sampled_from([1, 2, 3, 8]))
@examples(deadline=None)
def test_growth_starts_at_the_start_ends_at_the_end_and_never_falls(
    start: int, more: int, steps: int, step: int, unit: int
) -> None:
    """Within one of the straight line, less what rounding down to whole units takes."""
    first, last = unit * start, unit * (start + more)
    section = CurriculumSection(steps=steps)
    found = section.grown(first, last, step, unit)
    assert section.grown(first, last, 0, unit) == first and section.grown(first, last, steps, unit) == last
    assert found % unit == 0 and first <= found <= section.grown(first, last, step + 1, unit) <= last
    line = first + (last - first) * min(step / steps, 1.0)
    assert line - unit < found + 1e-9 and found <= line + 1e-9
    assert section.grown(0, last, step, unit) == last


def test_rows_and_lengths_of_each_step(tmp_path: Path) -> None:
    config = make_config(growing(tmp_path))
    assert [config.new_tokens_at(step) for step in range(5)] == LENGTHS
    assert [config.rows_at(step) for step in range(5)] == ROWS


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 8), st.booleans())
@examples(max_examples=60, deadline=None)
def test_optimizer_steps_are_those_of_every_step_counted(
    steps: int, grown: int, start: int, more: int, warmup: int, alternates: bool
) -> None:
    """Against a loop over the steps; schedules decay over this number."""
    assume(grown < steps and warmup < steps)
    mini, epochs = 4, 3
    whole = mini * (start + more)
    tree: Tree = {
        "output": "x",
        "stages": ["ppo"],
        "model": {"path": "m"},
        "data": {"prompts": {"path": "p.jsonl"}},
        "reward": {"source": "function", "function": "a:b"},
        "critic": {"init": "actor", "warmup_rollouts": warmup},
        "ppo": {"steps": steps, "rollout_batch_size": whole, "mini_batch_size": mini, "micro_batch_size": mini}
        | {"num_epochs": epochs},
    }
    if alternates:
        tree["trunk"] = {"train": True, "alternate": 1}
    if grown:
        tree["curriculum"] = {"steps": grown, "start_rollout_batch_size": mini * start}
    config = make_config(tree)
    actor = critic = 0
    for step in range(steps):
        for update in range(epochs * config.rows_at(step) // mini):
            turn = config.trunk.turn(update)
            actor += step >= warmup and turn != "critic"
            critic += step < warmup or turn != "actor"
    assert config.optimizer_steps == {"actor": actor, "critic": critic}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 9))
@examples(deadline=None)
def test_prompts_go_on_where_the_step_before_ended_whatever_the_sizes(
    sizes: list[int], per_prompt: int, count: int
) -> None:
    """One pass after the other, none left out or asked twice; a fresh stream asked for a late step agrees."""
    prompts = [[number] for number in range(count)]

    def stream() -> PromptStream:
        return PromptStream(
            prompts, seed=3, rows=lambda step: per_prompt * sizes[step % len(sizes)], responses_per_prompt=per_prompt
        )

    whole = stream()
    batches = [whole.batch(step) for step in range(2 * len(sizes))]
    asked = [ids for batch in batches for ids in batch.prompt_ids[::per_prompt]]
    for start in range(0, len(asked) - count + 1, count):
        assert sorted(asked[start : start + count]) == list(range(count))
    assert stream().batch(len(sizes)) == batches[len(sizes)]


def test_a_run_grows_and_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(growing(tmp_path)))
    rows = steps_of(trainer)
    assert [row["curriculum_new_tokens"] for row in rows] == LENGTHS
    assert [row["curriculum_rollout_rows"] for row in rows] == ROWS
    # A random model hardly ever draws the one EOS, so the longest response has the limit.
    assert [row["response_length_max"] for row in rows] == LENGTHS
    assert [row["episodes"] for row in rows] == [sum(ROWS[: step + 1]) for step in range(5)]
    assert [row["actor_optimizer_steps"] for row in rows] == [2 * count // 4 for count in ROWS]
    assert rows[-1]["optimizer_steps"] == trainer.config.optimizer_steps["actor"]


def test_evaluations_and_runs_without_a_curriculum_have_the_whole_length(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(growing(tmp_path)))
    assert trainer.evaluate().metrics["eval_mean_length"] == pytest.approx(7, abs=0.5)
    without = dict.fromkeys(GROWING["curriculum"])
    plain = make_trainer(make_config(growing(tmp_path, curriculum=without, output=str(tmp_path / "plain"))))
    [first, *_] = steps_of(plain)
    assert first["response_length_max"] == 7 and not [name for name in first if name.startswith("curriculum")]


# Pre-flight and the evaluation before the first step ask five times, the steps then 2, 4, 6, 8 and 8 times.
@pytest.mark.parametrize("call", [7, 13])
def test_an_interrupted_run_goes_on_at_the_same_place(tmp_path: Path, call: int) -> None:
    """Tensors, rows and counters of a run that was stopped while it grew are those of one that was not."""
    found = []
    for name, at in (("whole", 0), ("stopped", call)):
        tree = growing(tmp_path, "pays_and_interrupts", output=str(tmp_path / name))
        interrupt_at(at, "SIGTERM")
        if at:
            with pytest.raises(Interrupted):
                run(tree)
            assert 0 < len(read_jsonl(tmp_path / name / "ppo" / "metrics.jsonl")) < 6
            interrupt_at(0, "SIGTERM")
        run(tree)
        found.append(outcome(tmp_path / name))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"curriculum": {"steps": 5}}, "curriculum.steps: given 5, so that the whole size is never reached"),
        ({"curriculum": {"start_new_tokens": 8}}, "curriculum.start_new_tokens: given 8, but it grows to .* = 7"),
        ({"curriculum": {"start_rollout_batch_size": 6}}, "given 6; allowed: a multiple of 4"),
        (
            {"curriculum": {"steps": 0}},
            "curriculum.start_new_tokens: given, but curriculum.steps = 0 lets nothing grow",
        ),
        ({"curriculum": {"start_new_tokens": 0, "start_rollout_batch_size": 0}}, "so that nothing grows"),
        ({"ppo": {"length_penalty": 1.0, "length_range": [3, 6]}}, "shorter than the shortest response of"),
    ],
)
def test_what_cannot_grow_is_refused(tmp_path: Path, changes: Tree, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(growing(tmp_path, **changes))

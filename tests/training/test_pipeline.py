"""Whole runs through the public API: what they leave behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from diagnostics.stand_in_tracker import StandIn
from fourfold.diagnostics.run_state import read_state
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import RunFailed
from fourfold.scoring.sources import FunctionReward
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.pipeline import run_stages
from tiny import VOCABULARY, tiny_classifier, tiny_directory, tiny_tokenizer
from training.runs import (
    REWARD_TRAINED,
    SEPARATE,
    SHARINGS,
    Tree,
    by_function,
    make_config,
    make_trainer,
    merged,
    run,
    settings,
)

EVALUATED = {
    "score_mean",
    "kl_per_sequence",
    "ref_log_prob_per_token",
    "distinct_2",
    "mean_length",
    "eos_share",
}


def actor(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "ppo" / "model" / "model.safetensors")


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_whole_run_writes_the_summary(tmp_path: Path, sharing: str) -> None:
    summary = run(merged(settings(tmp_path), SHARINGS[sharing]))
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["before"].keys() >= EVALUATED and summary["after"].keys() >= EVALUATED
    assert summary["before"]["kl_per_sequence"] == 0.0
    assert 0.0 <= summary["reward_model"]["pair_accuracy"] <= 1.0
    for name in ("load", "sft", "reward", "ppo", "generate", "score", "learn", "save"):
        assert summary["seconds"][name] > 0 and summary["peak_bytes"][name] > 0, name
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("episodes", "tokens", "optimizer_steps"):
        counts = [row[name] for row in rows]
        assert counts == sorted(counts) and counts[0] > 0


def test_the_number_of_steps_is_the_number_of_rows(tmp_path: Path) -> None:
    """FAULTS F12, F13: every public number moves something."""
    for steps in (1, 4):
        tree = merged(settings(tmp_path), {"output": str(tmp_path / f"run{steps}"), "ppo": {"steps": steps}})
        run(tree)
        rows = read_jsonl(tmp_path / f"run{steps}" / "ppo" / "metrics.jsonl", "ppo_step")
        assert len(rows) == steps
        assert rows[-1]["optimizer_steps"] == steps * 2 * 2  # epochs x mini-batches


def test_without_held_out_data_a_run_ends_well(tmp_path: Path) -> None:
    """FAULTS N2."""
    without = dict.fromkeys(("texts_test", "pairs_test", "prompts_test"))
    tree = merged(settings(tmp_path), {"data": without, "evaluation": None})
    summary = run(tree)
    assert "before" not in summary and "reward_model" not in summary
    assert actor(tmp_path)


def test_stages_one_by_one_equal_the_whole(tmp_path: Path) -> None:
    whole = settings(tmp_path)
    run(whole)
    parts = merged(whole, {"output": str(tmp_path / "parts")})
    for stage in ("sft", "reward", "ppo"):
        run(merged(parts, {"stages": [stage]}))
    expected, found = actor(tmp_path), load_file(tmp_path / "parts" / "ppo" / "model" / "model.safetensors")
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_finished_stages_are_skipped(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    run(tree)
    before = (tmp_path / "run" / "ppo" / "model" / "model.safetensors").stat().st_mtime_ns
    run(tree)
    assert (tmp_path / "run" / "ppo" / "model" / "model.safetensors").stat().st_mtime_ns == before


def refused(folder: Path, changes: Tree, message: str) -> None:
    """The settings are refused before a model is loaded (this one has no weights) and before the folder is made."""
    tree = settings(folder, changes)
    (folder / "llama" / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        run(tree)
    assert not (folder / "run").exists()


def test_ppo_without_a_reward_model_says_what_to_run(tmp_path: Path) -> None:
    refused(tmp_path, {"stages": ["ppo"]}, "run the stage reward first")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "cannot be imported .ModuleNotFoundError"),
        ("training.runs:no_such_function", "cannot be imported .AttributeError: .*PYTHONPATH"),
        ("training.runs:REWARD_TRAINED", "is a tuple; allowed: a function"),
        ("breaks_when_imported:f", "cannot be imported .RuntimeError: no network here"),
    ],
)
def test_a_reward_function_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "breaks_when_imported.py").write_text("raise RuntimeError('no network here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    changes = merged(by_function("pays_for_a"), {"reward": {"function": name}})
    refused(tmp_path, changes, f"reward.function = '{name}' {message}")


def by_checkpoint(folder: Path) -> Tree:
    reward = {"source": "checkpoint", "checkpoint": str(folder)} | dict.fromkeys(REWARD_TRAINED)
    return {"stages": ["ppo"], "reward": reward, "data": dict.fromkeys(("pairs", "pairs_test"))}


def test_a_reward_checkpoint_is_looked_at_before_anything_is_loaded(tmp_path: Path) -> None:
    """By its record: its kind, the model and the cut, in the stored model as in a checkpoint of the stage."""
    made = settings(tmp_path, {"stages": ["sft", "reward"], "output": str(tmp_path / "made")})
    run(made)
    stages = tmp_path / "made"
    good = [stages / "reward" / "model", stages / "reward" / "checkpoints" / "step-00000004"]
    for folder in good:
        refused(tmp_path, by_checkpoint(folder) | {"trunk": {"branch_layers": 3}}, "made with branch_layers = 2, this")
        refused(tmp_path, by_checkpoint(folder) | SEPARATE, "made with sharing = 'trunk', this run has 'none'")
    for folder in (stages / "sft" / "model", stages / "sft" / "checkpoints" / "step-00000004"):
        refused(tmp_path, by_checkpoint(folder), "made with kind = 'policy', this run has 'scorer'")
    refused(tmp_path, by_checkpoint(stages), "reward.checkpoint: no stored role at .*allowed: the folder reward/model")
    (good[0] / "model.safetensors").unlink()
    (good[1] / "role.safetensors").unlink()
    for folder in good:
        refused(tmp_path, by_checkpoint(folder), "reward.checkpoint: no stored role at ")


def test_a_reward_model_that_is_to_start_from_an_sft_needs_one(tmp_path: Path) -> None:
    """Asked for, it is an error; by default the base stands in and the run says so."""
    asked = {"stages": ["reward"], "reward": {"init": "sft"}}
    refused(tmp_path, asked, "reward.init: given 'sft', but stages has no sft")
    (tmp_path / "llama").rename(tmp_path / "broken")
    said: list[str] = []
    run_stages(make_config(settings(tmp_path, {"stages": ["reward"]})), said.append)
    assert "reward.init: there is no stage sft, so the reward model starts from the base model" in said
    base = merged(asked, {"reward": {"init": "base"}, "output": str(tmp_path / "base")})
    said.clear()
    run_stages(make_config(settings(tmp_path, base)), said.append)
    assert not any(line.startswith("reward.init") for line in said)
    stored = [load_file(tmp_path / name / "reward" / "model" / "model.safetensors") for name in ("run", "base")]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[1])

    for stages in (["sft"], ["reward"], ["reward"]):  # the last one is finished
        run(settings(tmp_path, merged(asked, {"stages": stages, "output": str(tmp_path / "sft")})))
    begun = load_file(tmp_path / "sft" / "reward" / "model" / "model.safetensors")
    assert not all(torch.equal(begun[name], stored[1][name]) for name in begun)


def test_the_whole_of_ppo_is_announced(tmp_path: Path) -> None:
    said: list[str] = []
    changes = {"critic": {"warmup_rollouts": 1}, "sampling": {"responses_per_prompt": 2}}
    run_stages(make_config(settings(tmp_path, merged(by_function("pays_for_a", steps=2), changes))), said.append)
    assert said[3] == (
        "ppo: 2 steps x 8 = 16 responses to 8 prompts (0.3 times the 30 given); 4 optimizer steps of the actor, 8 of "
        "the critic"
    )
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert rows[-1]["episodes"] == 16 and rows[-1]["optimizer_steps"] == 4
    assert sum(row["critic_optimizer_steps"] for row in rows) == 8


def test_a_reward_function_needs_no_other_stage(tmp_path: Path) -> None:
    summary = run(merged(settings(tmp_path), by_function("pays_for_a")))
    assert summary["after"]["score_mean"] >= 0


def test_failed_scores_stop_the_run_or_are_dropped(tmp_path: Path) -> None:
    """FAULTS M5: None is never learned from as a number."""
    tree = merged(settings(tmp_path), by_function("pays_none_for_some"))
    with pytest.raises(RunFailed, match="no valid score"):
        run(tree)
    tree = merged(tree, {"output": str(tmp_path / "dropped"), "reward": {"on_failure": "drop"}})
    run(tree)
    rows = read_jsonl(tmp_path / "dropped" / "ppo" / "metrics.jsonl", "ppo_step")
    assert sum(row["invalid_scores"] for row in rows) > 0
    assert all(row["dropped_rows"] == row["invalid_scores"] for row in rows)


def test_a_function_alone_has_a_time_limit(tmp_path: Path) -> None:
    reward = {"function": "training.runs:pays_after_a_while", "timeout_seconds": 0.05, "retries": 0}
    with pytest.raises(RunFailed, match=r"no answer within reward\.timeout_seconds = 0\.05"):
        run(merged(settings(tmp_path, by_function("pays_for_a", steps=1)), {"reward": reward}))


def test_a_run_says_how_it_ended(tmp_path: Path) -> None:
    tree = merged(settings(tmp_path), by_function("pays_none_for_some"))
    with pytest.raises(RunFailed):
        run(tree)
    state = read_state(tmp_path / "run")
    assert (state.state, state.stages) == ("failed", ("ppo",)) and "no valid score" in state.said
    run(merged(tree, {"output": str(tmp_path / "other"), "reward": {"on_failure": "drop"}}))
    assert read_state(tmp_path / "other").state == "finished"


def test_a_failed_score_is_no_number_in_the_metrics_either(tmp_path: Path) -> None:
    """FAULTS M5: mean, spread and range are those of the valid scores; None does not count as 0."""
    changes = merged(by_function("pays_for_a", steps=1), {"reward": {"on_failure": "drop"}})
    trainer = make_trainer(make_config(merged(settings(tmp_path), changes)))
    given: list[float] = []

    def high_or_none(prompts: list[str], responses: list[str]) -> list[float | None]:
        numbers = [None if i % 2 else 10.0 + len(response) for i, response in enumerate(responses)]
        given.extend(number for number in numbers if number is not None)
        return numbers

    trainer.reward = FunctionReward(high_or_none, trainer.models.base.tokenizer, retries=0)
    row = trainer.step()
    assert row["invalid_scores"] == row["dropped_rows"] == len(given) == 4
    scores = torch.tensor(given)
    assert row["score_mean"] == pytest.approx(float(scores.mean()))
    assert row["score_std"] == pytest.approx(float(scores.std(unbiased=False)))
    assert (row["score_raw_min"], row["score_raw_max"]) == (min(given), max(given))


def test_a_metric_that_no_evaluation_has_cannot_choose_the_best(tmp_path: Path) -> None:
    """Refused before anything is loaded, with the nearest name."""
    for given, hint in (
        ("eval_scor_mean", "did you mean 'eval_score_mean'"),
        ("eval_judge_mean", "allowed with these"),
        ("eval_kl_step_0_per_sequence", "allowed with these"),
        ("eval_step_0_log_prob_per_token", "allowed with these"),
    ):
        tree = merged(settings(tmp_path), {"checkpoint": {"best_metric": given}})
        with pytest.raises(ValueError, match=f"checkpoint.best_metric: given '{given}'; .*{hint}"):
            run(tree)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("mode", "choose"), [("min", min), ("max", max)])
def test_the_best_checkpoint_is_that_of_the_named_metric(
    tmp_path: Path, mode: str, choose: Callable[[list[float]], float]
) -> None:
    """The shortest or longest mean length, over evaluations of every step; the last step is kept beside it."""
    checkpoint = {"best_metric": "eval_mean_length", "best_mode": mode, "every": 4, "keep_last": 1}
    changes = {"checkpoint": checkpoint, "evaluation": {"every": 1}, "ppo": {"steps": 4, "learning_rate": 1e-2}}
    run(merged(settings(tmp_path), merged(by_function("pays_for_a"), changes)))
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "evaluation")
    lengths = [row["eval_mean_length"] for row in rows]
    best = CheckpointStore(tmp_path / "run" / "ppo" / "checkpoints", keep_last=1).load_best()
    assert len(set(lengths)) > 1
    assert best is not None and best.step == 1 + lengths.index(choose(lengths))


def test_tensorboard_gets_every_row(tmp_path: Path) -> None:
    """FAULTS N4."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(merged(settings(tmp_path), merged(by_function("pays_for_a"), {"tracking": {"trackers": ["tensorboard"]}})))
    found = events.EventAccumulator(str(tmp_path / "run" / "ppo" / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("ppo_step/score_mean")] == [1, 2, 3]
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert {f"ppo_step/{name}" for name in rows[0].keys() - {"kind", "step"}} <= set(found.Tags()["scalars"])


def test_a_tracker_of_another_project_gets_every_row_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    tracking = {"tracking": {"trackers": ["wandb"], "project": "small models"}}
    run(merged(settings(tmp_path), merged(by_function("pays_for_a"), tracking)))
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    sent = {step: row["ppo_step/score_mean"] for step, row in tracker.rows if "ppo_step/score_mean" in row}
    assert sent == {row["step"]: row["score_mean"] for row in rows} and len(sent) == 3
    [asked] = tracker.asked
    assert (asked["project"], asked["name"], asked["config"]["ppo"]["steps"]) == ("small models", "run", 3)


def test_a_changed_reference_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(merged(settings(tmp_path), by_function("pays_for_a", steps=2))))
    trainer.step()
    trainer.save(is_best=False)
    with torch.no_grad():
        next(trainer.models.reference.branch.parameters()).add_(1e-3)
    with pytest.raises(RunFailed, match="trunk, reference or reward have changed"):
        trainer.save(is_best=False)
    checkpoint = trainer.store.latest()
    assert checkpoint is not None and checkpoint.step == 1


def test_an_exception_in_a_callback_is_not_swallowed(tmp_path: Path) -> None:
    """FAULTS N3."""
    seen: list[int] = []

    def callback(step: int, row: dict[str, float]) -> None:
        seen.append(step)
        if step == 2:
            raise KeyError("mine")

    config = make_config(merged(settings(tmp_path), by_function("pays_for_a", steps=3)))
    with pytest.raises(KeyError, match="mine"):
        make_trainer(config, callbacks=(callback,)).run()
    assert seen == [1, 2]


@pytest.mark.parametrize(
    "changes", [{"trunk": {"branch_layers": 4}}, {"sampling": {"extra_eos_token_ids": [999]}}], ids=["trunk", "eos"]
)
def test_what_the_model_does_not_allow_leaves_no_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Mended settings would be other settings than those of a folder that was taken."""
    with pytest.raises(ValueError, match="allowed"):
        run(settings(tmp_path, changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("role", ["layers", "critic", "labels", "reference"])
def test_what_ppo_refuses_is_refused_before_the_stages_before_it(tmp_path: Path, role: str) -> None:
    """A critic or a reference that does not go with the model: nothing is trained, and no folder is taken."""
    other = tiny_directory(tmp_path / "other", layers=1, hidden=16)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"].pop("".join(content["model"]["merges"].pop()))
    (other / "tokenizer.json").write_text(json.dumps(content))
    labels = tiny_classifier(tmp_path / "labels", "llama", labels=("A", "B"))
    tiny_tokenizer(pad_is_eos=False).save_pretrained(labels)
    classifier = AutoModelForSequenceClassification.from_pretrained(labels)
    classifier.resize_token_embeddings(VOCABULARY)
    classifier.save_pretrained(labels)
    changes: dict[str, tuple[Tree, str]] = {
        "layers": ({"critic": {"layers": 99}}, "^critic.layers: given 99 of the model's 4 layers; allowed: 2 to 3"),
        "critic": ({"critic": {"model": str(other)}}, "^critic.model = .*another vocabulary"),
        "labels": ({"critic": {"model": str(labels)}}, "a sequence classifier with 2 labels"),
        "reference": ({"reference": {"model": str(other), "log_step_0": False}}, "^reference.model: .*another vocab"),
    }
    given, said = changes[role]
    tree = settings(tmp_path, {"critic": {"init": None}} if role in ("critic", "labels") else {})
    with pytest.raises(ValueError, match=said):
        run(merged(tree, given))
    assert not (tmp_path / "run").exists()

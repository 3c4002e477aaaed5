"""Variants side by side: shared stages once, finished runs skipped, failures told, numbers that are the runs' own."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.cli.study import NAMES
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.errors import Interrupted
from fourfold.training.folder import RunFolder
from fourfold.training.studies import STUDIES, Measure
from fourfold.training.study import Asked, plan, run_study
from training.runs import INTERRUPT, Tree, by_function, interrupt_at, make_config, merged, settings, write_config

SMALL: Tree = {
    "sft": {"max_texts": 8, "batch_size": 4},
    "reward": {"max_pairs": 8, "batch_size": 4, "standardise": False},
    "data": {"texts_test": {"max_rows": 4}, "pairs_test": {"max_rows": 4}},
    "checkpoint": {"every": 2, "stage_every": 1},
    "ppo": {"steps": 2, "learning_rate": 5e-3, "num_epochs": 1, "rollout_batch_size": 4, "mini_batch_size": 4},
    "evaluation": {"max_prompts": 4},
}


def tree_of(folder: Path, *changes: Tree) -> Tree:
    tree = settings(folder)
    for change in (SMALL, *changes):
        tree = merged(tree, change)
    return tree


def study(name: str, tree: Tree, **asked: Any) -> dict[str, Any]:
    return run_study(STUDIES[name], make_config(tree), Asked(**asked), said.append)


said: list[str] = []


def test_variants_share_their_stages_and_are_runs_of_their_own(tmp_path: Path) -> None:
    """Curves and means are those of the runs' own files; a second call carries nothing out."""
    tree, root = tree_of(tmp_path), tmp_path / "run-prior"
    asked: dict[str, Any] = {"variants": ["step-0", "moving-average", "older-sft"], "seeds": [0, 1]}
    report = study("prior", tree, **asked)
    assert list(report["variants"]) == asked["variants"] and report["seeds"] == [0, 1]
    assert json.loads((root / "study.json").read_text()) == json.loads(json.dumps(report))
    shared = root / "shared"
    assert RunFolder(shared).finished("reward") is not None and not (shared / "ppo").exists()
    for name, variant in report["variants"].items():
        finals: dict[str, list[float]] = {}
        for seed, run in enumerate(variant["runs"]):
            folder = RunFolder(root / name / f"seed-{seed}")
            assert run["status"] == "done" and run["output"] == str(folder.root) and run["seconds"] > 0
            assert (folder.root / "sft").resolve() == shared / "sft" and folder.finished("ppo") is not None
            rows = read_jsonl(folder.root / "ppo" / "metrics.jsonl")
            after = [row for row in rows if row["kind"] == "evaluation"][-1]
            key = "eval_kl_per_sequence" if name == "step-0" else "eval_kl_step_0_per_sequence"
            assert run["final"]["kl_step_0"] == after[key] and run["curves"]["kl_step_0"][-1] == (2, after[key])
            assert run["curves"]["kl_step_0"][0] == (0, pytest.approx(0, abs=1e-4))
            assert run["final"]["text_nll"] == after["eval_text_nll_per_token"] > 0
            for measure, value in run["final"].items():
                finals.setdefault(measure, []).append(value)
        assert variant["mean"] == pytest.approx({key: mean(values) for key, values in finals.items()})
        assert variant["std"] == pytest.approx({key: stdev(values) for key, values in finals.items()})
        assert variant["std"]["score"] > 0, "seeds differ"
    starts = {name: variant["runs"][0]["curves"]["score"][0][1] for name, variant in report["variants"].items()}
    assert len(set(starts.values())) == 1, "all start from the same policy, with the same random numbers"
    made = {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")}
    again = study("prior", tree, **asked)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")} == made
    assert again["variants"] == report["variants"]


def by_function_of(name: str, folder: Path) -> Tree:
    function = merged(by_function(name, steps=3), {"sft": None, "checkpoint": {"stage_every": 50}})
    return merged(settings(folder), merged(function, {"ppo": {"num_epochs": 1}}))


def test_an_interrupted_study_goes_on_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERRUPT, "0:")
    tree = by_function_of("pays_and_interrupts", tmp_path)
    asked: dict[str, Any] = {"variants": ["step-0", "uniform"]}
    undisturbed = study("prior", tree, output=str(tmp_path / "undisturbed"), **asked)
    interrupt_at(CALLS_OF_A_STUDIED_RUN + 10, "SIGTERM")
    with pytest.raises(Interrupted):
        study("prior", tree, output=str(tmp_path / "stopped"), **asked)
    partly = json.loads((tmp_path / "stopped" / "study.json").read_text())
    assert list(partly["variants"]) == ["step-0"]
    found = study("prior", tree, output=str(tmp_path / "stopped"), **asked)
    for name, variant in undisturbed["variants"].items():
        assert found["variants"][name]["runs"][0]["curves"] == variant["runs"][0]["curves"], name


def fails_after_a_run(prompts: list[str], responses: list[str]) -> list[float]:
    """A function that a service might be: it answers one variant's run and is gone then."""
    calls.append(None)
    if len(calls) > CALLS_OF_A_STUDIED_RUN:
        raise ConnectionError("gone")
    return [float(len(response)) for response in responses]


calls: list[None] = []
# Micro-batches of pre-flight, of the evaluation before, and of three steps with an evaluation each.
CALLS_OF_A_STUDIED_RUN = 1 + 4 + 3 * (4 + 4)


def test_a_variant_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls.clear()
    function = {"reward": {"function": "training.test_study:fails_after_a_run", "retries": 0}}
    path = write_config(merged(by_function_of("pays_by_hash", tmp_path), function), tmp_path / "study.toml")
    assert main(["study", "critic-init", str(path), "--output", str(tmp_path / "out")]) == 3
    report = json.loads((tmp_path / "out" / "study.json").read_text())
    runs = {name: variant["runs"][0] for name, variant in report["variants"].items()}
    assert list(runs) == ["actor", "base"], "a function is no reward model that a critic could be made from"
    assert runs["actor"]["status"] == "done" and runs["base"]["status"] == "failed"
    assert "gone" in runs["base"]["error"] and report["variants"]["base"]["mean"] == {}
    told = capsys.readouterr()
    assert "runs that failed" in told.out and "study.html has the curves" in told.out


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_is_a_configuration_that_a_run_accepts(tmp_path: Path, name: str) -> None:
    config = make_config(tree_of(tmp_path))
    planned = plan(STUDIES[name], config, Asked(), tmp_path / "out")
    assert len(planned) >= 3 and len({each.variant.name for each in planned}) == len(planned)
    resolved = [each.run(7, tmp_path).model_dump(exclude={"output"}) for each in planned]
    assert all(resolved.count(each) == 1 for each in resolved), "variants differ"
    shared = {each.variant.name: each.shared and each.shared.folder for each in planned}
    assert (len(set(shared.values())) == 1) == (name != "sharing")
    if name == "sharing":
        assert shared["frozen-trunk"] == shared["shared-trunk"] == shared["actors-trunk"] != shared["separate"]


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_asked_for_changes_no_folder_of_shared_stages(tmp_path: Path, name: str) -> None:
    """One variant after all, or the other way round, in one output: the same folders and settings of theirs."""
    config, out = make_config(tree_of(tmp_path)), tmp_path / "out"
    together = {each.variant.name: each.shared for each in plan(STUDIES[name], config, Asked(), out)}
    for variant, shared in together.items():
        [alone] = plan(STUDIES[name], config, Asked(variants=[variant]), out)
        assert alone.shared == shared and shared is not None
    assert tuple(STUDIES) == NAMES


@pytest.mark.parametrize(
    ("name", "changes", "asked", "message"),
    [
        ("prior", {}, {"variants": ["unifrom"]}, r"--variants: given unifrom; allowed for study prior .*: step-0, uni"),
        ("prior", {"data": {"prompts_test": None}, "evaluation": None}, {}, r"give \[data.prompts_test\] with a path"),
        ("prior", {"stages": ["sft"]}, {}, r"stages are \['sft'\]; variants are compared in ppo; add it"),
        ("prior", {"precision": {"reference": "bfloat16"}}, {}, r"variant uniform: .*precision.reference"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, name: str, changes: Tree, asked: dict[str, Any], message: str
) -> None:
    """Before anything is carried out."""
    with pytest.raises(ValueError, match=f"(?s){message}"):
        study(name, tree_of(tmp_path, changes), **asked)
    assert not (tmp_path / f"run-{name}").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0", "1", "0"], "--seeds: given 0 more than once; allowed: each once"),
        (["--seeds", "-1", "-1"], "--seeds: given -1, -1; allowed: numbers from 0 on, each once"),
        (["--variants", "uniform", "uniform"], "--variants: given uniform more than once; allowed: each once"),
    ],
)
def test_what_is_asked_for_twice_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "prior", "no-file", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_neither_a_configuration_nor_a_place_for_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a-run"
    folder.mkdir()
    path = write_config(by_function_of("pays_by_hash", tmp_path), folder / "config.toml")
    assert main(["study", "prior", str(folder)]) == 2
    assert f"a folder; allowed: a TOML file of settings, such as {path}" in capsys.readouterr().err
    assert main(["study", "prior", str(path), "--output", str(folder)]) == 2
    assert f"--output: {folder} is the folder of a run (it has config.toml)" in capsys.readouterr().err
    assert [each.name for each in folder.iterdir()] == ["config.toml"]


def test_a_measure_takes_the_first_metric_that_a_row_has() -> None:
    measure = Measure("m", "", "", "evaluation", ("eval_b", "eval_a"), sign=-1.0)
    rows = [
        {"kind": "evaluation", "step": 2, "eval_a": 3.0},
        {"kind": "ppo_step", "step": 3, "eval_a": 9.0},
        {"kind": "evaluation", "step": 4, "eval_a": 3.0, "eval_b": 0.0},
    ]
    points = measure.points(rows, {"a": 1.0})
    assert points == [(0, -1.0), (2, -3.0), (4, 0.0)] and measure.final(points) == 0.0
    steps = Measure("m", "", "", "ppo_step", ("a",))
    every = [{"kind": "ppo_step", "step": step, "a": step} for step in range(1, 9)]
    assert steps.final(steps.points(every, {"a": 1.0})) == 7.5, "the mean of the last quarter"
    assert steps.final([]) is None and steps.points(rows, {"a": 1.0}) == []

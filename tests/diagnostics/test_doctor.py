"""`fourfold doctor`: no false alarm on healthy runs, runs in every state, and what could not be judged."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from diagnostics import patients
from diagnostics.patients import by, by_parts, examined, found, patient
from fourfold.cli.main import main
from fourfold.config.describe import all_settings
from fourfold.diagnostics.doctor import DIAGNOSES, examine
from fourfold.diagnostics.doctor.verdict import Finding
from fourfold.diagnostics.run_state import noted_state
from fourfold.errors import Interrupted
from tiny import tiny_directory
from training.runs import Tree, merged

SEEDS = range(5)
FAMILIES = ("critic", "policy", "reward", "system")


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    examined(patient(folder))
    return folder / "run"


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed])
def test_a_healthy_run_raises_no_alarm(tmp_path: Path, seed: int) -> None:
    """No alarm of any severity; with seed 0 in the next test these are five."""
    examination = examined(patient(tmp_path, seed=seed))
    found(examination)
    assert {verdict.name for verdict in examination.verdicts} == {f"{family} healthy" for family in FAMILIES}


def test_a_healthy_run_is_told_so(healthy_run: Path) -> None:
    examination = examine(healthy_run)
    found(examination)
    verdicts = {verdict.name: verdict for verdict in examination.verdicts}
    assert verdicts.keys() == {f"{family} healthy" for family in FAMILIES}
    assert all(verdict.severity == "good" and not verdict.remedy for verdict in verdicts.values())
    assert "Spearman" in verdicts["critic healthy"].evidence
    start = "before the first step |log ratio| was 0.0e+00 and KL 0.0e+00"
    assert start in verdicts["policy healthy"].evidence, "FAULTS N9"
    assert examination.state == "finished, 15 of 15 steps"


def test_a_run_with_its_trunk_trained_is_healthy_too(tmp_path: Path) -> None:
    """The drift is there, and small."""
    found(examined(patient(tmp_path, changes={"trunk": {"train": True}})))


def test_the_command_prints_a_table_and_leaves_0(healthy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(healthy_run)]) == 0
    out = capsys.readouterr().out
    assert "good: critic healthy" in out and "not judged:" in out and "trunk drift" in out


def test_the_command_prints_json(healthy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(healthy_run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"state", "verdicts", "unjudged"}
    expected = {"name", "severity", "evidence", "confidence", "remedy", "steps"}
    assert all(verdict.keys() == expected for verdict in told["verdicts"])


def test_what_is_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_log_that_is_none_is_bad_input(healthy_run: Path, tmp_path: Path) -> None:
    run = copied(healthy_run, tmp_path)
    (run / "ppo" / "metrics.jsonl").write_text("no row\nno row either\n", encoding="utf-8")
    assert main(["doctor", str(run)]) == 2


def test_a_run_that_goes_on_is_read_as_far_as_it_is(healthy_run: Path, tmp_path: Path) -> None:
    """Its last row is half written, and files of the coming evaluation may be there already."""
    run = copied(healthy_run, tmp_path)
    log = run / "ppo" / "metrics.jsonl"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= 12]
    log.write_text("\n".join(lines) + '\n{"kind": "ppo_step", "st', encoding="utf-8")
    with noted_state(run, ["ppo"]):
        examination = examine(run)
    assert examination.state == "running, 12 of 15 steps"
    [critic] = [verdict for verdict in examination.verdicts if verdict.name.startswith("critic")]
    assert critic.steps[1] <= 12


def test_an_interrupted_run_says_by_what(healthy_run: Path, tmp_path: Path) -> None:
    run = copied(healthy_run, tmp_path)
    with contextlib.suppress(Interrupted), noted_state(run, ["ppo"]):
        raise Interrupted("stopped after step 15 of 20")
    examination = examine(run)
    assert examination.state == "interrupted, 15 of 15 steps: stopped after step 15 of 20"
    found(examination)


def test_without_kept_rollouts_it_says_what_it_could_not_judge(healthy_run: Path, tmp_path: Path) -> None:
    run = copied(healthy_run, tmp_path)
    for name in ("evaluations", "rollouts"):
        shutil.rmtree(run / "ppo" / name)
    examination = examine(run)
    found(examination)
    reasons = {each.name: each.reason for each in examination.unjudged}
    by_rollouts = {"critic underfit: bias", "critic underfit: variance", "critic length bias"}
    by_rollouts |= {"critic healthy", "reward hacking", "reward saturation", "reward outliers", "stale data"}
    assert by_rollouts <= reasons.keys()
    assert all("keep_rollouts" in reasons[name] for name in by_rollouts)
    assert not {"critic plateau", "entropy collapse", "KL runaway"} & reasons.keys()


def test_a_damaged_rollout_is_named_and_the_rest_is_judged(healthy_run: Path, tmp_path: Path) -> None:
    run = copied(healthy_run, tmp_path)
    file = run / "ppo" / "evaluations" / "step-000015.parquet"
    file.write_bytes(file.read_bytes()[:100])
    examination = examine(run)
    found(examination)
    reasons = {each.name: each.reason for each in examination.unjudged}
    assert "step-000015.parquet: not a readable Parquet file" in reasons["reward hacking"]
    assert "policy healthy" in {verdict.name for verdict in examination.verdicts}


def test_before_the_first_step_nothing_is_judged(healthy_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(healthy_run / "config.toml", run)
    examination = examine(run)
    found(examination)
    assert examination.state == "unknown, 0 of 15 steps"


def test_every_diagnosis_is_declared_in_full_once() -> None:
    names = [each.name for each in DIAGNOSES]
    assert len(set(names)) == len(names) >= 26
    for each in DIAGNOSES:
        assert all((each.meaning, each.formula, each.remedy)) and each.severity != "good"
        assert each.meaning.endswith(".") and each.formula.endswith(".") and each.remedy.endswith("."), each.name


def test_every_disease_has_a_run_that_was_made_ill() -> None:
    """Not one that only may have it: `found` is told those by name."""
    expected: set[object] = set()
    for path in Path(__file__).parent.glob("test_doctor_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "found":
                expected |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    assert {each.name for each in DIAGNOSES} - expected == set()


@pytest.mark.parametrize("verdict", [each.name for each in DIAGNOSES])
def test_every_setting_that_a_remedy_names_exists(verdict: str) -> None:
    """FAULTS J10: of the declarations."""
    [each] = [each for each in DIAGNOSES if each.name == verdict]
    named = re.findall(r"`([a-z]+\.[a-z_]+)`", f"{each.formula} {each.remedy}")
    known = {*all_settings(), *(name.rpartition(".")[0] for name in all_settings())}
    assert known >= set(named), named


OTHERS: dict[str, Tree] = {
    "a critic of its own": {"critic": {"init": None, "model": "other"}},
    "parts": by_parts(one=by("healthy"), two=by("noise", weight=0.1)),
    "parts that drop rows": by_parts(one=by("healthy", on_failure="drop"), two=by("noise", weight=0.1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_remedies_are_settings_of_other_runs_too(tmp_path: Path, name: str) -> None:
    """FAULTS J10: `examined` tries the proposals of every diagnosis on the run's own settings; here on more kinds."""
    changes = OTHERS[name]
    if "critic" in changes:
        tiny_directory(tmp_path / "other", layers=2, seed=7)
        changes = merged(changes, {"critic": {"model": str(tmp_path / "other")}})
    assert examined(patient(tmp_path, changes=changes, steps=6)).verdicts


def test_a_remedy_that_the_settings_refuse_is_noticed(healthy_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Finding("", 1.0, "critic.layers = 99; critic.model = 'x'  # nonsense", (1, 1))
    false = replace(DIAGNOSES[0], judge=lambda records: wrong, remedy="Set `critic.layers` and `critic.model`.")
    monkeypatch.setattr(patients, "DIAGNOSES", (*DIAGNOSES, false))
    [refused] = patients.refused_remedies(healthy_run, patient(healthy_run.parent))
    assert "critic.layers" in refused
    monkeypatch.setattr(patients, "DIAGNOSES", (replace(false, remedy="Set `critic.layers`."),))
    with pytest.raises(AssertionError, match=r"critic\.model"):
        patients.refused_remedies(healthy_run, patient(healthy_run.parent))

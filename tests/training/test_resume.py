"""An interrupted run, gone on with, ends exactly as one that was left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.errors import Interrupted
from training.runs import (
    INTERRUPT,
    SHARINGS,
    Tree,
    by_function,
    interrupt_at,
    merged,
    outcome,
    run,
    settings,
    write_config,
)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
# Everything that carries state: running moments, the adaptive controller, schedules, both optimizers, the best metric.
STATEFUL: Tree = {
    "sft": {"schedule": "cosine", "warmup_steps": 1, "max_texts": 28},
    "reward": {"schedule": "linear"},
    "critic": {"schedule": "linear", "warmup_rollouts": 1},
    "ppo": {
        "steps": 4, "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": 50, "reward_normalization": "running",
        "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
    },
    "checkpoint": {"every": 2, "stage_every": 2, "keep_last": 1},
    "evaluation": {"every": 2},
}  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal to the bit, and compared part by part so that a failure names the part."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """FAULTS K3, K7: in every stage, between and during saves; each row of metrics is there once."""
    runs = {"llama": ("trunk", "", 18), "gpt2": ("none", "ppo: ", 10)}
    expected, arguments = {}, []
    for family, (sharing, moments, _) in runs.items():
        changes, folder = merged(STATEFUL, SHARINGS[sharing]), tmp_path / family
        run(settings(folder, changes, family=family))
        expected[family] = outcome(folder / "run")
        rows = [row for row in expected[family]["rows"] if row["kind"] == "ppo_step"]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert len({row["kl_coef"] for row in rows}) == 4, "the controller moves"
        killed = settings(folder, merged(changes, {"output": str(folder / "killed")}), family=family)
        arguments += [str(write_config(killed, folder / "killed.toml")), moments]

    # One program for both: importing the libraries takes longer than the runs.
    program = [sys.executable, str(Path(__file__).with_name("kill_while_running.py")), *arguments]
    done = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == sum(kills for _, _, kills in runs.values())
    for family, undisturbed in expected.items():
        same(outcome(tmp_path / family / "killed"), undisturbed)


def ppo_only(folder: Path, name: str, **more: Any) -> Tree:
    """A run of the stage ppo alone, paid by the function that sends signals."""
    changes = merged(by_function("pays_and_interrupts", steps=4), {"output": str(folder / name)})
    return settings(folder, merged(changes, {"sampling": {"temperature": 0.9}, **more}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `ppo_only` has run as "undisturbed"."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERRUPT, "0:")
        run(ppo_only(folder, "undisturbed"))
    return folder


@pytest.fixture
def undisturbed(whole: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The outcome of `ppo_only` when nothing interrupts it; what a test's own runs are interrupted by ends with it."""
    monkeypatch.setenv(INTERRUPT, "0:")
    return outcome(whole / "undisturbed")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_after_the_step_and_a_checkpoint(
    tmp_path: Path, undisturbed: dict[str, Any], name: str
) -> None:
    tree = ppo_only(tmp_path, "stopped")
    interrupt_at(15, name)  # calls are micro-batches: 1 in pre-flight, 4 before, 4 a step
    with pytest.raises(Interrupted, match="stopped after step 3 of 4"):
        run(tree)
    stopped = outcome(tmp_path / "stopped")
    assert stopped["step"] == 3 and [row["step"] for row in stopped["rows"]] == [1, 2, 3]
    run(tree)
    same(outcome(tmp_path / "stopped"), undisturbed)


def test_the_command_line_exits_with_130_and_goes_on(
    tmp_path: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS K3: `fourfold run` on the same configuration resumes by itself."""
    config = write_config(ppo_only(tmp_path, "stopped"), tmp_path / "stopped.toml")
    interrupt_at(8, "SIGTERM")
    assert main(["run", str(config)]) == 130
    said = capsys.readouterr().err
    assert "stopped after step 1 of 4" in said and "Traceback" not in said
    run(ppo_only(tmp_path, "stopped"))
    same(outcome(tmp_path / "stopped"), undisturbed)


def test_a_signal_in_the_last_step_of_a_stage_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows sft can take long, so the run ends here too; the same command then goes on with the next stage."""
    from fourfold.backends.local import LocalOptimizer

    step = LocalOptimizer.step

    def interrupted(optimizer: LocalOptimizer) -> float:
        if optimizer.name == "sft policy" and optimizer.steps_done == 3:
            os.kill(os.getpid(), 2)
        return step(optimizer)

    monkeypatch.setattr(LocalOptimizer, "step", interrupted)
    tree = settings(tmp_path, {"stages": ["sft", "reward"]})
    with pytest.raises(Interrupted, match="sft: stopped after step 4 of 4"):
        run(tree)
    assert not (tmp_path / "run" / "reward").exists()
    summary = run(tree)
    assert set(summary["stages"]) == {"sft", "reward"}


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(
    tmp_path: Path, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tree = ppo_only(tmp_path, "damaged")
    interrupt_at(15, "SIGTERM")
    with pytest.raises(Interrupted):
        run(tree)
    checkpoints = tmp_path / "damaged" / "ppo" / "checkpoints"
    file = checkpoints / "step-00000003" / "actor_optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    run(tree)
    assert f"{file.parent} is passed over: {file.name} does not match its sha256" in caplog.text
    same(outcome(tmp_path / "damaged"), undisturbed)


def test_other_settings_are_refused_and_named(whole: Path, undisturbed: dict[str, Any]) -> None:
    """`system` and exact levers may differ: they say where a run is carried out and in how much room, not what comes
    out."""
    with pytest.raises(ValueError, match=r"made with other settings: sampling\.temperature was 0\.9, is 0\.8"):
        run(ppo_only(whole, "undisturbed", sampling={"temperature": 0.8}))
    run(ppo_only(whole, "undisturbed", system={"threads": 0}))
    levers = {"memory": {"checkpointing": "layers", "optimizer_residency": "park"}, "reference": {"residency": "park"}}
    run(ppo_only(whole, "undisturbed", **levers))
    same(outcome(whole / "undisturbed"), undisturbed)


def test_a_run_does_not_go_on_with_another_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen models are rebuilt from the stages' files; when those are not what they were, the run says so."""
    from safetensors.torch import load_file, save_file

    changes = merged(by_function("pays_and_interrupts", steps=4), {"stages": ["sft", "ppo"], "data": {"texts": {}}})
    changes["data"].pop("texts")
    tree = settings(tmp_path, changes)
    monkeypatch.setenv(INTERRUPT, "0:")
    interrupt_at(8, "SIGTERM")
    with pytest.raises(Interrupted):
        run(tree)
    stored = tmp_path / "run" / "sft" / "model" / "model.safetensors"
    tensors = load_file(stored)
    next(iter(tensors.values())).flatten()[0] += 1e-3
    save_file(tensors, stored)
    with pytest.raises(ValueError, match="reference are not those of the interrupted run"):
        run(tree)


def test_every_checkpoint_of_the_reward_stage_is_a_reward_model(tmp_path: Path) -> None:
    """FAULTS E3: head and all; the last one scores as the model that the stage stored."""
    run(
        settings(
            tmp_path, {"stages": ["sft", "reward"], "reward": {"standardise": False}, "checkpoint": {"stage_every": 3}}
        )
    )
    stored = tmp_path / "run" / "reward"
    folders = [*sorted((stored / "checkpoints").glob("step-*")), stored / "model"]
    assert [folder.name for folder in folders] == ["step-00000003", "step-00000004", "model"]
    scores = []
    for folder in folders:
        changes: Tree = {
            "output": str(tmp_path / "ppo" / folder.name),
            "stages": ["ppo"],
            "reward": {"source": "checkpoint", "checkpoint": str(folder)}
            | dict.fromkeys(("learning_rate", "batch_size", "micro_batch_size")),
            "data": dict.fromkeys(("pairs", "pairs_test")),
            "ppo": {"steps": 1},
        }
        scores.append(run(settings(tmp_path, changes))["before"]["score_mean"])
    assert scores[0] != scores[1] == scores[2]
    with pytest.raises(ValueError, match="made with kind = 'policy', this run has 'scorer'"):
        sft = str(tmp_path / "run" / "sft" / "checkpoints" / "step-00000004")
        run(settings(tmp_path, merged(changes, {"output": str(tmp_path / "other"), "reward": {"checkpoint": sft}})))


def test_a_signal_before_the_first_step_also_ends_with_130(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Reading data and filling caches are no step of a stage, and can take long."""
    tree = ppo_only(tmp_path, "stopped")
    config = write_config(tree, tmp_path / "stopped.toml")
    program = [sys.executable, "-m", "fourfold", "run", str(config)]
    with subprocess.Popen(program, env=ENVIRONMENT | {INTERRUPT: "0:"}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("data."):  # the model is loaded, no stage has begun
                process.terminate()
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    run(tree)
    same(outcome(tmp_path / "stopped"), undisturbed)

"""Fourfold's side of the comparison on a tiny model: the report says what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.fourfold_worker import main
from benchmarks.lever_rows import difference
from benchmarks.worker import PHASES, WorkerReport, read_report
from fourfold.batch_files import read_batch
from tiny import tiny_directory


def work(folder: Path, sharing: str, capsys: pytest.CaptureFixture[str], *more: str) -> WorkerReport:
    model, prompts = folder / "model", folder / "prompts.jsonl"
    if not model.is_dir():
        tiny_directory(model, layers=6)
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcd"), encoding="utf-8")
    shape = {
        "prompt-tokens": 1,
        "new-tokens": 3,
        "batch": 4,
        "micro-batch": 4,
        "epochs": 1,
        "updates": 2,
        "threads": 1,
        "seed": 0,
    }
    arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    arguments += ["--model", str(model), "--prompts", str(prompts), "--dtype", "float32", "--sharing", sharing, *more]
    assert main(arguments) == 0
    return read_report(capsys.readouterr().out)


def test_a_trunk_stays_as_it_is_and_the_layers_above_it_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = work(tmp_path, "trunk", capsys)
    what = "Fourfold: a frozen trunk of 2 layers, actor and critic train the 4 above it, float32 masters"
    assert report.what == what
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    upper = sum(p.numel() for layer in model.model.layers[2:] for p in layer.parameters())
    upper += sum(p.numel() for p in model.model.norm.parameters())
    assert report.trainable_parameters == {"actor": upper, "critic": upper + 33}
    assert len(report.seconds_per_update) == 2


def test_separate_models_are_trained_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = work(tmp_path, "none", capsys)
    assert report.what == "Fourfold: four separate models, actor and critic trained in full, float32 masters"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert report.trainable_parameters["actor"] == sum(p.numel() for p in model.parameters())


def test_what_an_update_moves_is_sampled_and_peaks_have_a_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.fourfold_worker.SAMPLE", 10**6)
    whole = work(tmp_path / "whole", "trunk", capsys)
    assert len(whole.moves()) == sum(whole.trainable_parameters.values())
    assert 0 < max(whole.moves()) <= 1.1e-5  # Adam's first steps are as long as the learning rate
    assert whole.peak_rss_mib >= max(whole.phase_peak_mib.values()) and tuple(whole.phase_peak_mib) == PHASES
    again = work(tmp_path / "again", "trunk", capsys, "--set", "memory.checkpointing=layers")
    assert again.weights == whole.weights and again.moves() == whole.moves()
    monkeypatch.setattr("benchmarks.fourfold_worker.SAMPLE", 1000)
    part = work(tmp_path / "part", "trunk", capsys)
    assert len(part.moves()) == 1000 and set(part.moves()) <= set(whole.moves())


def test_both_sides_learn_from_the_responses_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = work(tmp_path, "none", capsys)
    drew = work(tmp_path, "none", capsys, "--responses", "drawn.parquet")
    assert drew.weights == own.weights and drew.log_prob_gap == 0.0  # a pass over given tokens is that over drawn ones
    responses = read_batch(tmp_path / "drawn.parquet")
    rounding = ("--set", "precision.compute=bfloat16", "--responses", "drawn.parquet")
    rounded = work(tmp_path, "none", capsys, *rounding)
    assert 0 < rounded.log_prob_gap < 0.1
    assert rounded.response_tokens_per_update[0] == int(responses.response_mask.sum())
    assert 0 < difference(drew.moves(), rounded.moves()) < 0.5


def test_a_role_at_a_service_is_asked_of_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = work(tmp_path, "none", capsys)
    away = work(tmp_path, "none", capsys, "--set", "reference.residency=service", "--set", "reward.residency=service")
    assert away.weights == kept.weights and away.moves() == kept.moves()
    assert (kept.service_peak_mib, away.resident_mib["reference"], away.resident_mib["reward"]) == (0.0, 0.0, 0.0)
    assert away.service_peak_mib > 50

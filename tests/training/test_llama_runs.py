"""Whole runs whose reference llama.cpp runs in the process: what is written is the actor at step 0, nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import ConfigError, check_packages
from fourfold.errors import Interrupted, RunFailed
from fourfold.models.llama_cpp import PACKAGE, LlamaCpp
from fourfold.models.llama_roles import LlamaPolicy
from fourfold.models.loading import convert_gguf
from fourfold.training import preflight
from fourfold.training import quantization_bench as bench
from fourfold.training.ppo import describe_roles
from models.test_loading import write_gguf
from tiny import tiny_model, tiny_tokenizer
from training.runs import (
    INTERRUPT,
    SHARINGS,
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

needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")


def by_llama_cpp(folder: Path, engine: str = "llama_cpp", **changes: Any) -> Tree:
    tree = settings(folder, by_function("pays_by_hash", steps=2))
    return merged(merged(tree, {"reference": {"engine": engine}}), changes)


@needs_llama_cpp
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_run_is_nearly_that_with_torch(tmp_path: Path, sharing: str) -> None:
    plain = merged(settings(tmp_path, by_function("pays_by_hash", steps=1)), SHARINGS[sharing])
    expected = steps_of(make_trainer(make_config(merged(plain, {"output": str(tmp_path / "torch")}))))
    trainer = make_trainer(make_config(merged(plain, {"reference": {"engine": "llama_cpp"}})))
    reference = trainer.models.reference
    assert isinstance(reference, LlamaPolicy) and isinstance(reference.engine, LlamaCpp)
    report = trainer.check()
    assert report.reference_bias is not None and abs(report.reference_bias.per_token_mean) < 5e-3
    assert (
        "held in F16 and computed elsewhere (cpu, llama.cpp)" in (report.warning() or "") and not report.own_reference
    )
    assert "llama.cpp" in describe_roles(trainer)
    [row], [its_row] = steps_of(trainer), expected
    assert row["score_mean"] == its_row["score_mean"]
    assert row["kl_per_sequence_mean"] == pytest.approx(its_row["kl_per_sequence_mean"], abs=0.05)
    assert row["reference_pass_seconds"] > 0
    if sharing == "trunk":  # all layers from the ids on, where torch begins above the cached trunk
        assert row["reference_score_flops"] > 1.5 * its_row["reference_score_flops"]


@needs_llama_cpp
def test_the_reference_is_the_actor_after_sft_and_a_stopped_run_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERRUPT, "")
    texts = settings(tmp_path)["data"]["texts"]
    changes = merged(by_function("pays_and_interrupts", steps=2), {"reference": {"engine": "llama_cpp"}})
    changes = merged(changes, {"stages": ["sft", "ppo"], "data": {"texts": texts}, "sft": {"num_epochs": 2}})
    tree = settings(tmp_path, changes)
    interrupt_at(0, "")
    run(merged(tree, {"output": str(tmp_path / "whole")}))
    stopped = merged(tree, {"output": str(tmp_path / "stopped")})
    interrupt_at(11, "SIGTERM")  # in the first step: 5 calls in pre-flight, 4 before
    with pytest.raises(Interrupted):
        run(stopped)
    run(stopped)
    whole = outcome(tmp_path / "whole")
    assert json.dumps(outcome(tmp_path / "stopped"), default=str) == json.dumps(whole, default=str)
    bias = json.loads((tmp_path / "whole" / "ppo" / "preflight.json").read_text())["reference_bias"]
    assert abs(bias["per_token_mean"]) < 5e-3, "the base model is farther from the actor than that"
    files = [(tmp_path / name / "ppo" / "reference.gguf").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


@needs_llama_cpp
def test_a_file_of_the_users_is_another_prior(tmp_path: Path) -> None:
    """Told, not refused; the very file is run, and nothing is written."""
    other, tokenizer = tmp_path / "other.gguf", tiny_tokenizer(pad_is_eos=False)
    write_gguf(other, tiny_model("llama", seed=1), tokenizer)
    # transformers gives every tokenizer that it makes of GGUF a token more, which the tiny one has not.
    converted = convert_gguf(other, tmp_path / "cache")
    for file in converted.glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(converted)
    in_torch = settings(tmp_path, by_function("pays_by_hash", steps=2))
    in_torch = merged(in_torch, {"reference": {"model": str(other)}})
    trainer = make_trainer(make_config(merged(in_torch, {"reference": {"engine": "llama_cpp"}})))
    reference = trainer.models.reference
    assert isinstance(reference, LlamaPolicy) and isinstance(reference.engine, LlamaCpp)
    assert reference.engine.file == other and not (tmp_path / "run" / "ppo" / "reference.gguf").exists()
    report = trainer.check()
    assert report.own_reference and report.kl_gap_mean > 0.1 and report.reference_bias is not None
    assert abs(report.reference_bias.per_token_mean) < 0.01
    by_torch = make_trainer(make_config(in_torch)).check()
    assert report.kl_gap_mean == pytest.approx(by_torch.kl_gap_mean, abs=0.02)


@needs_llama_cpp
def test_a_bias_beyond_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ERRORS_ALLOWED", 0.0)  # a few tokens do not tell it from 0
    tree = by_llama_cpp(tmp_path, "llama_cpp_q8_0", precision={"max_reference_bias": 1e-7})
    with pytest.raises(
        RunFailed,
        match=r"the reference in Q8_0 and computed elsewhere .* biases every KL .* leave out reference.engine,",
    ):
        make_trainer(make_config(tree)).check()


@needs_llama_cpp
def test_a_checkpoint_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    """Float16 and Q8_0 of the same actor are two files."""
    one, other = (
        make_trainer(make_config(by_llama_cpp(tmp_path, engine, output=str(tmp_path / engine)))).models
        for engine in ("llama_cpp", "llama_cpp_q8_0")
    )
    sums = [models.frozen_checksums()["reference"] for models in (one, one, other)]
    assert sums[0] == sums[1] != sums[2]
    assert sum(p.untyped_storage().nbytes() for p in one.own_parameters(one.reference)) < 1000, "torch holds nothing"


@needs_llama_cpp
def test_the_bench_has_rows_of_llama_cpp(tmp_path: Path) -> None:
    tree = settings(tmp_path, {"stages": ["sft", "reward"]})
    run(tree)
    kinds = ("llama_cpp", "llama_cpp_q8_0", "gguf")
    report = bench.bench_quantization(make_config(tree), kinds, rows=8, say=lambda line: None)
    held, half, eighth, file = report.lines
    assert half.note == eighth.note == "" and "is no .gguf file" in file.note
    for line in (half, eighth):
        assert line.kl_bias is not None and line.kl_exact is not None and line.log_prob_gap is not None
        assert line.score_gap is not None and line.pair_accuracy is not None
        assert 0 < line.log_prob_gap < 0.1 and abs(line.kl_exact) < 0.01 and line.score_gap < 0.1
    assert (half.log_prob_gap or 0) < (eighth.log_prob_gap or 0) and (half.score_gap or 0) < (eighth.score_gap or 0)
    assert (eighth.reference_bytes or 0) < (half.reference_bytes or 0) < (held.reference_bytes or 0)


def test_where_it_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded by a run, and as a row of the bench."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == PACKAGE else real(name, *a))
    with pytest.raises(
        ConfigError, match=r"reference.engine = 'llama_cpp' \(the extra llama-cpp\), but .* llama_cpp is"
    ):
        check_packages(make_config(by_llama_cpp(tmp_path)))
    tree = settings(tmp_path, merged(by_function("pays_by_hash"), {"stages": ["ppo"]}))
    report = bench.bench_quantization(make_config(tree), ["llama_cpp_q8_0"], rows=2, say=lambda line: None)
    assert "cannot run here" in report.lines[1].note and "fourfold[llama-cpp]" in report.lines[1].note


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"reference": {"residency": "park"}},
            r"reference.residency: given 'park' beside reference.engine = 'llama_cpp'",
        ),
        (
            {"precision": {"reference": "int8"}},
            r"precision.reference: given, but reference.engine = 'llama_cpp' runs on",
        ),
        ({"ppo": {"kl_estimator": "full"}}, r"reference.engine: given 'llama_cpp' beside ppo.kl_estimator = 'full'"),
        (
            {"reference": {"engine": "llama_cpp_q8_0", "model": "x.gguf"}},
            r"reference.engine: given 'llama_cpp_q8_0' beside reference.model = 'x.gguf', whose weights have the types",
        ),
    ],
)
def test_what_stands_against_it_is_refused(tmp_path: Path, changes: Tree, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(merged(by_llama_cpp(tmp_path), changes))

"""Whole runs above quantised weights: parked and streamed, interrupted and gone on with, exported; and the bench."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fourfold.algorithms.statistics import spearman
from fourfold.cli.main import main
from fourfold.config.loading import saved_config
from fourfold.errors import Interrupted
from fourfold.memory.quantization import dequantize, kind_of
from fourfold.models.loading import load_base
from fourfold.planner.quantization import BY_ONNX, QUANTIZED
from fourfold.training import quantization_bench as bench
from fourfold.training.folder import RunFolder
from fourfold.training.results import export_actor, load_actor
from tiny import tiny_directory
from training.runs import (
    INTERRUPT,
    SEPARATE,
    SHARINGS,
    Tree,
    by_function,
    by_model,
    interrupt_at,
    make_config,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    write_config,
)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("modes", [("park", "stream"), ("stream", "park")], ids="-".join)
def test_quantised_roles_score_the_same_parked_and_streamed(tmp_path: Path, modes: tuple[str, str], kind: str) -> None:
    tree = by_model(settings(tmp_path, merged(by_function("pays_by_hash", steps=1), SEPARATE)), tmp_path / "reward")
    tree = merged(tree, {"precision": {"reference": kind, "reward": kind}})
    away = merged(tree, {name: {"residency": mode} for name, mode in zip(("reference", "reward"), modes, strict=True)})
    plain, moved = make_trainer(make_config(tree)), make_trainer(make_config(away))
    assert moved.models.frozen_checksums() == plain.models.frozen_checksums()
    own = moved.models.own_parameters(moved.models.reference)
    assert sum(p.untyped_storage().nbytes() for p in own) <= 4 * len(own)
    rows = [trainer.step() for trainer in (plain, moved)]
    for name in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm"):
        assert rows[0][name] == rows[1][name]


def test_the_reference_is_off_by_its_rounding_and_by_no_more(tmp_path: Path) -> None:
    """KL at step 0, as pre-flight measures it: 0 for the actor's own numbers, else its mean is held to a bound."""
    tree = settings(tmp_path, merged(by_function("pays_by_hash", steps=1), SEPARATE))
    gaps = {}
    for kind in ("auto", *QUANTIZED):
        bound = {} if kind == "auto" else {"max_reference_bias": 1.0}
        trainer = make_trainer(make_config(merged(tree, {"precision": {"reference": kind, **bound}})))
        report = trainer.check()
        gaps[kind], bias = report.kl_gap_mean, report.reference_bias
        assert (bias is None) == (kind == "auto")
        if bias is not None:
            said = report.warning() or ""
            assert abs(bias.per_token_mean) <= bias.absolute_mean == pytest.approx(gaps[kind], rel=0.6)
            assert f"held in {kind}, and the actor computes in float32" in said
    assert gaps["auto"] < 1e-6 < gaps["int8"] < gaps["nf4"]


def test_above_a_quantised_base_the_reference_has_the_actors_numerics(tmp_path: Path) -> None:
    """QLoRA: both stand on the same codes; a reference that computes in another type there is measured as elsewhere."""
    tree = settings(tmp_path, merged(by_function("pays_by_hash", steps=1), SHARINGS["adapters"]))
    report = make_trainer(make_config(merged(tree, {"precision": {"frozen": "nf4"}}))).check()
    assert report.reference_bias is None and report.kl_gap_max == 0.0
    half = make_trainer(make_config(merged(tree, {"precision": {"frozen": "int8", "reference": "bfloat16"}})))
    bias = half.check().reference_bias
    assert bias is not None and 0 < bias.absolute_mean < 0.05
    assert half.models.frozen_checksums().keys() == {"reference"}


@pytest.mark.parametrize("sharing", ["adapters", "trunk"])
def test_an_interrupted_run_above_nf4_goes_on_bit_for_bit_and_stores_no_base(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERRUPT, "0:")
    changes = merged(by_function("pays_and_interrupts", steps=2), {"precision": {"frozen": "nf4"}})
    tree = settings(tmp_path, merged(changes, SHARINGS[sharing]))
    run(merged(tree, {"output": str(tmp_path / "whole")}))
    stopped = merged(tree, {"output": str(tmp_path / "stopped")})
    interrupt_at(7, "SIGTERM")  # in the first step: 1 call in pre-flight, 4 before
    with pytest.raises(Interrupted):
        run(stopped)
    run(stopped)
    whole = outcome(tmp_path / "whole")
    assert json.dumps(outcome(tmp_path / "stopped"), default=str) == json.dumps(whole, default=str)
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        with safe_open(str(file), "pt") as stored:
            assert not any("codes" in name or "scales" in name for name in stored.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("family", "sharing", "kind"),
    [("llama", "adapters", "nf4"), ("gpt2", "trunk", "int8"), ("gpt2", "adapters over a trunk", "nf4")],
)
def test_exported_logits_are_the_actors_above_quantised_weights(
    tmp_path: Path, family: str, sharing: str, kind: str
) -> None:
    """The adapters are merged into what the codes stand for, because they were trained above that."""
    changes = merged(by_function("pays_by_hash", steps=1), {"precision": {"frozen": kind}})
    run(merged(settings(tmp_path, changes, family=family), SHARINGS[sharing]))
    config = saved_config(tmp_path / "run")
    base = load_base(config)
    actor = load_actor(config, base, RunFolder(tmp_path / "run"), best=False)
    out = export_actor(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32", best=False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 33, 60, 12], [7, 8, 90, 41, 3]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        inputs = ids if base.trunk is None else base.trunk(ids, mask)
        expected = actor.head.logits(actor.branch(inputs, mask)[mask], torch.float32)
        torch.testing.assert_close(model(input_ids=ids).logits[mask], expected, rtol=1e-4, atol=1e-4)
        assert (original(input_ids=ids).logits[mask] - expected).abs().max() > 0.01


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A run whose stages sft and reward are done; wide enough for matrices to outweigh what stays as it is."""
    folder = tmp_path_factory.mktemp("bench")
    tiny_directory(folder / "llama", hidden=64)
    tree = settings(folder, {"stages": ["sft", "reward"], "sft": {"num_epochs": 2}})
    run(tree)
    return tree


def test_the_bench_measures_what_can_be_computed_by_hand(stages: Tree) -> None:
    """The whole models dequantised, text by text, give the same errors."""
    config = make_config(stages)
    report = bench.bench_quantization(config, QUANTIZED, rows=8, say=lambda line: None)
    held, *lines = report.lines
    assert (held.kind, held.speed) == ("as held", 1.0) and [line.kind for line in lines] == list(QUANTIZED)
    assert report.texts == 8 and report.pairs == 8 and report.held == "float32"
    sizes = {line.kind: line.reference_bytes or 0 for line in report.lines}
    assert sizes["nf4"] < sizes["int8"] == sizes["int8_dynamic"] < (held.reference_bytes or 0) / 2
    resolved = config.model_copy(update={"output": config.output})
    base = load_base(resolved)
    models = bench._models(resolved, base)
    texts, pairs = bench._data(resolved, base, 8, lambda line: None)
    plain = models.quantized("nf4")
    for part in (plain.trunk, plain.policy.branch, plain.scorer and plain.scorer.branch):
        assert part is not None and kind_of(part) == "nf4"
        dequantize(part)
    gaps, kls, scores = [], [], []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([list(text)])
            mask = torch.ones_like(ids, dtype=torch.bool)
            log_p = []
            for each in (models, plain):
                assert each.trunk is not None and each.scorer is not None
                hidden = each.policy.branch(each.trunk(ids, mask), mask)[0, :-1]
                log_p.append(torch.log_softmax(hidden @ each.policy.head.weight.T, dim=-1))
            ours, theirs = (p.gather(1, ids[0, 1:, None])[:, 0] for p in log_p)
            gaps.append(theirs - ours)
            kls.append((log_p[0].exp() * (log_p[0] - log_p[1])).sum(dim=-1))
        for text in sorted({tuple(text) for text in [*texts, *(text for pair in pairs for text in pair)]}):
            ids = torch.tensor([list(text)])
            mask = torch.ones_like(ids, dtype=torch.bool)
            both = []
            for each in (models, plain):
                assert each.trunk is not None and each.scorer is not None
                both.append(each.scorer.head(each.scorer.branch(each.trunk(ids, mask), mask))[0, -1])
            scores.append(torch.stack(both))
    gap, kl, (old, new) = torch.cat(gaps), torch.cat(kls), torch.stack(scores).T
    [line] = [line for line in lines if line.kind == "nf4"]
    assert line.kl_bias == pytest.approx(-float(gap.mean()), abs=1e-4)
    assert line.log_prob_gap == pytest.approx(float(gap.abs().mean()), abs=1e-4)
    assert line.kl_exact == pytest.approx(float(kl.mean()), abs=1e-4)
    assert line.score_gap == pytest.approx(float((new - old).abs().mean() / old.std()), abs=1e-3)
    assert line.score_rank_correlation == pytest.approx(spearman(old, new), abs=1e-3)


def test_the_bench_has_the_reward_model_run_by_onnx_runtime(stages: Tree) -> None:
    """In float32 its scores are torch's; INT8 takes fewer bytes (embeddings stay), and nearly the same order."""
    pytest.importorskip("onnxruntime")
    report = bench.bench_quantization(make_config(stages), BY_ONNX, rows=8, say=lambda line: None)
    held, plain, narrow = report.lines
    assert (plain.note, narrow.note) == ("", "") and plain.kl_bias is None is plain.reference_bytes
    assert plain.score_gap == pytest.approx(0, abs=1e-3) and plain.pair_accuracy == held.pair_accuracy
    assert 0 < (narrow.score_gap or 0) < 0.3 and (narrow.score_rank_correlation or 0) > 0.9
    assert (narrow.reward_bytes or 0) < 0.8 * (plain.reward_bytes or 0)
    nothing = merged(stages, {"output": f"{stages['output']}-without"})
    report = bench.bench_quantization(make_config(nothing), ("onnx",), rows=4, say=lambda line: None)
    assert "reward models alone" in report.lines[1].note and report.lines[1].score_gap is None


def test_the_command_prints_a_line_for_each_kind_and_says_why_one_cannot_run(
    stages: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config = write_config(stages, tmp_path / "run.toml")
    real = bench.library

    def absent(kind: str) -> Any:
        if kind == "nf4":
            raise ValueError("weights in 'nf4' need the Python package bitsandbytes; try: pip install it")
        return real(kind)

    monkeypatch.setattr(bench, "library", absent)
    given = [
        "bench",
        "quantization",
        str(config),
        "--kinds",
        "int8,nf4",
        "--rows",
        "4",
        "--json",
        str(tmp_path / "o.json"),
    ]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert re.search(r"float32 \(as held\) .* 1\.00", shown) and re.search(r"int8 .* \+?-?0\.\d{4}", shown)
    assert re.search(r"nf4 .*cannot run here: weights in 'nf4' need the", shown)
    report = json.loads((tmp_path / "o.json").read_text())
    assert [line["kind"] for line in report["lines"]] == ["as held", "int8", "nf4"]
    assert report["lines"][1]["note"] == "" and report["lines"][2]["kl_bias"] is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kinds", "int3"], r"--kinds: given 'int3'; allowed: int8, int8_dynamic, nf4"),
        (["--rows", "0"], "--rows 0: allowed are 1 or more"),
    ],
)
def test_wrong_arguments_of_the_bench_are_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "quantization", "absent.toml", *arguments]) == 2
    assert re.search(error, capsys.readouterr().err)

"""`fourfold bench limit` on real tiny steps: its arithmetic, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.config import RunConfig
from fourfold.training.limit_bench import Report, bench_limit
from training.runs import by_function, make_config, settings, write_config


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Report, Path]:
    folder = tmp_path_factory.mktemp("limit")
    config = make_config(settings(folder, by_function("pays_by_hash")))
    return config, bench_limit(config, 2, lambda line: None), folder


def test_the_step_is_the_sum_of_its_phases(measured: tuple[RunConfig, Report, Path]) -> None:
    _, report, _ = measured
    *phases, step = report.lines
    assert [line.phase for line in report.lines] == ["generate", "score", "learn", "step"]
    for name in ("flops", "bytes", "product_seconds", "memory_seconds", "limit_seconds"):
        assert getattr(step, name) == pytest.approx(sum(getattr(line, name) for line in phases)), name
    assert step.peak_bytes == max(line.peak_bytes for line in phases) > 0


def test_every_line_agrees_with_itself(measured: tuple[RunConfig, Report, Path]) -> None:
    config, report, _ = measured
    best = max(rate for one, rate in report.products if one.dtype == report.compute)
    for line in report.lines:
        assert line.least_seconds <= line.seconds <= line.greatest_seconds
        assert line.share_of_limit == pytest.approx(line.limit_seconds / line.seconds)
        assert line.mfu == pytest.approx(line.flops / line.seconds / best) and 0 < line.mfu < 1
    assert report.steps == 2
    assert report.tokens_per_second == pytest.approx(report.response_tokens / report.lines[-1].seconds)
    assert report.episodes_per_second == pytest.approx(config.ppo.rollout_batch_size / report.lines[-1].seconds)


def test_the_run_is_left_alone_and_nothing_stays(measured: tuple[RunConfig, Report, Path]) -> None:
    config, _, folder = measured
    assert not Path(config.output).exists()
    assert not [path for path in folder.parent.glob("fourfold-limit-*")]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward model that nobody has trained is replaced by one of the same size."""
    file = write_config(settings(tmp_path), tmp_path / "run.toml")
    out = tmp_path / "limit.json"
    assert main(["bench", "limit", str(file), "--steps", "1", "--json", str(out)]) == 0
    shown = capsys.readouterr()
    assert "random head" in shown.err and "share" in shown.out and "learn" in shown.out
    found = json.loads(out.read_text())
    assert [line["phase"] for line in found["lines"]][-1] == "step"


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(settings(tmp_path), tmp_path / "run.toml")
    assert main(["bench", "limit", str(file), "--steps", "0"]) == 2
    assert "--steps 0: allowed are 1 or more" in capsys.readouterr().err
    file.write_text('output = "run"\nstages = ["sft"]\n[model]\npath = "m"\n[data.texts]\npath = "t.jsonl"\n')
    assert main(["bench", "limit", str(file)]) == 2
    assert "measured are steps of ppo" in capsys.readouterr().err

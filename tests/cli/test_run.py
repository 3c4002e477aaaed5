"""`fourfold run` to its end, in a process of its own, and the commands that it proposes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.cli.run import show
from fourfold.config import load_config
from training.runs import make_config, settings, write_config

ROOT = Path(__file__).parents[2]


def fourfold(folder: Path, *arguments: str) -> str:
    """What a command prints that ends well."""
    # Wide enough for no line to be broken; neither a progress bar nor colour, as in a log.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", *arguments], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_shows_what_came_out_and_its_proposals_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(tmp_path, {"output": "my runs/first", "ppo": {"steps": 2}, "evaluation": {"samples": 3}})
    write_config(tree, tmp_path / "my.toml")
    shown = fourfold(tmp_path, "run", "my.toml", "--set", "ppo.entropy_coef=0.001")
    lines = shown.splitlines()

    assert re.search(r"^sft: held-out loss \d\.\d+ -> \d\.\d+ nats a token$", shown, flags=re.MULTILINE)
    assert re.search(r"^reward: \d+\.\d% of \d+ held-out pairs ranked as people do$", shown, flags=re.MULTILINE)
    assert "held-out prompts, before and after PPO" in shown
    for metric in ("score_mean", "kl_per_sequence", "distinct_2", "eos_share"):
        row = next(line for line in lines if metric in line)
        assert len(row.split()) == 4, row  # name, before, after, change
    start = next(i for i, line in enumerate(lines) if line.split() == ["prompt", "before", "after"])
    end = next(i for i, line in enumerate(lines) if line.startswith("time: "))
    assert len([line for line in lines[start + 2 : end] if line.strip()]) >= 3
    assert all(f" {phase} " in lines[end] for phase in ("load", "sft", "reward", "ppo", "generate", "learn", "save"))

    files = next(line for line in lines if line.startswith("files: my runs/first ("))
    names = files.partition("(")[2].rstrip(")").split(", ")
    assert names == ["summary.json", "plan.json", "sft/model", "reward/model", "ppo/metrics.jsonl", "ppo/model"]
    assert all((tmp_path / "my runs" / "first" / name).exists() for name in names)

    report, sample, export, again = (shlex.split(line) for line in lines[lines.index("try next:") + 1 :])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert report == ["fourfold", "report", "my runs/first"] and main(report[1:]) == 0
    assert (tmp_path / "my runs" / "first" / "report.html").is_file()
    assert sample[:2] == ["fourfold", "sample"] and main(sample[1:]) == 0
    assert "The film" in capsys.readouterr().out
    assert export[:2] == ["fourfold", "export"] and main(export[1:]) == 0
    assert "wrote exported-model" in capsys.readouterr().out
    assert (tmp_path / "exported-model" / "model.safetensors").is_file()
    assert again[:3] == ["fourfold", "run", "my.toml"]
    config = load_config(tmp_path / again[2], again[4::2])
    assert (config.ppo.kl_coef, config.ppo.entropy_coef, config.output) == (0.2, 0.001, "my runs/first-kl02")


def test_only_files_that_are_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(settings(tmp_path, {"stages": ["sft"]}))
    (tmp_path / "run" / "sft" / "model").mkdir(parents=True)
    show(config, {"stages": {}, "seconds": {"load": 1.0, "sft": 2.4}}, "my.toml")
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["time: load 1 s, sft 2 s", f"files: {tmp_path / 'run'} (sft/model)"]

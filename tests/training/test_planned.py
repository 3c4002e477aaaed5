"""A run that lets the planner choose: it fits what it was planned for, says so, and goes on with the same levers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.cli.run import show
from fourfold.config import load_config
from fourfold.errors import Interrupted
from fourfold.planner.candidates import estimate
from fourfold.planner.footprint.process import CUDA_CONTEXT
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.request import architectures_of, lengths_of
from fourfold.planner.scene import Scene
from fourfold.training import planned, trainer
from fourfold.training.pipeline import run_stages
from training.runs import by_function, make_config, merged, settings


def machine(memory: int) -> Cluster:
    device = Device("this CPU", "cpu", memory, 2e10, {"float32": 1e11})
    return Cluster(Node(device, disk_bandwidth=1e9))


def tree(folder: Path, levers: str = "exact") -> dict[str, Any]:
    return settings(
        folder,
        merged(by_function("pays_by_hash"), {"memory": {"levers": levers}, "sharing": {"mode": "none"}, "trunk": None}),
    )


@pytest.fixture
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine on which the settings as given do not fit by a little."""
    config = make_config(tree(tmp_path))
    scene = Scene(config, architectures_of(config)[0], machine(2**40), lengths_of(config))
    memory = estimate(scene)[0].peak()[1] - 1000
    monkeypatch.setattr(planned, "ensure_measured", lambda say: machine(memory))
    return memory


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    before = trainer.Trainer.step

    def stopping(self: trainer.Trainer) -> dict[str, float]:
        if self.progress.step == step:
            raise Interrupted("stopped by the test")
        return before(self)

    monkeypatch.setattr(trainer.Trainer, "step", stopping)


def test_a_run_chooses_levers_that_fit_and_goes_on_with_them(
    tmp_path: Path, tight: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = make_config(tree(tmp_path)), list[str]()
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 1)
        run_stages(config, said.append)
    folder = Path(config.output)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    taken = {key: value for step in plan["levers"] for key, value in step["settings"].items()}
    assert plan["budget_bytes"] == tight and plan["levers"][-1]["peak_bytes"] <= tight < plan["levers"][0]["peak_bytes"]
    assert taken and any("levers: planned for" in line for line in said)
    assert any(line.startswith("memory: ") and "are predicted at most" in line for line in said)
    saved = load_config(folder / "config.toml")
    for key, value in taken.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(saved, section), name) == value
        assert any(f"{key} = {value!r}" in line for line in said)

    monkeypatch.setattr(planned, "ensure_measured", lambda say: pytest.fail("a run that goes on is not planned anew"))
    said.clear()
    summary = run_stages(config, said.append)
    assert any(line.startswith("levers: as chosen when this run began: ") for line in said)
    after = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert after["levers"] == plan["levers"]
    # The measured process is that of the tests, whose other libraries no formula knows: order of magnitude only.
    for name in ("generate", "score", "learn", "learn/actor", "score/critic", "load"):
        assert 0.2 < summary["memory"][name]["predicted_bytes"] / summary["memory"][name]["measured_bytes"] < 2
    show(config, summary, "x.toml")
    shown = capsys.readouterr().out
    assert "predicted" in shown and "measured" in shown and "plan.json" in shown


def test_a_run_in_which_nothing_fits_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "ensure_measured", lambda say: machine(2**20))
    config = make_config(tree(tmp_path))
    with pytest.raises(
        ValueError, match=r"memory\.levers = 'exact': does not fit: in .* more than the budget of 1\.0 MiB"
    ):
        run_stages(config, lambda line: None)
    assert not Path(config.output).exists()


def test_exact_levers_are_exact(tmp_path: Path, tight: int) -> None:
    from fourfold.planner.levers import lever

    chosen = planned.choose_levers(make_config(tree(tmp_path)), planned.RunFolder(tmp_path / "new"), print)
    assert chosen.record is not None
    names = [step["lever"] for step in chosen.record["levers"][1:]]
    assert names and all(not lever(name).rounds and lever(name).change != "other parameters" for name in names)


def test_a_run_begun_without_a_plan_is_not_planned_later(tmp_path: Path, tight: int) -> None:
    run_stages(make_config(tree(tmp_path, "given")), lambda line: None)
    with pytest.raises(ValueError, match=r"memory\.levers was 'given', is 'exact'"):
        run_stages(make_config(tree(tmp_path)), lambda line: None)


def test_below_a_gpu_the_prediction_is_of_what_torch_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's context counts in what is said, which has to fit the device, and not beside torch's own count."""
    config, prompts = make_config(tree(tmp_path, "given")), [[5, 6, 7]]
    monkeypatch.setattr(planned, "device_of", lambda config: torch.device("cuda"))
    predicted = planned.predict(config, prompts)
    assert 0 < predicted.peaks["learn"] < CUDA_CONTEXT
    said = re.search(r"memory: ([\d.]+) MiB are predicted", predicted.said)
    assert said is not None and float(said[1]) * 2**20 > CUDA_CONTEXT

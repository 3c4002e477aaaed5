"""Where reference and reward are, phase by phase; and a run with everything offloaded, killed and gone on with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fourfold.diagnostics.tables import role_rows
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.models.assembly import FourModels
from fourfold.models.residency import RoleResidency
from fourfold.models.roles import checksum
from fourfold.training.pipeline import run_stages
from fourfold.training.ppo import describe_roles
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

ROOT = Path(__file__).parents[2]


def held_bytes(parameters: list[nn.Parameter]) -> int:
    """Bytes of the storages behind parameters, each once."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values())


def full_bytes(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def layers_held(models: FourModels, name: str) -> int:
    """Decoder layers of a role whose first matrix is in memory."""
    firsts = [next(p for p in layer.parameters() if p.ndim == 2) for layer in getattr(models, name).branch.layers]
    return sum(p.stride() != (0, 0) for p in firsts)


@pytest.mark.parametrize("modes", [("park", "stream"), ("stream", "park")], ids="-".join)
def test_roles_are_in_memory_in_their_phase_only(
    tmp_path: Path, modes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 42 and 43, FAULTS J9: bytes at the storages outside the phase, in it, and while the other role computes."""
    tree = by_model(settings(tmp_path, merged(by_function("pays_by_hash", steps=2), SEPARATE)), tmp_path / "reward")
    plain = make_trainer(make_config(tree))
    given = dict(zip(("reference", "reward"), modes, strict=True))
    tree = merged(tree, {name: {"residency": mode} for name, mode in given.items()})
    trainer = make_trainer(make_config(tree))
    models = trainer.models
    assert models.frozen_checksums() == plain.models.frozen_checksums(), "read where they lie"
    own = {name: models.own_parameters(getattr(models, name)) for name in given}
    few = {name: 4 * len(parameters) for name, parameters in own.items()}
    rows = {row.model: row for row in role_rows(models)}
    assert all(rows[name].bytes == full_bytes(own[name]) for name in given)
    assert all(rows[name].resident_bytes <= few[name] for name in given)
    assert rows["actor"].resident_bytes == rows["actor"].bytes
    seen: dict[str, list[tuple[int, int]]] = {"reference": [], "reward": []}

    def watch(name: str, other: str, method: str) -> None:
        role = getattr(models, name)
        real: Callable[..., Any] = getattr(role, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            assert held_bytes(own[other]) <= few[other], f"the {other} is away while the {name} computes"
            found = real(*args, **kwargs)
            seen[name].append((held_bytes(own[name]), layers_held(models, name)))
            return found

        monkeypatch.setattr(role, method, watched)

    watch("reference", "reward", "log_probs")
    watch("reward", "reference", "scores")
    elsewhere: list[int] = []  # bytes of both while actor and critic sample, score and learn
    for trained in (models.actor, models.critic):
        trained.branch.register_forward_pre_hook(
            lambda *_: elsewhere.append(held_bytes(own["reference"] + own["reward"]))
        )
    for _ in range(2):
        row, expected = trainer.step(), plain.step()
        for name in given:
            assert held_bytes(own[name]) <= few[name] < full_bytes(own[name]) / 10
        assert {key: row[key] for key in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm")} == {
            key: expected[key] for key in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm")
        }
    assert len(elsewhere) > 20 and max(elsewhere) <= sum(few.values())
    for name, mode in given.items():
        residency = getattr(models, name).residency
        assert isinstance(residency, RoleResidency) and len(seen[name]) == 2 * 4
        if mode == "park":
            assert all(held >= full_bytes(own[name]) for held, _ in seen[name])
            assert row[f"{name}_moved_bytes"] >= full_bytes(own[name])
        else:
            assert residency.peak_layers == 2 and all(layers <= 1 for _, layers in seen[name])
        assert 0 < row[f"{name}_pass_seconds"] <= row["offloaded_pass_seconds"] <= row["score_seconds"]
        where = "cpu, parked on disk" if mode == "park" else "cpu, streamed from disk"
        assert where in next(line for line in describe_roles(trainer).splitlines() if line.strip().startswith(name))
    assert row["offloaded_per_generate_ratio"] == row["offloaded_pass_seconds"] / row["generate_seconds"]
    said = trainer.accountant.hiding.condition(generate_seconds=1e9)
    assert said.startswith("offload: scoring by reference (cpu,") and "could be hidden" in said
    assert "could not be hidden" in trainer.accountant.hiding.condition(generate_seconds=0.0)
    assert checksum([models.reference]) == checksum([plain.models.reference])


def test_whether_sampling_hides_a_role_is_said_of_the_steps_alone(tmp_path: Path) -> None:
    """Scoring of the critic's pretraining is not counted, so its sampling must not be either."""
    changes: Tree = {"critic": {"pretrain_rollouts": 3}, "reference": {"residency": "park"}}
    tree = settings(tmp_path, merged(by_function("pays_by_hash", steps=2), changes))
    said: list[str] = []
    run_stages(make_config(tree), said.append)
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl")
    sampled = sum(row["generate_seconds"] for row in rows if row["kind"] == "ppo_step")
    [line] = [line for line in said if line.startswith("offload: scoring by reference")]
    told = re.search(r"sampling ([\d.]+) s", line)
    assert told is not None and float(told[1]) == pytest.approx(sampled, abs=0.051)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_others_hold_too_stays(tmp_path: Path, sharing: str) -> None:
    changes = merged(by_function("pays_by_hash", kl_estimator="full"), SHARINGS[sharing])
    trainer = make_trainer(make_config(settings(tmp_path, merged(changes, {"reference": {"residency": "stream"}}))))
    models = trainer.models
    own = {id(p) for p in models.own_parameters(models.reference)}
    away = [p for p in models.reference.parameters() if id(p) in own]
    stay = [p for p in models.reference.parameters() if id(p) not in own]
    assert held_bytes(away) <= 4 * len(away)
    assert all(p.untyped_storage().nbytes() >= p.numel() * p.element_size() for p in stay)
    assert bool(stay) == (sharing != "none")
    if sharing == "trunk":
        assert models.actor.head.weight in set(stay)
    trainer.check()  # pre-flight: KL 0 by the exact estimator, which runs the reference twice
    assert trainer.evaluate().metrics["eval_kl_per_sequence"] == pytest.approx(0.0, abs=1e-4)


def test_killed_and_gone_on_with_an_offloaded_run_ends_like_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS K3, K7: SIGKILL in a step leaves no file of what was away, and the last bits are those without offload."""
    monkeypatch.setenv(INTERRUPT, "0:")
    interrupt_at(0, "")
    base = merged(by_function("pays_and_interrupts", steps=4), {"checkpoint": {"every": 1, "keep_last": 2}})
    run(settings(tmp_path, merged(base, {"output": str(tmp_path / "kept")})))
    expected = outcome(tmp_path / "kept")

    away = {"reference": {"residency": "park"}, "memory": {"optimizer_residency": "park"}}
    tree = settings(tmp_path, merged(base, {"output": str(tmp_path / "away"), **away}))
    config = write_config(tree, tmp_path / "away.toml")
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}:{ROOT / 'tests'}"}
    program = [sys.executable, "-m", "fourfold", "run", str(config)]
    done = subprocess.run(program, env=environment | {INTERRUPT: "15:SIGKILL"}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in (tmp_path / "away" / "ppo").iterdir() if "offload" in path.name] == []
    run(tree)
    found = outcome(tmp_path / "away")
    known = [set(row) for row in expected["rows"]]
    found["rows"] = [
        {key: row[key] for key in row if key in keys} for row, keys in zip(found["rows"], known, strict=True)
    ]
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []

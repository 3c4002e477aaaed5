"""Scoring beside sampling: it does run beside it, says the same of every row, and fails as scoring afterwards does."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import ConfigError
from fourfold.errors import RunFailed
from fourfold.memory.budget import OverBudget
from fourfold.memory.meter import PhaseMeter
from fourfold.rollout.decoder import Decoder
from fourfold.rollout.local import LocalSampler
from fourfold.scoring.ahead import Ahead
from fourfold.scoring.sources import FunctionReward
from fourfold.training.checkpoint import rng_state
from fourfold.training.trainer import Trainer
from training.runs import by_function, by_model, make_config, make_trainer, merged, pays_by_hash, settings, steps_of

OVERLAP = {"sampling": {"overlap_scoring": True, "batch_size": 3}}


def trainer_of(folder: Path, changes: dict[str, Any], *, reward: Any = None, model: bool = False) -> Trainer:
    """A trainer of 8 rows in sampling batches of 3, 3 and 2."""
    tree = settings(folder, merged(by_function("pays_by_hash", steps=1), {"sampling": {"batch_size": 3}}))
    tree = merged(by_model(tree, folder / "scorer") if model else tree, changes)
    trainer = make_trainer(make_config(tree))
    if reward is not None:
        asked = FunctionReward(reward, trainer.models.base.tokenizer, retries=0)
        trainer.reward = asked
        if trainer.ahead is not None:
            ahead = Ahead(trainer.models.reference, asked, 1.0, trainer.sizes.ahead)
            trainer.ahead = trainer.accountant.hiding._ahead = ahead
            trainer.sampler._listener = ahead  # pyright: ignore[reportAttributeAccessIssue]
    return trainer


def test_overlap_scoring_works_beside_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score of the first rows is not given before a step more was taken: one after the other would hang."""
    told, stepped, threads, rows = threading.Event(), threading.Event(), set[str](), list[int]()
    tell, draw = LocalSampler._tell, Decoder._draw

    def tells(*given: Any) -> None:
        tell(*given)
        told.set()

    def draws(*given: Any) -> list[bool]:
        if told.is_set():
            stepped.set()
        return draw(*given)

    def waits(prompts: list[str], responses: list[str]) -> list[float]:
        rows.append(len(responses))
        threads.add(threading.current_thread().name.partition("_")[0])
        assert stepped.wait(timeout=60), "sampling waits for scoring"
        return pays_by_hash(prompts, responses)

    monkeypatch.setattr(LocalSampler, "_tell", tells)
    monkeypatch.setattr(Decoder, "_draw", draws)
    trainer = trainer_of(tmp_path, merged(OVERLAP, {"ppo": {"micro_batch_size": 4}}), reward=waits)
    trainer.step()
    assert threads == {"scoring"} and len(rows) >= 2 and sum(rows) == 8


@pytest.mark.parametrize("model", [False, True], ids=["function", "model"])
def test_every_row_gets_what_it_gets_afterwards(tmp_path: Path, model: bool) -> None:
    found = []
    for changes in ({}, OVERLAP):
        trainer = trainer_of(tmp_path, changes, model=model)
        before = rng_state()[0]
        rollout, activations = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
        scored, valid = trainer._score(rollout, activations)
        after = rng_state()[0]
        assert all(torch.equal(before[name], after[name]) for name in before), "no random number was drawn"
        assert bool(valid.all())
        found.append(scored)
    plain, ahead = found
    assert torch.equal(plain.sequences, ahead.sequences) and torch.equal(plain.log_probs, ahead.log_probs)
    assert plain.scores.std() > 0 and plain.kl.abs().max() < 1e-4
    for name in ("ref_log_probs", "kl", "values", "last_values", "scores"):
        assert torch.allclose(getattr(plain, name), getattr(ahead, name), atol=1e-5), name


def test_steps_say_what_was_hidden_and_evaluations_are_scored_too(tmp_path: Path) -> None:
    changes = {"data": {"prompts_test": {"path": str(tmp_path / "data" / "prompts_test.jsonl")}}, "ppo": {"steps": 2}}
    trainer = trainer_of(tmp_path, merged(OVERLAP, changes), model=True)
    plain = trainer_of(tmp_path, changes, model=True)
    trainer.check()
    plain.check()
    for row, other in zip(steps_of(trainer), steps_of(plain), strict=True):
        assert 0 <= row["score_hidden_seconds"] <= row["score_ahead_seconds"]
        assert row["score_hidden_share"] == row["score_hidden_seconds"] / row["score_ahead_seconds"]
        assert "score_ahead_seconds" not in other
        for name in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm", "critic_grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert trainer.last_evaluation is not None and plain.last_evaluation is not None
    assert trainer.last_evaluation.metrics == pytest.approx(plain.last_evaluation.metrics, rel=1e-3, abs=1e-4)
    said = trainer.accountant.hiding.condition(generate_seconds=5.0)
    assert said.startswith("overlap: reference and reward scored for ") and "beside sampling (5.0 s)" in said


def test_a_function_that_fails_stops_the_step(tmp_path: Path) -> None:
    def fails(prompts: list[str], responses: list[str]) -> list[float]:
        raise ConnectionError("no answer")

    trainer = trainer_of(tmp_path, OVERLAP, reward=fails)
    with pytest.raises(RunFailed, match="failed 1 times, last with ConnectionError: no answer"):
        trainer.step()


def test_scoring_that_runs_out_of_memory_is_halved_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, merged(OVERLAP, {"ppo": {"mini_batch_size": 4, "micro_batch_size": 4}}))
    rows: list[int] = []
    real = trainer.models.reference.log_probs

    def short(inputs: Any, part: Any, *args: Any, **given: Any) -> Any:
        rows.append(len(part.sequences))
        if len(part.sequences) > 1:
            raise OverBudget("short")
        return real(inputs, part, *args, **given)

    monkeypatch.setattr(trainer.models.reference, "log_probs", short)
    row = trainer.step()
    assert rows[0] > 1 and rows.count(1) == 8, "every row by itself in the end"
    assert (trainer.sizes.ahead.size, trainer.sizes.score.size, trainer.sizes.actor.size) == (1, 4, 4)
    assert row["score_micro_batch_size"] == 1


def test_a_rollout_that_nobody_scored_is_forgotten(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, OVERLAP)
    for step in range(2):
        rollout, activations = trainer.sampler.generate(trainer.prompts.batch(step), policy_version=step)
    scored, _ = trainer._score(rollout, activations)
    _, responses = local_texts(trainer, rollout)
    assert scored.scores.tolist() == pytest.approx(pays_by_hash([], responses))


def local_texts(trainer: Trainer, rollout: Any) -> tuple[list[str], list[str]]:
    from fourfold.scoring.sources import texts_of

    return texts_of(rollout, trainer.models.base.tokenizer)


def test_a_thread_beside_it_does_not_disturb_the_meter() -> None:
    meter = PhaseMeter(torch.device("cpu"))
    with meter.phase("score"):
        done = threading.Thread(target=lambda: _measured_elsewhere(meter))
        done.start()
        done.join()
        with meter.role("score", "critic"):
            pass
    assert set(meter.take()) == {"score", "score/critic"}


def _measured_elsewhere(meter: PhaseMeter) -> None:
    with meter.role("score", "reference"):
        pass


def test_one_sampling_batch_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path, OVERLAP)
        assert not caplog.messages
        trainer_of(tmp_path, merged(OVERLAP, {"sampling": {"batch_size": 0}}))
    assert [m for m in caplog.messages if "give a smaller sampling.batch_size" in m]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**OVERLAP, "ppo": {"kl_estimator": "full"}}, "sampling.overlap_scoring: true beside ppo.kl_estimator"),
        ({**OVERLAP, "memory": {"count_tensors": True}}, "sampling.overlap_scoring: true beside memory.count_tensors"),
        ({"reference": {"residency": "cpu"}}, "reference.residency: given 'cpu', and this run's device is the CPU"),
        (
            {"reference": {"residency": "cpu"}, "ppo": {"kl_estimator": "full"}, "system": {"device": "cuda"}},
            "reference.residency: given 'cpu' beside ppo.kl_estimator = 'full'",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(settings(tmp_path, merged(by_function("pays_by_hash"), changes)))

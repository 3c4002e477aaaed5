"""An update that `ppo.target_kl` ends says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fourfold.training.update import update
from training.runs import by_function, make_config, make_experience, make_trainer, settings


def test_an_early_stop_names_the_kl_its_bound_and_the_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS N6: with a bound of 0 the first mini-batch of the first epoch reaches it."""
    config = make_config(settings(tmp_path, by_function("pays_by_hash", target_kl=0.0, num_epochs=3)))
    trainer = make_trainer(config)
    experience, activations = make_experience(trainer)
    with caplog.at_level(logging.WARNING):
        update(trainer.learner, experience, activations, trainer.config.ppo, temperature=1.0, seed=0)
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("fourfold.training")]
    assert message.startswith("learn: KL(old, new) of ")
    assert message.endswith("nats a token reached ppo.target_kl = 0; the update ends in epoch 1 of 3")

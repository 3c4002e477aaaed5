"""What the critic learns before PPO where responses are cut."""

from __future__ import annotations

from pathlib import Path

import torch

from fourfold.training import pretraining
from training.runs import by_function, give_value_head, make_config, make_trainer, merged, settings
from training.test_critics import PRETRAINED


def test_pretraining_asks_no_value_for_what_comes_behind_a_cut_response(tmp_path: Path) -> None:
    """Under ppo.truncation = "bootstrap" too: those values are what it is to mend."""
    few = {"ppo": {"truncation": "bootstrap", "kl_coef": 0.0}, "sampling": {"max_new_tokens": 3}}
    trainer = make_trainer(
        make_config(merged(settings(tmp_path, by_function("pays_by_prompt", steps=1)), merged(PRETRAINED, few)))
    )
    give_value_head(trainer.models)
    experience, _ = pretraining._experience(trainer, trainer.prompts.elsewhere(1), 1)
    assert experience.truncated.any()
    scores = experience.scores[:, None].expand_as(experience.returns)
    torch.testing.assert_close(experience.returns[experience.response_mask], scores[experience.response_mask])

"""With a learning rate of 0 nothing may happen: ratio 1, KL 0, nothing clipped, every weight as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    steps_of,
    weights_of,
)

# sampling.batch_size, mini_batch_size, micro_batch_size of a rollout of 6.
SIZES = [(0, 6, 6), (4, 3, 3), (1, 6, 2), (6, 2, 1)]
STILL = {"learning_rate": 0.0, "weight_decay": 0.1}


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("sharing", ["trunk", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nothing_happens(tmp_path: Path, family: str, sharing: str, pad_is_eos: bool) -> None:
    """FAULTS A3, A5, A6, A14, C9: prompts of 1 to 10 tokens, learned and rotary positions, temperature 0.7.

    Responses do not depend on the sizes either, so every combination reports the same rollout.
    """
    lengths = None
    for number, (sampled, mini, micro) in enumerate(SIZES):
        ppo = STILL | {
            "rollout_batch_size": 6, "mini_batch_size": mini, "micro_batch_size": micro, "num_epochs": 2, "steps": 1,
            "entropy_coef": 0.01, "dual_clip": 3.0,
        }  # fmt: skip
        changes = merged(by_function("pays_by_hash", **ppo), {"critic": STILL, "output": str(tmp_path / str(number))})
        changes = merged(changes, {"sampling": {"temperature": 0.7, "batch_size": sampled}})
        tree = settings(tmp_path, merged(changes, SHARINGS[sharing]), family=family, pad_is_eos=pad_is_eos)
        trainer = make_trainer(make_config(tree))
        give_value_head(trainer.models)
        prompts = trainer.prompts.batch(0).tokens
        assert min(map(len, prompts)) < max(map(len, prompts)), "prompts of mixed lengths"
        before = weights_of(trainer.models.actor), weights_of(trainer.models.critic)
        [row] = steps_of(trainer)

        assert row["kl_per_sequence_mean"] == row["kl_k1_per_sequence_mean"] == row["kl_k3_per_sequence_mean"] == 0.0
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert row["ratio_max"] == pytest.approx(1.0, abs=2e-5)
        assert row["approx_kl_per_token_mean"] == pytest.approx(0.0, abs=1e-9)
        assert row["policy_clip_fraction"] == row["dual_clip_fraction"] == row["value_clip_fraction"] == 0.0
        assert row["sampler_gap_max"] < 1e-4
        assert row["actor_optimizer_steps"] == row["critic_optimizer_steps"] == 2 * 6 // mini
        assert row["actor_grad_norm"] > 1e-4 and row["critic_grad_norm"] > 1e-4, "there was something to learn"
        for role, weights in zip((trainer.models.actor, trainer.models.critic), before, strict=True):
            assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(role).items())
        seen = (row["response_length_mean"], row["score_mean"])
        lengths = lengths or seen
        assert seen == lengths

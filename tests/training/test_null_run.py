"""With a learning rate of 0 nothing may happen: ratio 1, KL 0, nothing clipped, every weight as it was."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.algorithms.log_probs import fused_log_probs
from fourfold.memory.budget import BatchSizes
from fourfold.models import heads
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.local import LocalSampler
from fourfold.training.state import Progress
from fourfold.training.trainer import Trainer
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    weights_of,
)

ROWS, TEMPERATURE = 6, 0.7
MINI, MICRO, EPOCHS, CHUNK_TOKENS = (6, 3), (6, 3, 1), (1, 2), (1, 5, 1024)
SIZES = [sizes for sizes in itertools.product(MINI, MICRO, EPOCHS, CHUNK_TOKENS) if sizes[0] % sizes[1] == 0]
# sampling.batch_size, in turn.
SAMPLED = (0, 4, 1, 6)
STILL = {"learning_rate": 0.0, "weight_decay": 0.1}


def still_trainer(folder: Path, family: str, sharing: str, pad_is_eos: bool) -> Trainer:
    ppo = STILL | {
        "rollout_batch_size": ROWS, "mini_batch_size": ROWS, "micro_batch_size": ROWS, "steps": 1,
        "entropy_coef": 0.01, "dual_clip": 3.0,
    }  # fmt: skip
    changes = merged(by_function("pays_by_hash", **ppo), {"critic": STILL, "sampling": {"temperature": TEMPERATURE}})
    trainer = make_trainer(
        make_config(settings(folder, merged(changes, SHARINGS[sharing]), family=family, pad_is_eos=pad_is_eos))
    )
    give_value_head(trainer.models)
    return trainer


def step_with(trainer: Trainer, mini: int, micro: int, epochs: int, sampled: int) -> dict[str, float]:
    """The first step, as a run with these sizes takes it."""
    sizes = {"mini_batch_size": mini, "micro_batch_size": micro, "num_epochs": epochs}
    trainer.config = trainer.config.model_copy(update={"ppo": trainer.config.ppo.model_copy(update=sizes)})
    sampling = SamplingSettings(trainer.config.sampling.max_new_tokens, TEMPERATURE)
    trainer.sizes = BatchSizes.of(trainer.config.ppo, sampled)
    trainer.sampler = LocalSampler(trainer.models.base, trainer.models.actor, sampling, trainer.sizes)
    trainer.progress = Progress(kl_coef=trainer.config.ppo.kl_coef)
    return trainer.step()


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sharing: str, pad_is_eos: bool
) -> None:
    """FAULTS A3, A5, A6, A11, A14, C9: prompts of several lengths, learned and rotary positions, temperature 0.7.

    Responses do not depend on the sizes either, so every combination reports the same rollout.
    """
    trainer = still_trainer(tmp_path, family, sharing, pad_is_eos)
    lengths = [len(tokens) for tokens in trainer.prompts.batch(0).tokens]
    assert min(lengths) < max(lengths), "prompts of mixed lengths"
    roles = (trainer.models.actor, trainer.models.critic)
    before = [weights_of(role) for role in roles]
    rollouts, chunks = set(), set()

    def in_chunks(chunk: int, *args: Any, **named: Any) -> Any:
        chunks.add(chunk)
        return fused_log_probs(*args, chunk_tokens=chunk, **named)

    # All combinations where most is shared; what fills the padding and what a role owns have no part in how a batch is
    # cut, so that a few show it, among them every size (7 and 4 are no multiples of the number of chunk sizes).
    combinations = SIZES[::7] if pad_is_eos else SIZES if sharing == "trunk" else SIZES[::4]
    for (mini, micro, epochs, chunk), sampled in zip(combinations, itertools.cycle(SAMPLED), strict=False):
        monkeypatch.setattr(heads, "fused_log_probs", partial(in_chunks, chunk))
        row = step_with(trainer, mini, micro, epochs, sampled)

        assert row["kl_per_sequence_mean"] == row["kl_k1_per_sequence_mean"] == row["kl_k3_per_sequence_mean"] == 0.0
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert row["ratio_max"] == pytest.approx(1.0, abs=2e-5)
        assert row["approx_kl_per_token_mean"] == pytest.approx(0.0, abs=1e-9)
        assert row["policy_clip_fraction"] == row["dual_clip_fraction"] == row["value_clip_fraction"] == 0.0
        assert row["sampler_gap_max"] < 1e-4
        assert row["actor_optimizer_steps"] == row["critic_optimizer_steps"] == epochs * ROWS // mini
        assert row["actor_grad_norm"] > 1e-4 and row["critic_grad_norm"] > 1e-4, "there was something to learn"
        rollouts.add((row["response_length_mean"], row["score_mean"]))
    for role, weights in zip(roles, before, strict=True):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(role).items())
    assert len(rollouts) == 1 and chunks == set(CHUNK_TOKENS)

"""Stage 1, sft: next-token prediction on texts, so that sampling starts from the domain (Ouyang et al. 2022, 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fourfold.config.schema import RunConfig
from fourfold.data.told_weights import given_tokens
from fourfold.diagnostics.progress import stage_progress
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize, batch_size
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, make_trainable
from fourfold.models.storage import save_role
from fourfold.training.census import made_beside, stage_census
from fourfold.training.stage import Say, Stage, learn_from, say_what_is_trained, stage_optimizer, stage_size
from fourfold.training.texts import TextCache, epoch_batches

Texts = Sequence[Sequence[int]]


def nll_sum(policy: Policy, activations: Activations, ids: Tensor, texts: Texts) -> tuple[Tensor, int]:
    """Sum of -log p over all tokens of the texts but those that are given, and how many they are.

    Given is the first token of each, or what it is told of weights.
    """
    given = torch.tensor([given_tokens(text) for text in texts], device=ids.device)
    mask = activations.mask[:, 1:] & (torch.arange(1, ids.shape[1], device=ids.device) >= given[:, None])
    hidden = policy.through(activations)[:, :-1][mask]
    log_probs, _ = policy.head.log_probs(hidden, ids[:, 1:][mask], 1.0, policy.branch.compute_dtype, entropy="none")
    return -log_probs.sum(), int(mask.sum())


class TextInputs(Protocol):
    """What makes the inputs of policies of texts; a cache does for those that it holds."""

    def activations(self, texts: Texts) -> tuple[Activations, Tensor]:
        """Right-padded input of the policies, and the ids [batch, time]."""
        ...


@torch.no_grad()
def mean_nll(policy: Policy, inputs: TextInputs, texts: Texts, rows_at_once: int | BatchSize) -> float:
    """Nats a token on texts (teacher-forced); a mean that is not finite stops the run."""
    total, count = 0.0, 0
    size = batch_size(rows_at_once, "sft", "sft policy")

    def add(piece: slice) -> None:
        nonlocal total, count
        some = [texts[row] for row in rows[piece]]
        loss, tokens = nll_sum(policy, *inputs.activations(some), some)
        total, count = total + float(loss), count + tokens

    for rows in epoch_batches([len(text) for text in texts], size.size, seed=0, epoch=0):
        size.through(len(rows), add)
    if not math.isfinite(total):
        raise RunFailed(
            f"{size.phase}: the {size.role}'s loss on held-out texts is {total / count}; nothing was stored, the "
            "stage's last checkpoint is kept; its weights are damaged, or the stage's learning_rate is too high"
        )
    return total / count


def fill_cache(cache: TextCache, texts: Texts, title: str) -> None:
    """Compute the trunk's activations of texts that are not cached yet, with a progress bar."""
    missing = cache.missing(texts)
    if missing:
        with stage_progress(title, len(missing), unit="texts") as progress:
            for count in cache.fill(missing):
                progress.advance(count)


def train_sft(
    config: RunConfig, base: Base, cache: TextCache, texts: Texts, test: Texts, folder: Path, say: Say
) -> dict[str, float]:
    """Train the policy on texts and store it in `folder`/model; returns the stage's metrics."""
    settings, record = config.sft, record_for(config, "policy")
    fill_cache(cache, [*texts, *test], "sft: trunk activations")
    with made_beside(base, "sft policy", config):
        policy = base.new_policy()
        make_trainable(policy, with_language_head=not base.shares_head, memory=config.memory)
    say_what_is_trained("sft", policy, base, say)
    size = stage_size("sft", "sft policy", settings.micro_batch_size, config, base)
    lengths = [len(text) for text in texts]
    batches = [
        batch
        for epoch in range(settings.num_epochs)
        for batch in epoch_batches(lengths, settings.batch_size, seed=config.seed, epoch=epoch)
    ]
    optimizer = stage_optimizer("sft policy", policy, settings, len(batches), config, base, folder)
    census = stage_census(config, base, "sft policy", policy, optimizer, lambda: cache.bytes)
    size.describe = census.describe
    metrics: dict[str, float] = {"texts": len(texts)}
    if test:
        metrics["test_nll_before"] = mean_nll(policy, cache, test, size)

    def learn(step: int) -> float:
        batch = [texts[row] for row in batches[step]]
        tokens = sum(len(text) - given_tokens(text) for text in batch)

        def loss_sum(some: Texts) -> Tensor:
            return nll_sum(policy, *cache.activations(some), some)[0]

        return learn_from(batch, loss_sum, tokens, optimizer, size)

    every = config.checkpoint.stage_every
    stage = Stage("sft", folder, policy, record, optimizer, len(batches), learn, every, size)
    stage.run()
    metrics |= stage.noted(settings.micro_batch_size)
    if test:
        metrics["test_nll_after"] = mean_nll(policy, cache, test, size)
    save_role(folder / "model", policy, record)
    return metrics

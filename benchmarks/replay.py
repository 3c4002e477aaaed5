"""Responses that are drawn once and given again, so that both sides of a comparison learn from the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.batch_files import read_batch, write_batch
from fourfold.models.micro_batches import cut_rows, micro_batches
from fourfold.models.roles import Activations
from fourfold.rollout.sampler import PromptBatch
from fourfold.training.trainer import Trainer


class Replay:
    """A sampler that gives the responses in a file, which the trainer's own sampler draws when there is none yet.

    Whatever the trainer's models say of the responses is theirs: activations and `log_probs` are made anew, by one
    pass over the given tokens. `sampler_log_probs` stay those of the sampler that drew them.
    """

    def __init__(self, trainer: Trainer, path: Path) -> None:
        self._trainer = trainer
        self._sampler = trainer.sampler
        self._path = path
        self.log_prob_gap = 0.0  # mean |difference| from the log-probs of who drew, nats a token

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """The responses to these prompts; ValueError when those in the file answer others."""
        if not self._path.is_file():
            drawn, _ = self._sampler.generate(prompts, policy_version=policy_version)
            write_batch(self._path, drawn)
        given = read_batch(self._path).to(next(self._trainer.models.actor.parameters()).device)
        if given.prompt_id.tolist() != list(prompts.prompt_ids):
            raise ValueError(
                f"{self._path}: has responses to the prompts {given.prompt_id.tolist()}, asked for are "
                f"{list(prompts.prompt_ids)}; give both sides the same seed, prompts and batch size"
            )
        activations = Activations(self._inputs(given), given.attention_mask)
        found = self._log_probs(given, activations)
        self.log_prob_gap = float((found - given.log_probs).abs()[given.response_mask].mean())
        rollout = replace(given, log_probs=found)
        self._tell(rollout, activations)
        return rollout, activations

    def _inputs(self, given: Rollout) -> Tensor:
        """What the roles read: the trunk's output where it is cached, else ids."""
        trunk = self._trainer.models.base.trunk
        if trunk is None or self._trainer.models.actor.trunk is not None:
            return given.sequences
        return trunk(given.sequences, given.attention_mask)

    def _log_probs(self, given: Rollout, activations: Activations) -> Tensor:
        """By the actor, in the micro-batches of a rollout that it has drawn itself."""
        found, rows = (
            torch.zeros_like(given.log_probs),
            torch.arange(len(given.log_probs), device=given.log_probs.device),
        )
        temperature = self._trainer.config.sampling.temperature
        for chosen, part, inputs in micro_batches(
            given, activations, cut_rows(given, rows, self._trainer.sizes.log_probs.size)
        ):
            log_probs, _ = self._trainer.models.actor.log_probs(inputs, part, temperature)
            found[chosen, : log_probs.shape[1]] = log_probs
        return found

    def _tell(self, rollout: Rollout, activations: Activations) -> None:
        """Who scores ahead hears of the rows as if they had been sampled just now."""
        if self._trainer.ahead is None:
            return
        self._trainer.ahead.begin()
        rows = torch.arange(len(rollout.sequences), device=rollout.sequences.device)
        for chosen in rows.split(self._trainer.sizes.generate.size or len(rows)):
            part = rollout.select(chosen), activations.select(chosen)
            self._trainer.ahead.finished(chosen.tolist(), *part)

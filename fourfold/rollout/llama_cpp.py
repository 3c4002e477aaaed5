"""Responses drawn by llama.cpp, on the CPU, from the actor in float16 or Q8_0.

Rows have the random numbers that they have in the local sampler, so that what differs is the engine's rounding. The
engine gives ids and log-probs; one batched pass of the training engine gives activations and log-probs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.models.llama_actor import LlamaActor
from fourfold.models.llama_cpp import SEQUENCES, LlamaCpp
from fourfold.models.loading import Base
from fourfold.models.roles import Activations
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.draw import draw_tokens, row_uniforms
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.outside import Response, rollout_of
from fourfold.rollout.sampler import PromptBatch


class LlamaSampler:
    """Draws from `actor`; `exact` says what the training engine makes of it."""

    def __init__(self, base: Base, actor: LlamaActor, settings: SamplingSettings, exact: LocalSampler) -> None:
        self._base = base
        self._actor = actor
        self._settings = settings
        self._exact = exact

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """One response a row, as many rows side by side as the engine takes."""
        engine, responses = self._actor.current(), list[Response]()
        limit = self._settings.limited(prompts).max_new_tokens
        for start in range(0, len(prompts.tokens), SEQUENCES):
            chosen = slice(start, start + SEQUENCES)
            responses += self._drawn(engine, prompts.tokens[chosen], prompts.seeds[chosen], limit)
        return self._exact.taken_up(rollout_of(self._base, prompts, responses, policy_version))

    def _drawn(
        self, engine: LlamaCpp, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limit: int
    ) -> list[Response]:
        """Responses of at most `limit` tokens to these prompts; a row that has ended leaves the batch."""
        uniforms = row_uniforms(seeds, limit)
        responses = [Response([], []) for _ in prompts]
        growing = engine.growing(len(prompts), sum(map(len, prompts)) + len(prompts) * limit)
        more = {row: list(tokens) for row, tokens in enumerate(prompts)}
        for t in range(limit):
            drawn = draw_tokens(growing.logits_after(more) / self._settings.temperature, uniforms[list(more), t])
            if drawn is None:
                raise RunFailed(
                    f"generate: llama.cpp's logits for response token {t} are not finite; the actor's weights are "
                    "damaged or the learning rate is too high; the last good checkpoint is kept"
                )
            tokens, log_probs = (each.tolist() for each in drawn)
            for row, token, log_prob in zip(more, tokens, log_probs, strict=True):
                responses[row].tokens.append(token)
                responses[row].log_probs.append(log_prob)
                responses[row].ended = token in self._base.eos_ids or self._completes_stop_string(responses[row])
            more = {row: responses[row].tokens[-1:] for row in more if not responses[row].ended}
            if not more:
                break
        return responses

    def _completes_stop_string(self, response: Response) -> bool:
        stops = self._settings.stop_strings
        text = self._base.tokenizer.decode(response.tokens, skip_special_tokens=False) if stops else ""
        return any(stop in text for stop in stops)

"""Responses drawn by a vLLM server that the user runs, from the base that it serves and the actor's adapters.

The server is vLLM's own (`vllm serve MODEL --enable-lora`), which takes the adapters as a peft folder before every
rollout, each under a new name: what it has cached of a prompt under another name is not used. A request is a row, with
the row's seed; vLLM batches what is waiting. It gives ids and log-probs, and one batched pass of the training engine
gives activations and log-probs of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from fourfold.algorithms.masking import masked_mean
from fourfold.batch import Rollout
from fourfold.config.schema import AdaptersSection
from fourfold.errors import RunFailed
from fourfold.models.adapters import adapters_of
from fourfold.models.loading import Base
from fourfold.models.peft_folder import write_peft_folder
from fourfold.models.roles import Activations, Policy
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.guarded import mean_gap
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.outside import Response, rollout_of
from fourfold.rollout.sampler import PromptBatch

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# All that a server's own defaults (a model's generation_config.json) could bend the distribution by.
UNBENT: dict[str, Any] = {
    "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "min_tokens": 0, "stream": False, "echo": False,
}  # fmt: skip
# What a run draws at its start, to see whether the server's distribution is the actor's.
PROBE_ROWS, PROBE_PROMPT, PROBE_TOKENS = 8, 8, 12
PROBE_SIZES = (0.1, 0.3, 1.0, 3.0)
FLAGS = (
    "start it as docs/sampling.md says: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora "
    "--max-lora-rank RANK --logprobs-mode processed_logprobs"
)


class Client(Protocol):
    """A connection to the server; RunFailed where it does not answer, or refuses."""

    url: str

    def get(self, path: str) -> dict[str, Any]:
        """What the server says there."""
        ...

    def ask(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        ...

    def tell(self, path: str, message: dict[str, Any]) -> None:
        """A request whose answer says nothing but that it was done."""
        ...


class VllmServer:
    """The server with the actor's adapters as they are now; as many requests at a time as there are clients."""

    def __init__(
        self, clients: Sequence[Client], policy: Policy, adapters: AdaptersSection, model: str, folder: Path
    ) -> None:
        """`folder` is where adapters are written, one that the server can read; `model` is for people."""
        self._clients, self._policy, self._settings = clients, policy, adapters
        self._model, self._folder = model, folder.absolute()
        self._names = (f"fourfold-{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())
        served = clients[0].get(MODELS).get("data")
        if not isinstance(served, list) or not served:
            raise ValueError(f"sampling.url: {clients[0].url} lists no models as vLLM does; {FLAGS}")

    @property
    def url(self) -> str:
        """Its address."""
        return self._clients[0].url

    @contextlib.contextmanager
    def current(self) -> Iterator[str]:
        """Within, the name of a model at the server: its base with the adapters as they are now."""
        name = next(self._names)
        folder = self._folder / name
        write_peft_folder(folder, adapters_of(self._policy.branch), self._settings, self._model)
        try:
            self._clients[0].tell(LOAD, {"lora_name": name, "lora_path": str(folder)})
        finally:
            shutil.rmtree(folder)  # the server has read it
        try:
            yield name
        finally:
            with contextlib.suppress(RunFailed):  # one that it has forgotten, after a restart
                self._clients[0].tell(UNLOAD, {"lora_name": name})

    def complete(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, in the order of the requests."""
        free: queue.SimpleQueue[Client] = queue.SimpleQueue()
        for client in self._clients:
            free.put(client)

        def one(message: dict[str, Any]) -> dict[str, Any]:
            client = free.get()
            try:
                return client.ask(COMPLETIONS, message)
            finally:
                free.put(client)

        with ThreadPoolExecutor(len(self._clients), thread_name_prefix="vllm") as pool:
            return list(pool.map(one, requests))


class VllmSampler:
    """Draws at `server`; `exact` says what the training engine makes of it."""

    def __init__(self, base: Base, server: VllmServer, settings: SamplingSettings, exact: LocalSampler) -> None:
        self._base = base
        self._server = server
        self._settings = settings
        self._exact = exact

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        """One response a row, all of them asked for at once."""
        limit = self._settings.limited(prompts).max_new_tokens
        with self._server.current() as model:
            asked = [
                self._request(model, tokens, seed, limit)
                for tokens, seed in zip(prompts.tokens, prompts.seeds, strict=True)
            ]
            answers = self._server.complete(asked)
        drawn = [self._response(answer, message) for answer, message in zip(answers, asked, strict=True)]
        return self._exact.taken_up(rollout_of(self._base, prompts, drawn, policy_version))

    def _request(self, model: str, tokens: Sequence[int], seed: int, limit: int) -> dict[str, Any]:
        return {
            **UNBENT,
            "model": model,
            "prompt": list(tokens),
            "max_tokens": limit,
            "temperature": self._settings.temperature,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,  # ids that end a response are the run's
            "stop_token_ids": sorted(self._base.eos_ids),
            "stop": list(self._settings.stop_strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }

    def _response(self, answer: dict[str, Any], asked: dict[str, Any]) -> Response:
        try:
            [choice] = answer["choices"]
            tokens, numbers = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            read, reason = choice["prompt_token_ids"], choice["finish_reason"]
            sound = len(tokens) == len(numbers) and 0 < len(tokens) <= asked["max_tokens"]
            sound = sound and all(type(token) is int and token >= 0 for token in tokens)
            sound = sound and all(math.isfinite(number) and number <= 1e-3 for number in numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFailed(
                f"generate: the answer of {self._server.url} cannot be used ({error!r} in it); vLLM 0.11 and later "
                f"give token ids and log-probs; {FLAGS}"
            ) from error
        if not sound or reason not in ("stop", "length"):
            raise RunFailed(
                f"generate: {self._server.url} drew {len(tokens)} tokens (asked for: {asked['max_tokens']} at most) "
                f"with {len(numbers)} log-probs and ended by {reason!r}; the last good checkpoint is kept"
            )
        if read != asked["prompt"]:
            raise RunFailed(
                f"generate: {self._server.url} read the prompt as {read[:8]}, asked was {asked['prompt'][:8]}: it "
                "holds another model, or changes prompts"
            )
        return Response(tokens, [float(number) for number in numbers], reason == "stop")


@torch.no_grad()
def verify(sampler: VllmSampler, exact: LocalSampler, policy: Policy, vocabulary: int, most: float) -> float:
    """Mean gap of the server's log-probs from the training engine's, nats a token, with adapters that matter.

    New adapters change nothing, so for the probe their second matrices are random, as large as it takes to move the
    log-probs by more than twice `most`. ValueError where the gap is beyond `most`: another model, log-probs of another
    temperature, or adapters that do not act.
    """
    generator, seeds = torch.Generator().manual_seed(0), list(range(PROBE_ROWS))
    rows = torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_PROMPT), generator=generator).tolist()
    gap = 0.0
    for size in PROBE_SIZES:
        with _acting_adapters(policy, size):
            rollout, _ = sampler.generate(PromptBatch(rows, seeds, seeds, PROBE_TOKENS), policy_version=0)
        gap = mean_gap(rollout)
        plain, _ = exact.taken_up(rollout)
        moved = masked_mean((rollout.log_probs - plain.log_probs).abs(), rollout.response_mask)
        if gap > most or float(moved) > 2 * most:
            break
    if not gap <= most:
        raise ValueError(
            f"sampling.url: the server's log-probs are {gap:.3g} nats a token from this run's actor with "
            f"adapters on a probe (allowed by sampling.max_gap: {most:g}); it serves another model than model.path, "
            f"gives raw log-probs at a temperature other than 1, or takes no adapters; {FLAGS}"
        )
    return gap


@contextlib.contextmanager
def _acting_adapters(policy: Policy, size: float) -> Iterator[None]:
    """Within, the second matrix of each adapter is random."""
    pairs = list(adapters_of(policy.branch).values())
    before = [second.detach().clone() for _, second in pairs]
    generator = torch.Generator().manual_seed(1)
    try:
        for _, second in pairs:
            second.copy_(size * torch.randn(second.shape, generator=generator) / math.sqrt(second.shape[1]))
        yield
    finally:
        for (_, second), kept in zip(pairs, before, strict=True):
            second.copy_(kept)

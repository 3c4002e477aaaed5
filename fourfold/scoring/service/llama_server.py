"""llama.cpp's own server as the engine of a reference: log-probs of given ids from an endpoint that writes its own.

A llama-server says how probable the tokens were that it has drawn, by the model's logits before anything that steers
the drawing. So it is made to draw the given ids: by a grammar of token ids, and where that cannot be (ids that end a
response, that stand for nothing, or for a part of a character) one at a time by a logit bias. Each token costs a step
of decoding; temperature 1 is the only one.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fourfold.config.schema import ServiceSection
from fourfold.errors import RunFailed
from fourfold.scoring.service.client import Service

COMPLETION, PROPERTIES = "/completion", "/props"
# No sampler but the bias: it lifts the wanted id above all others.
_STEERING = {"samplers": [], "temperature": 1.0, "n_probs": 1, "cache_prompt": True}
_LIFT = 1e6
# What the server writes for a probability that is 0 in float32.
_UNDERFLOW = -1e30


class LlamaServer:
    """A llama-server that a user runs, asked for as many rows at a time as it has slots; residency of its role."""

    device = torch.device("cpu")  # requests are made from lists of ids
    elsewhere = computes_elsewhere = True

    def __init__(self, settings: ServiceSection, ordinary: Collection[int]) -> None:
        """`ordinary`: ids that a grammar can make the server draw."""
        self.url = settings.url.rstrip("/")
        self._ordinary = ordinary
        try:
            slots = int(Service(settings).get(PROPERTIES)["total_slots"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"service.url: {self.url} does not say how many slots it has, as a llama-server does; with "
                "reference.engine = 'llama_cpp' start `llama-server -m FILE.gguf`"
            ) from error
        # A client of its own for each slot: the server keeps what it has read of a row there.
        self._clients = [Service(settings) for _ in range(slots)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._seconds = 0.0

    @property
    def where(self) -> str:
        """For the table of roles."""
        return f"at {self.url}, llama.cpp"

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Nothing has to come in; the seconds are counted."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def read(self, tensor: Tensor) -> Tensor:
        """Its numbers are elsewhere."""
        raise AssertionError(f"the reference's weights are {self.where}")

    def take(self) -> dict[str, float]:
        """Seconds that the role was in use, and bytes to and fro, since the last `take`."""
        moved = sum(client.moved_bytes for client in self._clients)
        taken = {"pass_seconds": self._seconds, "moved_bytes": float(moved)}
        self._seconds = 0.0
        for client in self._clients:
            client.moved_bytes = 0
        return taken

    def log_probs(self, rows: Sequence[Sequence[int]], starts: Sequence[int], temperature: float) -> Tensor:
        """Of the tokens of each row from its start on, rows one after the other: float32 [tokens]."""
        assert temperature == 1.0, "the server's probabilities are those of temperature 1"
        with ThreadPoolExecutor(len(self._clients), thread_name_prefix="llama-server") as pool:
            found = list(pool.map(self._row, rows, starts))
        return torch.tensor([number for row in found for number in row])

    def _row(self, row: Sequence[int], start: int) -> list[float]:
        slot = self._free.get()
        try:
            found: list[float] = []
            for begin, end in self._runs(row, start):
                found += self._forced(slot, row[:begin], row[begin:end])
            return found
        finally:
            self._free.put(slot)

    def _runs(self, row: Sequence[int], start: int) -> Iterator[tuple[int, int]]:
        """Cut the tokens from `start` on into runs that one request forces: of ordinary ids, and single other ones."""
        begin = start
        for at in range(start, len(row)):
            if row[at] not in self._ordinary:
                if begin < at:
                    yield begin, at
                yield at, at + 1
                begin = at + 1
        if begin < len(row):
            yield begin, len(row)

    def _forced(self, slot: int, before: Sequence[int], ids: Sequence[int]) -> list[float]:
        message: dict[str, Any] = {**_STEERING, "prompt": list(before), "n_predict": len(ids), "id_slot": slot}
        if ids[0] in self._ordinary:
            message["grammar"] = "root ::= " + " ".join(f"<[{token}]>" for token in ids)
        else:
            message["logit_bias"] = [[ids[0], _LIFT]]
        try:
            said = self._clients[slot].ask(COMPLETION, message).get("completion_probabilities", [])
            drawn, numbers = [each["id"] for each in said], [float(each["logprob"]) for each in said]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFailed(f"score: the reference: the answer of {self.url} cannot be used: {error!r}") from error
        except RunFailed as error:
            raise RunFailed(f"score: the reference: {error}") from error
        if drawn != list(ids):
            raise RunFailed(
                f"score: the reference: the server at {self.url} was to draw the ids {list(ids)[:8]} and drew "
                f"{drawn[:8]}; it is too old for grammars of token ids (llama.cpp of 2026 has them), or holds another "
                "vocabulary"
            )
        if not min(numbers) > _UNDERFLOW:
            raise RunFailed(
                f"score: the reference: a token's probability at {self.url} is 0 in float32; the actor has left what "
                "the reference would ever write: raise ppo.kl_coef, or set reference.residency = 'keep'"
            )
        return numbers


def ordinary_ids(tokenizer: Any) -> frozenset[int]:
    """Ids whose text is one or more whole characters and that end or steer nothing."""
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in added]
    texts = tokenizer.batch_decode([[token] for token in ids])
    return frozenset(token for token, text in zip(ids, texts, strict=True) if text and "\ufffd" not in text)

"""Reference and reward score rows that have ended while others are still sampled, as many at once as there are slots.

What it saves: their seconds, as far as sampling leaves the processor room; with a role on the CPU below a GPU all of
them, where they are fewer than sampling's. What it changes: rows are cut into micro-batches as they end,
not over the whole rollout, so sums round otherwise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from fourfold.batch import Rollout
from fourfold.memory.budget import BatchSize
from fourfold.models.roles import Activations, Policy
from fourfold.scoring.combined import Reward, asked_once, parts_of, told_by
from fourfold.scoring.opinions import OfParts, Opinions, ask, of_reference, of_reward


class Ahead:
    """A thread that scores rows as they are finished; it draws no random numbers of its own."""

    def __init__(self, reference: Policy, reward: Reward, temperature: float, size: BatchSize) -> None:
        self._reference = (reference, of_reference(reference, temperature, size))
        told, self._parts = told_by(reward), len(parts_of(reward))
        self._rewards = [(each, of_reward(each, size, told), columns) for each, columns in asked_once(reward)]
        self._size = size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._coming: list[tuple[Sequence[int], Future[Opinions]]] = []
        self._stream: torch.cuda.Stream | None = None
        self._worked = self._waited = 0.0

    def begin(self) -> None:
        """A rollout begins; what nobody asked for of the one before is dropped."""
        wait([future for _, future in self._coming])
        self._coming.clear()

    def finished(self, rows: Sequence[int], rollout: Rollout, activations: Activations) -> None:
        """Score these rows of the rollout soon."""
        ready = None
        if (device := rollout.sequences.device).type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            ready = torch.cuda.current_stream(device).record_event()
        self._coming.append((rows, self._pool.submit(self._score, rollout, activations, ready)))

    @torch.no_grad()
    def _score(self, rollout: Rollout, activations: Activations, ready: Any) -> Opinions:
        started = time.perf_counter()
        with self._beside_sampling(ready):
            found = Opinions.empty(rollout, self._parts)
            ask(found, rollout, activations, *self._reference, self._size)
            for role, asked, columns in self._rewards:
                ask(OfParts(found, columns), rollout, activations, role, asked, self._size)
        self._worked += time.perf_counter() - started
        return found

    @contextlib.contextmanager
    def _beside_sampling(self, ready: Any) -> Iterator[None]:
        """Within, a GPU's work goes to a stream of its own; it begins when the rows are `ready` and is done at the end.

        The rows stay alive meanwhile, so that nobody else is given their memory.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def take(self, found: Opinions) -> None:
        """Put what reference and reward say of the rollout into `found`, once they have said it all."""
        started, scored = time.perf_counter(), 0
        try:
            for rows, part in [(rows, future.result()) for rows, future in self._coming]:
                at = torch.tensor(rows, device=part.scores.device)
                found.put(at, ref_log_probs=part.ref_log_probs, scores=part.scores, valid=part.valid)
                scored += len(rows)
        finally:
            self._coming.clear()
            self._waited += time.perf_counter() - started
        assert scored == len(found.scores), "every row of the rollout was sampled while this listened"

    def seconds(self) -> tuple[float, float]:
        """Seconds of the work and, of these, hidden behind other work, since the last call."""
        worked, hidden = self._worked, max(self._worked - self._waited, 0.0)
        self._worked = self._waited = 0.0
        return worked, hidden

"""The roles that a service computes, as the run sees them: a reference and a reward like any other.

Token ids travel, but for a reward model of another family: the run decodes them, as it does for one that it holds
itself, so that the service needs neither the actor's tokenizer nor any other model.

Before a score phase goes through its micro-batches it can send all of them off (`sent_ahead`); the service then works
while the run goes on with the roles it holds itself.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fourfold.algorithms.log_probs import Entropy
from fourfold.batch import Rollout
from fourfold.errors import RunFailed
from fourfold.memory.budget import BatchSize, rows_within
from fourfold.memory.offload import residency_of
from fourfold.models.reference import OwnPolicy
from fourfold.models.roles import Activations, Policy
from fourfold.scoring.service import wire
from fourfold.scoring.service.client import Service
from fourfold.scoring.service.hosted import AnyIdentity
from fourfold.scoring.service.wire import BadMessage, Rows
from fourfold.scoring.sources import text_of


class RemoteRole:
    """Rows in, numbers of one role out; the residency of a role that is elsewhere."""

    elsewhere = computes_elsewhere = True
    device = torch.device("cpu")  # requests are made from lists of ids

    def __init__(self, service: Service, role: str, *, max_rows: int) -> None:
        self.role = role
        self._service = service
        self._max_rows = max_rows
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-service")
        self._sent: deque[tuple[Rows, Future[list[Tensor]]]] = deque()
        self._coming: deque[tuple[tuple[list[int], list[int]], Tensor]] = deque()
        self._seconds = 0.0

    @property
    def where(self) -> str:
        """For the table of roles."""
        return f"at {self._service.url}"

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Nothing has to come in."""
        yield

    def read(self, tensor: Tensor) -> Tensor:
        """Its numbers are elsewhere."""
        raise AssertionError(f"the {self.role}'s weights are {self.where}")

    def take(self) -> dict[str, float]:
        """Seconds that the service worked, and bytes to and fro, since the last `take`."""
        taken = {"pass_seconds": self._seconds, "moved_bytes": float(self._service.moved_bytes)}
        self._seconds, self._service.moved_bytes = 0.0, 0
        return taken

    def require(self, own: AnyIdentity) -> dict[str, Any]:
        """What the service says of its role; ValueError where that is not this run's."""
        said = self._service.describe()
        if said.get("protocol") != wire.PROTOCOL:
            raise ValueError(
                f"service.url: {self._service.url} speaks protocol {said.get('protocol')!r}, this run "
                f"{wire.PROTOCOL}; give both the same version of Fourfold"
            )
        theirs = said["roles"].get(self.role)
        if theirs is None:
            held = ", ".join(said["roles"]) or "none"
            raise ValueError(
                f"{self.role}.residency: 'service', but {self._service.url} holds {held}; start it with "
                f"--roles {self.role}, or set {self.role}.residency = 'keep'"
            )
        if unsaid := asdict(own).keys() - theirs.keys():
            raise ValueError(
                f"service.url: the {self.role} at {self._service.url} (of {said.get('model')!r}) is made of another "
                f"kind of model than this run's: it says no {min(unsaid)}; give both sides the same reference.model, "
                "reward.source and reward.model"
            )
        differs = [
            f"{name} is {theirs.get(name)!r} there, {wanted!r} here"
            for name, wanted in asdict(own).items()
            if theirs.get(name) != wanted
        ]
        if differs:
            raise ValueError(
                f"service.url: the {self.role} at {self._service.url} (of {said.get('model')!r}) is not this run's: "
                f"{'; '.join(differs)}; start `fourfold serve` with the configuration and the folder of this run"
            )
        return theirs

    def send(self, rollout: Rollout, order: Tensor, size: BatchSize, temperature: float) -> None:
        """Have these rows, in this order and so many at a time, worked at; whole micro-batches make a request."""
        rows, at_once = wire.rows_of(rollout.select(order)), size.size or len(order)
        step = max(at_once, self._max_rows // at_once * at_once)
        lengths = [len(prompt) + len(response) for prompt, response in zip(rows.prompts, rows.responses, strict=True)]
        start = 0
        while start < len(rows):
            # With a limit of tokens each micro-batch is a request of its own: the service counts rows only.
            count = rows_within(lengths[start : start + at_once], size.tokens) if size.tokens else step
            piece = rows[start : start + count]
            self._sent.append((piece, self._sender.submit(self.ask, piece, min(at_once, len(piece)), temperature)))
            start += count

    def forget(self) -> None:
        """Give up what has been sent and not been fetched."""
        for _, waiting in self._sent:
            waiting.cancel()
        self._sent.clear()
        self._coming.clear()

    def close(self) -> None:
        """Ask nothing more: the run ends."""
        self._service.close()

    def answer(self, part: Rollout, temperature: float) -> list[Tensor]:
        """One tensor a row: what was sent ahead, if these rows are the next of it, else what the service says now."""
        rows = wire.rows_of(part)
        wanted = list(zip(rows.prompts, rows.responses, strict=True))
        while self._sent and len(self._coming) < len(wanted):
            piece, waiting = self._sent.popleft()
            self._coming.extend(zip(zip(piece.prompts, piece.responses, strict=True), waiting.result(), strict=True))
        if [row for row, _ in list(self._coming)[: len(wanted)]] == wanted:
            return [self._coming.popleft()[1] for _ in wanted]
        return self.ask(rows, len(rows), temperature)

    def ask(self, rows: Rows, size: int, temperature: float) -> list[Tensor]:
        """One tensor a row: what the service says of these, `size` of them a pass."""
        asked = {**self._readable(rows), "micro_batch_size": size}
        if self.role == "reference":
            asked["temperature"] = temperature
        started = time.perf_counter()
        try:
            found = self._service.ask(wire.ROLE_PATHS[self.role], asked)
            waited = float(wire.float32([found.get("waited_seconds", 0.0)], 1, "waited_seconds"))
            numbers = self._numbers(found, rows)
        except BadMessage as error:
            raise self._failure(
                f"the service at {self._service.url} gave an answer that cannot be used: {error}; the last good "
                "checkpoint is kept"
            ) from error
        except RunFailed as error:
            raise self._failure(str(error)) from error
        self._seconds += time.perf_counter() - started - waited
        return numbers

    def _failure(self, said: str) -> RunFailed:
        said = f"score: the {self.role}: {said}"
        return RunFailed(said, blamed="reward model") if self.role == "reward" else RunFailed(said)

    def _readable(self, rows: Rows) -> dict[str, Any]:
        """The rows as the role reads them."""
        return {"prompts": rows.prompts, "responses": rows.responses}

    def _numbers(self, found: dict[str, Any], rows: Rows) -> list[Tensor]:
        if self.role == "reward":
            return list(wire.float32(found.get("scores"), len(rows), "scores"))
        lists = found.get("log_probs")
        if not isinstance(lists, list) or len(lists) != len(rows):
            raise BadMessage(f"log_probs: one list for each of {len(rows)} rows is wanted")
        return [
            wire.float32(numbers, len(response), f"log_probs[{number}]")
            for number, (numbers, response) in enumerate(zip(lists, rows.responses, strict=True))
        ]


class RemoteReader(RemoteRole):
    """A reward model of another family, which reads what the actor's tokenizer makes of the ids."""

    def __init__(self, service: Service, tokenizer: Any, *, max_rows: int) -> None:
        super().__init__(service, "reward", max_rows=max_rows)
        self._tokenizer = tokenizer

    def _readable(self, rows: Rows) -> dict[str, Any]:
        texts = {"prompts": rows.prompts, "responses": rows.responses}
        return {name: [text_of(ids, self._tokenizer) for ids in given] for name, given in texts.items()}


@contextlib.contextmanager
def sent_ahead(
    sources: Iterable[Any], rollout: Rollout, order: Tensor, size: BatchSize, temperature: float
) -> Iterator[None]:
    """Within, those of the sources that are at a service have been asked about all of these rows."""
    remote = [held for source in sources if isinstance(held := residency_of(source), RemoteRole)]
    for role in remote:
        role.send(rollout, order, size, temperature)
    try:
        yield
    except BaseException:
        for role in remote:
            role.close()
        raise
    finally:
        for role in remote:
            role.forget()


class RemotePolicy(Policy):
    """A reference whose weights are at a service."""

    def __init__(self, form: Policy, remote: RemoteRole) -> None:
        super().__init__(form.branch, form.head)
        self.remote = remote
        self.residency = remote

    def log_probs(
        self, activations: Activations, rollout: Rollout, temperature: float, *, entropy: Entropy = "none"
    ) -> tuple[Tensor, Tensor]:
        """Those of the service, from ids alone: over a trunk it makes the activations anew."""
        assert entropy == "none", "a reference is asked for log-probs only"
        found = torch.zeros(rollout.response_mask.shape, device=rollout.sequences.device)
        for row, numbers in zip(found, self.remote.answer(rollout, temperature), strict=True):
            row[: len(numbers)] = numbers
        return found, torch.zeros_like(found)


class RemoteOwnPolicy(RemotePolicy, OwnPolicy):
    """One with a model of its own, whose shape is not the actor's."""


class ServiceReward:
    """A reward model whose weights are at a service."""

    def __init__(self, remote: RemoteRole) -> None:
        self.residency = remote

    def __call__(self, activations: Activations, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The service's scores; one that is not finite has stopped the run."""
        scores = torch.stack(self.residency.answer(rollout, 1.0)).to(rollout.sequences.device)
        return scores, torch.ones_like(scores, dtype=torch.bool)

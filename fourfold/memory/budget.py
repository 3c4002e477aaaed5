"""What happens when memory runs out: passes are taken again with half the rows, or the run stops and says why.

On CUDA the signal is torch.OutOfMemoryError, and `memory.budget_gib` is torch's per-process limit; on the CPU the
resident memory of the process is compared with the budget after every decoder layer, forward and backward, before a
chunk of logits is made, while a parameter's parked states are in memory, and after each pass of ONNX Runtime. What it
saves: nothing; it makes a run end well that would be killed. What it changes: from a halving on, an update is bit for
bit that of a run with the smaller size. What it excludes: nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fourfold.config.schema import PpoSection
from fourfold.errors import RunFailed
from fourfold.memory.peaks import resident_bytes_reader

log = logging.getLogger(__name__)

GIB = 2**30
Result = TypeVar("Result")
KERNELS_KEPT = 64
# How torch's allocator for the CPU begins its complaint; it has no exception of its own.
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")


class OverBudget(MemoryError):
    """More is resident than `memory.budget_gib` allows."""


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_ALLOCATOR)


def give_back() -> None:
    """Hand memory that is free inside the process back to the system, so that it is no longer resident."""
    gc.collect()
    trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trim() -> None:
    """Hand back what the allocator keeps for later: malloc_trim(3), where the C library has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _reader() -> Callable[[], int]:
    return resident_bytes_reader()


def resident_bytes(device: torch.device) -> int:
    """What is held now: torch's allocations on CUDA, the resident memory of the process on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _reader()()


def keep_few_kernels() -> None:
    """Bound what torch's products in half precision leave behind on a CPU; before the first of them.

    oneDNN, and torch's wrapper around it, keep the kernels of the last 1,024 shapes each, of about 0.6 MiB a shape: in
    a run, whose rows are of every length, 1 GiB more than the tensors (docs/log.md). One pass needs some 30. Whoever
    sets the libraries' own variables has their way.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS_KEPT))


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Budget:
    """The memory that a run may take; `bytes` 0 is no limit."""

    bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        return self  # a copied module is of the same process

    @classmethod
    def of_gib(cls, gib: float, device: torch.device) -> Budget:
        """From `memory.budget_gib`; on CUDA torch's allocator keeps to it from here on."""
        budget = cls(round(gib * GIB), device)
        if budget.bytes and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(budget.bytes / total, 1.0), device)
        return budget

    def resident(self) -> int:
        """Bytes held now."""
        return resident_bytes(self.device)

    def check(self, wanted: int = 0) -> None:
        """OverBudget when `wanted` bytes more would not fit; on CUDA the allocator itself refuses."""
        if not self.bytes or self.device.type == "cuda" or self.resident() + wanted <= self.bytes:
            return
        trim()  # what is only kept for later use does not count
        if (held := self.resident()) + wanted > self.bytes:
            more = f" and {wanted / GIB:.3f} GiB are wanted" if wanted else ""
            raise OverBudget(f"{held / GIB:.3f} GiB are resident{more}, memory.budget_gib = {self.bytes / GIB:.3f}")

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Check after the forward pass of each layer and before its backward pass, in copies of the layers too."""
        if self.bytes:
            for layer in layers:
                layer.register_forward_hook(_LayerCheck(self))


class _LayerCheck:
    """A forward hook that checks now, and again when the gradient of the layer's output is known."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerCheck:
        return self  # a copied layer is of the same process

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._budget.check()
        first = output if isinstance(output, Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(lambda gradient: self._budget.check())


@dataclass(frozen=True)
class Shortage:
    """Memory ran out: where, with how many rows at once, and what the exception said."""

    phase: str
    role: str
    rows: int
    said: str
    resident_bytes: int
    final: bool = True  # the run ends: the pass is not taken again with fewer rows

    def __str__(self) -> str:
        if self.phase == "load":
            return f"load: memory ran out while the {self.role} was loaded ({self.said})"
        if not self.rows:  # beside passes: `role` says in what
            where = f"in {self.role}" if self.role else "between the roles' passes"
            return f"{self.phase}: memory ran out {where} ({self.said})"
        rows = f"{self.rows} row{'s' * (self.rows != 1)}"
        return f"{self.phase}: memory ran out in the {self.role}'s pass over {rows} ({self.said})"


# What is resident and which settings would help, asked for while everything that filled the memory is still there.
Describe = Callable[[Shortage], str]


@dataclass
class BatchSize:
    """Rows that a kind of pass takes at once, 0 for all: halved for the rest of the run when memory runs out.

    With `tokens` a pass takes no more than so many either, counted with padding, but for one row that is longer. With
    `whole`, the settings that the number comes from, it is never halved: the pass takes an optimizer step.
    """

    phase: str
    role: str
    size: int
    budget: Budget = field(default_factory=Budget)
    whole: str = ""
    describe: Describe = str
    span: Callable[[str, str], AbstractContextManager[None]] = lambda phase, role: contextlib.nullcontext()
    tokens: int = 0

    @contextlib.contextmanager
    def working(self, role: str) -> Iterator[None]:
        """Within, this role works: a shortage names it and the meter counts its share."""
        self.role = role
        with self.span(self.phase, role):
            yield

    def fitting(self, work: Callable[[int], Result], rows: int, undo: Callable[[], None] = lambda: None) -> Result:
        """`work(rows at once)`, from its start again with half of them as often as memory runs out.

        `undo` takes back what a `work` that was broken off has left, or raises RunFailed where that cannot be. Then
        the run stops, and so it does at one row or with a pass that is taken `whole`.
        """
        while True:
            at_once = min(self.size or rows, rows)
            try:
                return work(at_once)
            except Exception as error:
                if not ran_out(error):
                    raise
                final = at_once <= 1 or bool(self.whole)
                report = self.describe(shortage_of(error, self.phase, self.role, at_once, self.budget, final=final))
                # The frames of the broken pass hold its graph, and the traceback holds the frames.
                traceback.clear_frames(error.__traceback__)
            try:
                undo()
            except RunFailed as error:
                raise RunFailed(f"{report}{self._smaller(at_once)}; {error}") from None
            give_back()
            if final:
                raise RunFailed(f"{report}{self._smaller(at_once)}; the last good checkpoint is kept")
            self.size, self.tokens = at_once // 2, self.tokens and max(self.tokens // 2, 1)
            most = f" and {self.tokens} tokens" if self.tokens else ""
            log.warning("%s; done again with %d%s at a time, from here on", report, self.size, most)

    def _smaller(self, at_once: int) -> str:
        """Why a pass over so many rows is not taken again in smaller ones."""
        if at_once <= 1:
            return "; a pass cannot be smaller than one row"
        return (
            f"; a smaller pass helps too: {self.whole} = {at_once // 2}, in a new output folder "
            "(memory.optimizer_in_backward steps within a pass, so none is done again with fewer rows)"
        )

    def through(
        self, count: int, work: Callable[[slice], None], lengths: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Work through rows 0 to `count`; rows whose pass ran out of memory are taken again, fewer at once.

        `work` leaves nothing behind unless it ends. `lengths` gives the rows' tokens, where `tokens` goes by them.
        """
        start, tokens = 0, lengths() if lengths is not None and self.tokens else None

        def piece(size: int) -> int:
            rows = min(size, count - start)
            if tokens is not None:
                rows = rows_within(tokens[start : start + rows], self.tokens)
            work(slice(start, start + rows))
            return start + rows

        while start < count:
            start = self.fitting(piece, rows=count - start)


def rows_within(lengths: Sequence[int], tokens: int) -> int:
    """How many of the first rows make at most so many tokens when all are as long as the longest; at least one.

    0 tokens are no limit.
    """
    longest = 0
    for rows, length in enumerate(lengths):
        longest = max(longest, length)
        if tokens and rows and (rows + 1) * longest > tokens:
            return rows
    return len(lengths)


def batch_size(size: int | BatchSize, phase: str, role: str) -> BatchSize:
    """A number of rows as the size of this role's passes."""
    return BatchSize(phase, role, size) if isinstance(size, int) else size


def shortage_of(
    error: BaseException, phase: str, role: str, rows: int, budget: Budget, *, final: bool = True
) -> Shortage:
    """What there is to say of an exception for which `ran_out` holds."""
    said = str(error).split("\n")[0] or type(error).__name__
    return Shortage(phase, role, rows, said, budget.resident(), final)


@contextlib.contextmanager
def stops_when_short(phase: str, role: str, budget: Budget, describe: Describe) -> Iterator[None]:
    """Within, a shortage ends the run: where there are no rows to halve."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        report = describe(shortage_of(error, phase, role, 0, budget))
        traceback.clear_frames(error.__traceback__)
        raise RunFailed(report) from None


@dataclass
class BatchSizes:
    """The rows that each kind of pass of PPO takes at once."""

    generate: BatchSize
    log_probs: BatchSize
    score: BatchSize
    ahead: BatchSize  # reference and reward beside sampling, which the critic's passes must not halve meanwhile
    actor: BatchSize
    critic: BatchSize

    @classmethod
    def of(
        cls, ppo: PpoSection, sampling_rows: int = 0, budget: Budget | None = None, *, in_backward: bool = False
    ) -> BatchSizes:
        """As the settings give them; `in_backward` is `memory.optimizer_in_backward`."""
        budget, micro, tokens = budget or Budget(), ppo.micro_batch_size, ppo.micro_batch_tokens
        whole = "ppo.mini_batch_size = ppo.micro_batch_size" if in_backward else ""
        return cls(
            generate=BatchSize("generate", "actor", sampling_rows, budget),
            log_probs=BatchSize("generate", "actor", micro, budget, tokens=tokens),
            score=BatchSize("score", "reference", micro, budget, tokens=tokens),
            ahead=BatchSize("score", "reference", micro, budget, tokens=tokens),
            actor=BatchSize("learn", "actor", micro, budget, whole, tokens=tokens),
            critic=BatchSize("learn", "critic", micro, budget, whole, tokens=tokens),
        )

    def describe_with(self, describe: Describe) -> None:
        """From here on shortages are described so."""
        for size in vars(self).values():
            size.describe = describe

    def measure_with(self, span: Callable[[str, str], AbstractContextManager[None]]) -> None:
        """From here on the work of a role in a phase is measured so."""
        for size in vars(self).values():
            size.span = span

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        limits = {f"{name}.tokens": size.tokens for name, size in vars(self).items() if size.tokens}
        return {name: size.size for name, size in vars(self).items()} | limits

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on with the sizes of a checkpoint."""
        for name, number in state.items():
            kind, _, field_name = name.partition(".")
            setattr(getattr(self, kind), field_name or "size", number)

    def metrics(self, rollout_rows: int) -> dict[str, float]:
        """For the row of a step."""
        return {
            "micro_batch_size": min(self.actor.size, self.critic.size),
            "score_micro_batch_size": min(self.score.size, self.ahead.size, self.log_probs.size),
            "sampling_batch_size": self.generate.size or rollout_rows,
        }

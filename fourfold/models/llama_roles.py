"""The reference run by llama.cpp: the actor as it is at step 0, written as GGUF, or a model of its own.

What it saves: torch's copy of the reference; Q8_0 takes 8.5 bits a weight, a file of the user's what it has. What it
costs: a file as large, written at every start beside a whole model in float32; passes from the ids on, also over a
cached trunk. What it changes: log-probs, by rounding: a KL bias that pre-flight measures. What it excludes: other
places than the CPU, and the exact KL over the vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fourfold.algorithms.log_probs import Entropy, log_probs_from_logits
from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.models.gguf_files import WEIGHTS_OF, require_writable, write_gguf
from fourfold.models.llama_cpp import Ids, LlamaCpp, library
from fourfold.models.loading import Base, file_in_package
from fourfold.models.outside import Outside
from fourfold.models.quantized import PROBE
from fourfold.models.reference import OwnPolicy, comparable_model, form_of
from fourfold.models.residency import HOST
from fourfold.models.roles import Activations, Policy
from fourfold.models.whole import whole_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "reference.engine"
# Largest mean |difference| from torch's log-probs of the same model on the probe, nats a token. A real model of 135M
# parameters is 0.002 (F16) to 0.07 (Q8_0, Q4_1) away, an engine that is silently wrong 1.9 (docs/decisions/0011).
BOUND = 0.2


class Engine(Protocol):
    """What runs a model outside torch."""

    def log_probs(self, rows: Sequence[Ids], starts: Sequence[int], temperature: float) -> Tensor:
        """log softmax(logits / temperature) of the tokens of each row from its start on, rows one after the other."""
        ...


class LlamaResidency:
    """Weights in llama.cpp's hands, in this process: they never move."""

    device = HOST
    elsewhere = False
    computes_elsewhere = True
    where = f"{HOST}, llama.cpp"

    def __init__(self, content: Tensor) -> None:
        self._content = content
        self._seconds = 0.0

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """It always is; the seconds are counted."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def read(self, tensor: Tensor) -> Tensor:
        """The stand-ins for weights have no numbers; `content` tells one file from another."""
        return tensor if tensor is self._content else tensor.new_empty(0)

    def take(self) -> dict[str, float]:
        """Seconds that the role was in use."""
        seconds, self._seconds = self._seconds, 0.0
        return {"pass_seconds": seconds, "moved_bytes": 0.0}


class EnginePolicy(OwnPolicy):
    """A frozen policy that another engine runs, in the form of a torch one without weights."""

    def __init__(self, form: Policy, engine: Engine, held: str) -> None:
        super().__init__(form.branch, form.head)
        self.engine = engine
        self.held = held  # for people: what its weights are

    def log_probs(
        self, activations: Activations, rollout: Rollout, temperature: float, *, entropy: Entropy = "none"
    ) -> tuple[Tensor, Tensor]:
        """Of the response tokens, from ids alone: whatever the activations are, the engine makes its own."""
        assert entropy == "none", "a reference is asked for log-probs only"
        rows = [ids[mask].tolist() for ids, mask in zip(rollout.sequences, rollout.attention_mask, strict=True)]
        starts = rollout.prompt_mask.sum(dim=1).tolist()
        found = torch.zeros(rollout.response_mask.shape)
        found.masked_scatter_(rollout.response_mask, self.engine.log_probs(rows, starts, temperature))
        return found, torch.zeros_like(found)


class LlamaPolicy(EnginePolicy):
    """One that llama.cpp runs in this process."""

    content: Tensor

    def __init__(self, form: Policy, engine: LlamaCpp, weights: str) -> None:
        super().__init__(form, engine, weights)
        with engine.file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        # Stands for the weights in checksums, so that a run does not go on with another model.
        self.register_buffer("content", torch.tensor(list(digest), dtype=torch.uint8))
        self.residency = LlamaResidency(self.content)
        size = engine.file.stat().st_size
        self.outside_torch = Outside(engine.parameters, weights, self.residency.where, size)


def reference_by_llama_cpp(config: RunConfig, base: Base, actor: Policy) -> LlamaPolicy:
    """`actor` as it is now, or `reference.model`; ValueError where llama.cpp is not there or says something else."""
    library(KEY)  # a missing one is named before anything is loaded
    model = torch_reference(config, base, actor)
    file, weights = gguf_file(config.reference.model), "the file's types"
    if file is None:
        weights = WEIGHTS_OF[config.reference.engine]
        require_writable(model.config, KEY)
        file = Path(config.output).expanduser() / "ppo" / "reference.gguf"
        write_gguf(model, file, weights)
    engine = LlamaCpp(file, KEY)
    changes = verify_engine(engine, model, base.tokenizer, str(file))
    reference = LlamaPolicy(form_of(model), engine, weights)
    note_rounding(reference, config, changes)
    return reference


def note_rounding(reference: EnginePolicy, config: RunConfig, changes: tuple[Tensor, Tensor]) -> None:
    """What the engine changes on the probe, where no rollout can tell because the actor has other weights."""
    if not config.reference.starts_as_the_actor:
        reference.rounding = changes


def torch_reference(config: RunConfig, base: Base, actor: Policy) -> PreTrainedModel:
    """What an engine is to run, in float32: `actor` as it is now, or `reference.model`."""
    if config.reference.model:
        return comparable_model(config, base, torch.float32)
    return whole_model(config, base, actor)[0]


def verify_engine(
    engine: Engine, model: PreTrainedModel, tokenizer: Any, asked: str, key: str = KEY
) -> tuple[Tensor, Tensor]:
    """log p - log p_engine of the probe's tokens [rows, time] in nats, p by torch, and where they are.

    ValueError where the mean of its size is beyond the bound. `asked` is the file or the server that is run, `key` the
    setting that asks for it.
    """
    rows = probe_rows(tokenizer)
    truth = [torch_log_probs(model, row) for row in rows]
    changes = torch.cat(truth) - engine.log_probs(rows, [1] * len(rows), 1.0)
    gap = float(changes.abs().mean())
    if not gap <= BOUND:
        raise ValueError(
            f"{key}: on a probe of {len(changes)} tokens llama.cpp's log-probs are {gap:.2g} nats a token from torch's "
            f"of the same model, on average (allowed {BOUND:g}); this build of llama.cpp computes wrong numbers, or "
            f"{asked} holds another model; try another version of llama-cpp-python, or leave {key} out"
        )
    mask = pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in truth], batch_first=True)
    return changes.new_zeros(mask.shape).masked_scatter(mask, changes), mask


def probe_rows(tokenizer: Any) -> list[list[int]]:
    """Each sentence of the probe alone, and all of them from each on: passes of a few tokens and of many."""
    alone = [list(tokenizer(text)["input_ids"]) for text in PROBE]
    together = [[*alone[start:], *alone[:start]] for start in range(len(alone))]
    return alone + [list(itertools.chain.from_iterable(row)) for row in together]


@torch.no_grad()
def torch_log_probs(model: PreTrainedModel, row: Ids) -> Tensor:
    """Of all tokens of a row but the first."""
    ids = torch.tensor([row], device=model.device)
    return log_probs_from_logits(model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:]).cpu()


def gguf_file(path: str) -> Path | None:
    """The GGUF file that a model's name stands for; None where it stands for another kind of model, or for none."""
    if path.startswith("package:"):
        path = str(file_in_package(path, "model"))
    return Path(path).expanduser() if path.endswith(".gguf") else None

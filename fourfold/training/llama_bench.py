"""What llama.cpp makes of a run's reference and reward model, for `fourfold bench quantization`."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fourfold.config.schema import RunConfig
from fourfold.models.gguf_files import WEIGHTS_OF, require_writable, write_gguf
from fourfold.models.llama_cpp import LlamaCpp, library
from fourfold.models.llama_roles import gguf_file
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, Scorer
from fourfold.models.whole import whole_model

KEY = "--kinds"


@dataclass(frozen=True)
class Engines:
    """Reference and reward model as GGUF files in llama.cpp; of a file that is given as it is, the reference only."""

    policy: LlamaCpp
    scorer: LlamaCpp | None

    @torch.no_grad()
    def compare(
        self, policy: Policy, inputs: Iterable[tuple[Activations, Activations]]
    ) -> tuple[Tensor, Tensor, float]:
        """log p(llama.cpp) - log p(as held) of every token, the exact KL there, and llama.cpp's relative speed.

        `inputs` are ids, and what the policy's branch reads of them; the log-probs of all tokens are timed.
        """
        differences, exact, seconds = [], [], [0.0, 0.0]
        compute = policy.branch.compute_dtype
        for index, (ids, read) in enumerate(inputs):
            mask, rows = ids.mask[:, 1:], _rows(ids)
            labels, starts = ids.inputs[:, 1:][mask], [1] * len(rows)
            if index == 0:  # the first pass of an engine pays for what later ones find ready
                policy.branch(read.inputs, read.mask)
                self.policy.log_probs(rows, starts, 1.0)
            started = time.perf_counter()
            hidden = policy.branch(read.inputs, read.mask)[:, :-1][mask]
            held = policy.head.log_probs(hidden, labels, 1.0, compute, entropy="none")[0].cpu()
            between = time.perf_counter()
            differences.append(self.policy.log_probs(rows, starts, 1.0) - held)
            seconds[0] += between - started
            seconds[1] += time.perf_counter() - between
            at = 0
            for logits in self.policy.logits(rows, starts):
                here = policy.head.logits(hidden[at : at + len(logits)], compute).cpu().log_softmax(dim=-1)
                exact.append((here.exp() * (here - logits.log_softmax(dim=-1))).sum(dim=-1))
                at += len(logits)
        return torch.cat(differences), torch.cat(exact), seconds[0] / seconds[1]

    @torch.no_grad()
    def scores(self, scorer: Scorer, batches: Iterable[Activations]) -> list[float]:
        """Of every row, by the torch head on llama.cpp's hidden states."""
        assert self.scorer is not None
        device = scorer.head.linear.weight.device
        hidden = (self.scorer.hidden(_rows(ids)) for ids in batches)
        return [score for states in hidden for score in scorer.head(states.to(device)).tolist()]


@contextlib.contextmanager
def run_by_llama_cpp(
    kind: str, config: RunConfig, base: Base, policy: Policy, scorer: Scorer | None
) -> Iterator[Engines]:
    """Both in llama.cpp; ValueError where it is not there, cannot run them, or has no file to run."""
    library(KEY)  # a missing one is named before anything is written
    if kind == "gguf":
        file = gguf_file(config.model.path)
        if file is None:
            raise ValueError(f"model.path = {config.model.path!r} is no .gguf file")
        yield Engines(LlamaCpp(file, KEY), None)
        return
    with tempfile.TemporaryDirectory(prefix="fourfold-gguf-") as folder:
        engines = [
            None if role is None else _engine(kind, config, base, role, Path(folder) / name)
            for name, role in (("reference.gguf", policy), ("reward.gguf", scorer))
        ]
        reference, reward = engines
        assert reference is not None
        yield Engines(reference, reward)


def _engine(kind: str, config: RunConfig, base: Base, role: Policy | Scorer, file: Path) -> LlamaCpp:
    model, _ = whole_model(config, base, role)
    require_writable(model.config, KEY)
    write_gguf(model, file, WEIGHTS_OF[kind])
    return LlamaCpp(file, KEY)


def _rows(ids: Activations) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(ids.inputs, ids.mask, strict=True)]

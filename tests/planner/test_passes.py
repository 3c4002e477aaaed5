"""The passes that are planned are those that a real step counts, to the token and the FLOP."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers

from fourfold.algorithms import log_probs
from fourfold.planner import passes as module
from fourfold.planner.architectures import Architecture
from fourfold.planner.bill import Footprint
from fourfold.planner.costs import costs
from fourfold.planner.footprint import footprint
from fourfold.planner.holding import own_bytes
from fourfold.planner.passes import passes
from fourfold.planner.scene import Lengths, Scene
from fourfold.training.accounting import Accountant
from planner.scenes import CPU, LLAMA_2_7B, cluster, scene
from tiny import tiny_directory
from training.runs import SHARINGS, by_function, by_model, make_config, make_trainer, merged, settings

PROMPT, RESPONSE, ROWS = 5, 6, 8
ROLES = ("trunk", "actor", "critic", "reference", "reward")
CUTS = SHARINGS | {
    "trained trunk": {"trunk": {"train": True}},
    "trained trunk, balanced": {"trunk": {"train": True, "balance": "grad_norm", "branch_layers": 0}},
    "trained trunk, alternating": {"trunk": {"train": True, "alternate": 1}},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full KL, entropy": {"ppo": {"kl_estimator": "full", "entropy_coef": 0.01}},
    "layers again": {"memory": {"checkpointing": "layers", "checkpoint_every": 2}},
    "attention again": {"memory": {"checkpointing": "attention"}},
    "moving": {"reference": {"prior": "moving"}},
    "uniform": {"reference": {"prior": "uniform"}, "ppo": {"kl_estimator": "full"}},
    "uniform alone": {"reference": {"prior": "uniform", "log_step_0": False}},
}
OWN_CRITIC, OWN_REFERENCE = "own critic", "own reference"  # models that are made in the test's folder
CRITICS: dict[str, dict[str, Any]] = {
    "lowest layers": {"critic": {"layers": 3}, "memory": {"checkpointing": "layers"}},
    "three updates": {"critic": {"updates_per_actor": 3}},
    "several heads": {"critic": {"ensemble": 2}, "ppo": {"value_clip_eps": 0.0}},
    OWN_CRITIC: {"critic": {"init": None, "updates_per_actor": 2}},
    OWN_REFERENCE: {"reference": {"log_step_0": True}},
}


def counted(scene: Scene) -> Counter[str]:
    """The metrics of fourfold.memory.meter.PassCounter, from the plan."""
    sums: Counter[str] = Counter()
    for each in passes(scene):
        sums[f"{each.role}_{each.direction}_passes"] += each.times * each.batch.rows / ROWS  # type: ignore[assignment]
        sums[f"{each.role}_{each.direction}_tokens"] += each.times * each.batch.tokens  # type: ignore[assignment]
        sums[f"{each.role}_{each.phase}_flops"] += each.times * each.flops  # type: ignore[assignment]
    return sums


def real_step(folder: Path, changes: dict[str, Any], **own: Path) -> tuple[Scene, dict[str, float]]:
    """A step whose prompts are all as long and whose responses are all cut, and the scene that says so.

    `own` are the models of roles that have one.
    """
    changes = merged(changes, {role: {"model": str(path)} for role, path in own.items()})
    tree = merged(
        settings(folder, by_function("pays_by_hash", num_epochs=2)),
        {"seed": 2, "sampling": {"extra_eos_token_ids": []}},
    )
    config = make_config(by_model(merged(tree, changes), folder / "scorer"))
    trainer = make_trainer(config, prompts=[[7 + i, 8, 9, 10, 11] for i in range(ROWS)])
    trainer.accountant = Accountant(trainer.models, config.memory)
    row = trainer.step()
    assert row["eos_share"] == 0, "a response ended by itself: take another seed"
    named = {"base": config.model.path, **{role: str(path) for role, path in own.items()}}
    shapes = {
        role: Architecture.from_config(transformers.AutoConfig.from_pretrained(path).to_dict())
        for role, path in named.items()
    }
    where = cluster(device=CPU)
    return Scene(config, shapes, where, Lengths.longest(PROMPT, RESPONSE)), row


RUNS = [(cut, "plain") for cut in CUTS] + [(cut, case) for cut in ("none", "trained trunk") for case in CASES][1:]
RUNS.remove(("trained trunk", "moving"))  # which is refused
RUNS += [(cut, "lowest layers") for cut in ("trunk", "none", "adapters over a trunk", "trained trunk")]
RUNS += [(cut, OWN_CRITIC) for cut in ("trunk", "none", "adapters", "trained trunk")]
RUNS += [(cut, OWN_REFERENCE) for cut in ("trunk", "none", "adapters over a trunk", "trained trunk")]
RUNS += [("trunk", "three updates"), ("trained trunk, alternating", "three updates"), ("trunk", "several heads")]


@pytest.mark.parametrize(("cut", "case"), sorted(set(RUNS)))
def test_a_real_step_counts_what_was_planned(tmp_path: Path, cut: str, case: str) -> None:
    own = {OWN_CRITIC: ["critic"], OWN_REFERENCE: ["reference"]}.get(case, [])
    models = {role: tiny_directory(tmp_path / role, "gpt2", layers=3, hidden=16) for role in own}
    planned, row = real_step(tmp_path, merged(CUTS[cut], (CASES | CRITICS)[case]), **models)
    found = counted(planned)
    names = [key for key in row if key.startswith(ROLES) and key.endswith(("_passes", "_tokens", "_flops"))]
    assert len(names) == len(ROLES) * (2 * 2 + 3)
    for name in names:
        assert found[name] == row[name], name
    assert found["actor_learn_flops"] > 0 and found["reward_score_flops"] > 0
    for work in costs(planned, Footprint(())).work:
        assert work.flops == row[f"{work.moment.role}_{work.moment.phase}_flops"], work.moment


def test_chunks_of_logits_are_those_of_the_loss() -> None:
    assert module.CHUNK_TOKENS == log_probs.CHUNK_TOKENS


def test_the_language_heads_second_pass_leaves_the_last_chunk_out() -> None:
    """Two micro-batches of 8 rows of 300 response tokens: 2,400 each, of which two chunks of 1,024 are made again."""
    sizes: dict[str, Any] = {"ppo__rollout_batch_size": 16, "ppo__mini_batch_size": 16, "ppo__micro_batch_size": 8}
    once = scene(lengths=Lengths.longest(100, 300), ppo__num_epochs=1, **sizes)
    backward = next(p for p in passes(once) if p.role == "actor" and p.direction == "backward")
    head = 2 * LLAMA_2_7B.hidden * LLAMA_2_7B.vocabulary
    tokens, attended = 16 * 399, 16 * 399 * 400 / 2
    matrices = 2 * (4 * 4096**2 + 3 * 4096 * 11008) * tokens
    layers = 32 * (2 * matrices + 2 * 4 * 4096 * attended)
    assert backward.flops == layers + head * (2 * 16 * 300 + 2 * 2048)


def test_frozen_adapters_lie_in_float32_and_only_a_scorer_has_a_number_head() -> None:
    """In bfloat16, where a head that was counted for the reference would be a narrow one."""
    adapted = scene(sharing__mode="adapters", precision__compute="bfloat16")
    low_rank, head = module.Cut.of(adapted).adapter_parameters, LLAMA_2_7B.hidden + 1
    assert own_bytes(adapted, "reference") == 4 * low_rank
    assert own_bytes(adapted, "reward") == 4 * (low_rank + head)


def test_a_limit_of_tokens_cuts_passes_as_fewer_rows_do() -> None:
    """Memory goes by the longest rows, of which 4 fit into 1,600 tokens; time by the mean."""
    lengths = Lengths.longest(100, 300)
    sizes: dict[str, Any] = {"ppo__rollout_batch_size": 16, "ppo__mini_batch_size": 16}
    by_rows = scene(lengths=lengths, ppo__micro_batch_size=4, **sizes)
    by_tokens = scene(lengths=lengths, ppo__micro_batch_size=16, ppo__micro_batch_tokens=1600, **sizes)
    assert by_tokens.micro_rows == by_rows.micro_rows == 4 and by_tokens.micro_batches(16) == 4
    assert footprint(by_tokens) == footprint(by_rows)
    assert costs(by_tokens, Footprint(())).work == costs(by_rows, Footprint(())).work
    short = dataclasses.replace(by_tokens, lengths=Lengths(100, 300, 50, 50))
    assert short.micro_batches(16) == 1 and short.micro_rows == 4
    long = scene(lengths=lengths, ppo__micro_batch_size=16, ppo__micro_batch_tokens=10, **sizes)
    assert long.micro_rows == 1 and long.micro_batches(16) == 16


def test_a_reward_model_of_another_family_is_counted_with_its_own_layers() -> None:
    small = dataclasses.replace(LLAMA_2_7B, layers=2)
    settings = {
        "reward__source": "model",
        "reward__model": "other",
        "reward__checkpoint": None,
        "critic__init": "actor",
    }
    one = scene(**settings)
    [reward] = [
        p for p in passes(dataclasses.replace(one, models={"base": LLAMA_2_7B, "reward": small})) if p.role == "reward"
    ]
    assert reward.layers == range(2) and reward.architecture is small


def test_four_models_by_hand() -> None:
    """The table of the source documents: actor 1 + K forward and K backward, critic K and K, reference 1, reward 1.

    Ours has one more of the actor, log-probs by the training engine, and one of the critic, values before learning.
    """
    rows = 32
    passed: Counter[tuple[str, str]] = Counter()
    for each in passes(scene(ppo__num_epochs=4, ppo__rollout_batch_size=rows)):
        passed[each.role, each.direction] += each.times * each.batch.rows
    assert {key: count / rows for key, count in passed.items()} == {
        ("actor", "forward"): 2 + 4,
        ("actor", "backward"): 4,
        ("critic", "forward"): 1 + 4,
        ("critic", "backward"): 4,
        ("reference", "forward"): 1,
        ("reward", "forward"): 1,
    }

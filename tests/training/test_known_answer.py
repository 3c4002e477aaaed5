"""A run whose right answer is known: paid for the letter a, the actor writes the letter a, and the metrics show it."""

from __future__ import annotations

from pathlib import Path

import torch

from fourfold.diagnostics.trackers import read_jsonl
from fourfold.models.loading import Base, load_base
from fourfold.models.roles import Policy
from fourfold.training.folder import RunFolder
from fourfold.training.results import load_actor, load_reference
from training.runs import by_function, make_config, merged, run, settings


def share_of_a(base: Base, policy: Policy, prompt: str) -> float:
    """Probability that the first token after the prompt has the letter a in it."""
    ids = torch.tensor([base.tokenizer.encode(prompt)])
    mask = torch.ones_like(ids, dtype=torch.bool)
    below = ids if base.trunk is None else base.trunk(ids, mask)
    logits = policy.branch(below, mask)[0, -1] @ policy.head.weight.T
    paid = torch.tensor(["a" in base.tokenizer.decode([i], skip_special_tokens=True) for i in range(len(logits))])
    return float(logits.softmax(-1)[paid].sum())


@torch.no_grad()
def test_what_is_paid_for_becomes_likely(tmp_path: Path) -> None:
    """FAULTS N7: score and KL rise while entropy and the share of different bigrams fall, all of it in the metrics."""
    ppo = {
        "steps": 25, "rollout_batch_size": 32, "mini_batch_size": 16, "micro_batch_size": 16,
        "learning_rate": 1e-2, "kl_coef": 0.01,
    }  # fmt: skip
    changes = merged(by_function("pays_for_a", **ppo), {"critic": {"learning_rate": 5e-3}, "checkpoint": {"every": 25}})
    changes = merged(changes, {"seed": 1, "precision": {"compute": "float32"}})  # rounding decides what seed 0 learns
    changes = merged(changes, {"sampling": {"extra_eos_token_ids": None}, "evaluation": {"every": 5}})
    tree = settings(tmp_path, changes)
    with torch.enable_grad():
        summary = run(tree)
    config = make_config(tree)
    base, folder = load_base(config), RunFolder(tmp_path / "run")
    actor, reference = load_actor(config, base, folder, best=False), load_reference(config, base, folder)
    for prompt in ("the film", "it"):
        before, after = share_of_a(base, reference, prompt), share_of_a(base, actor, prompt)
        assert before < 0.4 and after > 0.7
    before, after = summary["before"], summary["after"]
    assert after["score_mean"] > 3 * before["score_mean"] > 0
    assert after["distinct_2"] < 0.7 * before["distinct_2"]
    assert after["kl_per_sequence"] > 10 > before["kl_per_sequence"] == 0.0
    evaluations = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "evaluation")
    assert [row["step"] for row in evaluations] == [5, 10, 15, 20, 25]
    assert evaluations[-1]["eval_distinct_2"] == after["distinct_2"] < evaluations[0]["eval_distinct_2"]
    rows = read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl", "ppo_step")
    assert rows[-1]["entropy_per_token_mean"] < 0.5 * rows[0]["entropy_per_token_mean"]

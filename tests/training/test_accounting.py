"""What a row says that each model did is what hooks on the models see it do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fourfold.models.priors import UniformPolicy
from fourfold.models.roles import freeze
from fourfold.models.split import Part
from fourfold.scoring.sources import ModelReward
from fourfold.training.accounting import Accountant
from fourfold.training.trainer import Trainer
from training.runs import SHARINGS, by_function, give_value_head, make_config, make_trainer, merged, settings

CUTS = SHARINGS | {
    "trained trunk": {"trunk": {"train": True}},
    "trained trunk, balanced": {"trunk": {"train": True, "balance": "grad_norm", "branch_layers": 0}},
    "trained trunk, alternating": {"trunk": {"train": True, "alternate": 1}},
}
ROLES = ("trunk", "actor", "critic", "reference", "reward")
ROWS = 8
PROMPTS = [[20 + row, 40 + row, 60 + row] for row in range(ROWS)]  # as long as each other, and nothing in common


class Seen:
    """Rows and real tokens that went through each part; a pass that goes on from a cache is the same pass."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self.rows: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        for role, part in parts.items():
            self.watch(role, part)

    def watch(self, role: str, part: Part) -> None:
        """Count what goes through this part as the role's."""
        part.register_forward_hook(self._hook(role), with_kwargs=True)

    def _hook(self, role: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            if (cache := named.get("cache")) is not None:  # of the sampler, whose prompts have no padding here
                rows, tokens = int((cache.places.positions[:, 0] == 0).sum()), cache.places.positions.numel()
            else:
                rows, tokens = len(output), int(args[1].sum())
            self._count(role, "forward", rows, tokens)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._count(role, "backward", rows, tokens))

        return hook

    def _count(self, role: str, direction: str, rows: int, tokens: int) -> None:
        self.rows[role, direction] += rows
        self.tokens[role, direction] += tokens


def trainer_for(
    folder: Path, sharing: str, reference: dict[str, Any] | None = None, **ppo: Any
) -> tuple[Trainer, Seen]:
    """A trainer with a reward model, and the hooks on all that it has."""
    ppo = {"num_epochs": 2, "mini_batch_size": 4, "micro_batch_size": 2, "learning_rate": 3e-3} | ppo
    tree = merged(merged(by_function("pays_by_hash", **ppo), CUTS[sharing]), {"reference": reference or {}})
    trainer = make_trainer(make_config(settings(folder, tree)), prompts=PROMPTS)
    models = trainer.models
    give_value_head(models)
    models.reward = models.base.new_scorer()
    freeze(models.reward)
    if models.trunk is not None and models.base.trunk is not None:
        models.reward.stand_on(models.base.trunk)
    trainer.reward, trainer.accountant = ModelReward(models.reward), Accountant(models, trainer.config.memory)
    held = {role: getattr(models, role) for role in ROLES[1:]}
    seen = Seen({role: each.branch for role, each in held.items() if not isinstance(each, UniformPolicy)})
    if models.step_0 is not None:  # whose passes are counted as the reference's
        seen.watch("reference", models.step_0.branch)
    for trunk in (models.base.trunk, models.trunk):  # the frozen copy of a trained one counts as the trunk, too
        if trunk is not None:
            seen.watch("trunk", trunk)
    return trainer, seen


CASES: dict[str, dict[str, Any]] = {
    "k1": {},
    "full KL": {"kl_estimator": "full"},
    "stopped by KL": {"target_kl": 1e-4},
    "cut responses dropped": {"truncation": "drop"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sharing", CUTS)
def test_passes_and_tokens_are_those_that_the_models_saw(tmp_path: Path, sharing: str, case: str) -> None:
    trainer, seen = trainer_for(tmp_path, sharing, **CASES[case])
    row = trainer.step()
    assert 0 < row["eos_share"] < 1, "responses that end and responses that are cut"
    assert row["early_stopped"] == (case == "stopped by KL")
    assert (row["dropped_rows"] > 0) == (case == "cut responses dropped")
    for role in ROLES:
        for direction in ("forward", "backward"):
            assert row[f"{role}_{direction}_passes"] * ROWS == pytest.approx(seen.rows[role, direction]), (
                role,
                direction,
            )
            assert row[f"{role}_{direction}_tokens"] == seen.tokens[role, direction], (role, direction)
    assert (seen.rows["trunk", "forward"] > 0) == ("trunk" in sharing)
    assert seen.rows["reference", "forward"] == ROWS * (2 if case == "full KL" else 1)
    assert min(seen.rows[role, direction] for role in ("actor", "critic") for direction in ("forward", "backward")) > 0


PRIORS = {"moving": 2, "uniform": 1}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("sharing", ["trunk", "adapters"])
def test_passes_of_a_prior_and_of_the_policy_of_step_0(tmp_path: Path, sharing: str, prior: str) -> None:
    trainer, seen = trainer_for(tmp_path, sharing, {"prior": prior})
    row = trainer.step()
    assert row["reference_forward_passes"] * ROWS == seen.rows["reference", "forward"] == PRIORS[prior] * ROWS
    assert row["reference_forward_tokens"] == seen.tokens["reference", "forward"]


def test_the_critic_alone_works_while_it_warms_up(tmp_path: Path) -> None:
    trainer, seen = trainer_for(tmp_path, "trunk")
    trainer.config = trainer.config.model_copy(
        update={"critic": trainer.config.critic.model_copy(update={"warmup_rollouts": 1})}
    )
    row = trainer.step()
    assert row["actor_backward_passes"] == row["actor_learn_flops"] == seen.rows["actor", "backward"] == 0
    assert row["actor_forward_passes"] * ROWS == seen.rows["actor", "forward"] == 2 * ROWS
    assert row["critic_backward_passes"] * ROWS == seen.rows["critic", "backward"] == 2 * ROWS


def test_flops_follow_the_tokens(tmp_path: Path) -> None:
    """By hand for the trunk of the tiny Llama: two a multiply-add of the matrices, four a key, head and dimension."""
    trainer, _ = trainer_for(tmp_path, "trunk")
    rollout, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    row = trainer.step()
    hidden, width, layers = 32, 64, 2
    matrices = hidden * hidden * 2 + hidden * (hidden // 2) * 2 + 3 * hidden * width
    lengths = rollout.attention_mask.sum(dim=1)
    attended = int((lengths * (lengths + 1) // 2).sum())
    assert row["trunk_generate_flops"] == layers * (2 * matrices * int(lengths.sum()) + 4 * hidden * attended)
    assert row["trunk_score_flops"] == row["trunk_learn_flops"] == row["reference_learn_flops"] == 0

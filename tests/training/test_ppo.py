"""What the stage ppo says of its roles before it starts."""

from __future__ import annotations

from pathlib import Path

from fourfold.training.pipeline import run_stages
from fourfold.training.ppo import describe_roles
from training.runs import by_function, make_config, make_trainer, merged, settings

NEW_HEAD = "newly initialised: value head"


def test_a_new_value_head_is_named(tmp_path: Path) -> None:
    """FAULTS E4, E11: one that comes from a checkpoint is not new."""
    trainer = make_trainer(make_config(settings(tmp_path, by_function("pays_for_a", steps=2))))
    assert NEW_HEAD in describe_roles(trainer)
    trainer.step()
    assert NEW_HEAD not in describe_roles(trainer)


def test_a_value_head_of_the_reward_model_is_not_new(tmp_path: Path) -> None:
    said: list[str] = []
    changes = {"critic": {"init": "reward"}, "evaluation": None, "ppo": {"steps": 1}}
    run_stages(make_config(settings(tmp_path, changes)), said.append)
    [table] = [text for text in said if text.startswith("weights of the roles:")]
    assert NEW_HEAD not in table


def test_a_run_shows_its_roles_before_the_first_step(tmp_path: Path) -> None:
    """FAULTS J9: where each model lives, once, before pre-flight."""
    said: list[str] = []
    config = make_config(settings(tmp_path, merged(by_function("pays_for_a", steps=1), {"evaluation": None})))
    run_stages(config, said.append)
    [table] = [text for text in said if text.startswith("weights of the roles:")]
    names = [line.split()[0] for line in table.splitlines()[3:]]
    assert names == ["trunk", "actor", "critic", "reference", "newly"]
    assert said.index(table) < max(i for i, text in enumerate(said) if "pre-flight" in text)

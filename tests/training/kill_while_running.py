"""Carries out one run although it is killed (SIGKILL) at one moment after the other, each time going on from the disk.

Run by test_resume.py: arguments are a TOML file and how the names of its moments begin ('' takes all), and so on for
other runs. A forked child runs until its moment; the next child resumes. Prints the moments, each of which has really
been reached, and ends each run with a child that is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from fourfold.backends.local import LocalOptimizer
from fourfold.config import load_config
from fourfold.diagnostics.trackers import JsonlTracker
from fourfold.models.loading import load_base
from fourfold.training import checkpoint, folder, pipeline, ppo, reward_model, supervised

Prepare = Callable[[], None]


def kill_when(
    owner: Any, name: str, is_moment: Callable[..., bool], *, count: int = 1, before: bool = False
) -> Prepare:
    """End this process, as the system would, at the call number `count` for which `is_moment(*arguments)`."""

    def prepare() -> None:
        original, seen = getattr(owner, name), 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += is_moment(*args, **kwargs)
            now = seen == count and is_moment(*args, **kwargs)
            if now and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, watched)

    return prepare


def optimizer_of(role: str) -> Callable[..., bool]:
    return lambda optimizer: optimizer.name == role


def saves_of(stage: str) -> Callable[..., bool]:
    return lambda store, *_, **__: store.root.parent.name == stage


def any_save(*_: Any) -> bool:
    return True


def row_of(kind: str, step: int) -> Callable[..., bool]:
    return lambda tracker, row, its_kind: its_kind == kind and row["step"] == step


def file_named(name: str) -> Callable[..., bool]:
    return lambda its_folder, its_name, value: its_name == name


Store, Folder = checkpoint.CheckpointStore, folder.RunFolder
# In the order in which a run comes to them. sft and reward take 4 optimizer steps and save after 2 and 4.
MOMENTS: dict[str, Prepare] = {
    "sft: between two checkpoints": kill_when(LocalOptimizer, "step", optimizer_of("sft policy"), count=3),
    "sft: a checkpoint written, not renamed": kill_when(Store, "_put_in_place", saves_of("sft"), before=True),
    "sft: model not stored": kill_when(supervised, "save_role", any_save, before=True),
    "sft: not marked as finished": kill_when(Folder, "write_json", file_named("sft/done.json"), before=True),
    "reward: before its first checkpoint": kill_when(LocalOptimizer, "step", optimizer_of("reward model")),
    "reward: right after a checkpoint": kill_when(Store, "save", saves_of("reward")),
    "reward: scores standardised": kill_when(reward_model, "save_role", any_save, before=True),
    "reward: finished": kill_when(Folder, "write_json", file_named("reward/done.json")),
    "ppo: after the evaluation before": kill_when(Folder, "write_json", file_named("ppo/before.json")),
    "ppo: first row logged, no checkpoint yet": kill_when(JsonlTracker, "log", row_of("ppo_step", 1)),
    "ppo: before a checkpoint is renamed": kill_when(Store, "_put_in_place", saves_of("ppo"), before=True),
    "ppo: before old checkpoints go": kill_when(Store, "_prune", saves_of("ppo"), before=True),
    "ppo: in an actor's update": kill_when(LocalOptimizer, "step", optimizer_of("actor"), count=3),
    "ppo: row logged, not evaluated": kill_when(JsonlTracker, "log", row_of("ppo_step", 4)),
    "ppo: evaluation logged, not saved": kill_when(JsonlTracker, "log", row_of("evaluation", 4)),
    "ppo: last step saved": kill_when(Store, "save", saves_of("ppo")),
    "ppo: evaluated after": kill_when(Folder, "write_json", file_named("ppo/after.json")),
    "ppo: model not stored": kill_when(ppo, "save_role", any_save, before=True),
}


def run_in_child(config_path: str, prepare: Prepare) -> int:
    """The status with which a child ends that runs the stages."""
    child = os.fork()
    if child == 0:
        prepare()
        pipeline.run_stages(load_config(config_path), lambda line: None)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(config_path: str, beginning: str) -> None:
    """The moments, then the rest of the run."""
    load_base(pipeline.prepare(load_config(config_path)))  # so that no child has to import the models' code anew
    for name, prepare in MOMENTS.items():
        if not name.startswith(beginning):
            continue
        status = run_in_child(config_path, prepare)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{name}: ended with status {status}"
        print(name)
    assert run_in_child(config_path, lambda: None) == 0


if __name__ == "__main__":
    for path, moments in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(path, moments)

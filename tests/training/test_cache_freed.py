"""The activation cache of a step, and what was made of it, is gone before the next step makes its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.models.roles import Activations
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, settings, steps_of


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What only the garbage collector would free stays, so that a cycle through a cache is seen."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _activations() -> int:
    return sum(type(thing) is Activations for thing in gc.get_objects())


@pytest.mark.parametrize("truncation", ["terminal", "drop"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.usefixtures("without_collector")
def test_a_steps_activations_are_freed_before_the_next(tmp_path: Path, sharing: str, truncation: str) -> None:
    """FAULTS I5: references to the storages of the old cache are dead, and so are copies of it; in evaluations too."""
    changes = {"evaluation": {"every": 1}, "sampling": {"batch_size": 3}}
    tree = merged(merged(by_function("pays_by_hash", truncation=truncation, steps=2), SHARINGS[sharing]), changes)
    trainer = make_trainer(make_config(settings(tmp_path, tree)))
    caches: list[list[StorageWeakRef]] = []
    alive: list[int] = []
    others = _activations()  # what other tests of this process hold

    def note(tensor: Tensor) -> None:
        if caches:
            caches[-1].append(StorageWeakRef(tensor.untyped_storage()))

    # What the branches read: the cache itself, and the copies of its rows that score and learn work on.
    for role in (trainer.models.actor, trainer.models.critic, trainer.models.reference):
        role.branch.register_forward_pre_hook(lambda _, args: note(args[0]))
    sampler = trainer.sampler

    class Watched:
        def generate(self, prompts: Any, *, policy_version: int) -> Any:
            alive.append(sum(not reference.expired() for cache in caches for reference in cache))
            alive[-1] += _activations() - others
            caches.append([])
            rollout, activations = sampler.generate(prompts, policy_version=policy_version)
            note(activations.inputs)
            return rollout, activations

    trainer.sampler = Watched()
    steps_of(trainer)
    assert alive == [0] * 4, "two steps and two evaluations"
    assert all(len(cache) > 10 for cache in caches)

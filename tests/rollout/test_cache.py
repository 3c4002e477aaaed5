"""Slots of keys and values: what is in them, who looks at what, and how long they last."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.models.slot_cache import SlotCache
from tiny_roles import random_prompts, tiny_base, tiny_sampler


def test_a_rollout_that_is_drawn_leaves_no_cache_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs need the room."""
    sampler = tiny_sampler(tiny_base(tmp_path / "m"), batch_size=2)
    log_probs, left = sampler._training_log_probs, list[Any]()

    def look(*given: Any) -> torch.Tensor:
        left.extend(thing for thing in gc.get_objects() if type(thing) is SlotCache)
        return log_probs(*given)

    monkeypatch.setattr(sampler, "_training_log_probs", look)
    sampler.generate(random_prompts([3, 9, 1, 5]), policy_version=0)
    assert left == []

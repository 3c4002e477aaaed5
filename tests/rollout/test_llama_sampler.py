"""llama.cpp draws from the actor as it is now: base in a file, adapters taken anew for every rollout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import ConfigError
from fourfold.models.adapters import adapter_parameters
from fourfold.models.llama_cpp import PACKAGE
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.guarded import mean_gap
from fourfold.rollout.local import LocalSampler
from fourfold.training.trainer import Trainer
from training.runs import SHARINGS, Tree, by_function, make_config, make_trainer, merged, settings

needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")


def by_llama_cpp(folder: Path, sharing: str = "adapters", **sampling: Any) -> Tree:
    tree = merged(settings(folder, by_function("pays_by_hash", steps=1)), SHARINGS[sharing])
    return merged(tree, {"sampling": {"engine": "llama_cpp", "temperature": 0.9} | sampling})


def move_adapters(trainer: Trainer, seed: int) -> None:
    """As far as a few hundred updates would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(trainer.models.actor.branch):
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@needs_llama_cpp
@torch.no_grad()
@pytest.mark.parametrize(
    ("sharing", "rslora", "engine"),
    [
        ("adapters", False, "llama_cpp"),
        ("adapters", True, "llama_cpp_q8_0"),
        ("adapters over a trunk", False, "llama_cpp"),
    ],
)
def test_it_draws_from_the_adapters_as_they_are_now(tmp_path: Path, sharing: str, rslora: bool, engine: str) -> None:
    """FAULTS H9, H12: after each move its log-probs are those of the moved policy, which the one before is far from."""
    tree = merged(by_llama_cpp(tmp_path, sharing, engine=engine), {"adapters": {"rslora": rslora}})
    trainer = make_trainer(make_config(tree))
    actor, prompts = trainer.models.actor, trainer.prompts.batch(0)
    local = LocalSampler(trainer.models.base, actor, SamplingSettings(12, 0.9), trainer.sizes)
    for seed in (0, 1):
        move_adapters(trainer, seed)
        rollout, activations = trainer.sampler.generate(prompts, policy_version=seed)
        assert 0 < mean_gap(rollout) < (0.02 if engine == "llama_cpp" else 0.08)
        again, _ = actor.log_probs(activations, rollout, 0.9)
        torch.testing.assert_close(again, rollout.log_probs, rtol=0, atol=1e-4)
        move_adapters(trainer, seed + 10)
        other, _ = actor.log_probs(activations, rollout, 0.9)
        assert float((other - rollout.log_probs).abs()[rollout.response_mask].mean()) > 0.1
        move_adapters(trainer, seed)
        expected, _ = local.generate(prompts, policy_version=seed)
        both = min(expected.sequences.shape[1], rollout.sequences.shape[1])
        same = (expected.sequences[:, :both] == rollout.sequences[:, :both]).all(dim=1)
        assert float(same.float().mean()) > (0.7 if engine == "llama_cpp" else 0.3), (
            "the same random numbers draw nearly always the same tokens"
        )
    assert {int(seed) for seed in rollout.policy_version} == {1}


@needs_llama_cpp
def test_a_run_learns_with_weights(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(by_llama_cpp(tmp_path)))
    assert trainer.check().sampler_gap_mean < 0.02
    row = trainer.step()
    assert 0 < row["sampler_gap_mean"] < 0.02
    assert row["importance_weight_mean"] == pytest.approx(1, abs=0.02) and row["effective_sample_share"] > 0.99


@needs_llama_cpp
def test_stop_strings_end_a_response(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(by_llama_cpp(tmp_path, stop_strings=["a", "e", "t", "s"])))
    rollout, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    tokenizer = trainer.models.base.tokenizer
    stopped = 0
    for row in range(len(rollout.sequences)):
        ids = rollout.sequences[row, rollout.prompt_length :][rollout.response_mask[row]].tolist()
        assert not any(stop in tokenizer.decode(ids[:-1]) for stop in "aets")
        stopped += any(stop in tokenizer.decode(ids) for stop in "aets") and not bool(rollout.truncated[row])
    assert stopped


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sharing": {"mode": "none"}, "adapters": None}, "whose actor would have to be written and read as a whole"),
        ({"adapters": {"dora": True}}, "beside adapters.dora = true, which llama.cpp does not compute"),
        ({"sampling": {"overlap_scoring": True}}, "overlap_scoring: true beside sampling.engine = 'llama_cpp'"),
        ({"sampling": {"weights": "int8"}}, "sampling.weights: given, but sampling.engine = 'llama_cpp' holds its"),
        (
            {"sampling": {"batch_size": 2}},
            "sampling.batch_size: given, but sampling.engine = 'llama_cpp' draws as many",
        ),
    ],
)
def test_what_stands_against_it_is_refused(tmp_path: Path, changes: Tree, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(merged(by_llama_cpp(tmp_path), changes))

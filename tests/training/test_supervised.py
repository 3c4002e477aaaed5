"""The stage sft: its loss is the library's, and it learns what it is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fourfold.errors import RunFailed
from fourfold.models.loading import Base, load_base
from fourfold.training.pipeline import run_stages
from fourfold.training.supervised import fill_cache, mean_nll, nll_sum
from fourfold.training.texts import TextCache
from training.runs import ADAPTERS, SEPARATE, SHARINGS, Tree, make_config, merged, run, settings

TEXTS = [[5, 9, 33, 60], [7, 12], [8, 90, 41, 12, 66, 30, 1]]


@torch.no_grad()
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_is_that_of_the_library(tmp_path: Path, family: str, sharing: str) -> None:
    """Over padded texts: the sum over texts of transformers' own mean loss times the tokens it is the mean of."""
    config = make_config(settings(tmp_path, SHARINGS[sharing], family=family))
    base = load_base(config)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    expected = 0.0
    for text in TEXTS:
        ids = torch.tensor([text])
        expected += float(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss) * (len(text) - 1)
    cache = TextCache(base)
    fill_cache(cache, TEXTS, "test")
    total, tokens = nll_sum(base.policy, *cache.activations(TEXTS), TEXTS)
    assert tokens == 3 + 1 + 6
    assert float(total) == pytest.approx(expected, rel=1e-5)
    for batch_size in (1, 2, 3):
        assert mean_nll(base.policy, cache, TEXTS, batch_size) == pytest.approx(expected / tokens, rel=1e-5)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_few_texts_are_learned_by_heart(tmp_path: Path, sharing: str) -> None:
    """Held out are the very texts that are learned: their loss falls from that of a random model to a tenth."""
    texts = [{"text": "the film is a quiet joy"}, {"text": "nobody laughs"}, {"text": "a long walk through fog"}]
    tree = settings(tmp_path)
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    few = {"path": str(tmp_path / "few.jsonl")}
    changes = {
        "stages": ["sft"],
        "data": {"texts": few, "texts_test": few},
        "sft": {"num_epochs": 60, "batch_size": 3, "micro_batch_size": 3, "learning_rate": 2e-2, "schedule": "linear"},
        "checkpoint": {"stage_every": 100},
    }
    sft = run(merged(tree, merged(changes, SHARINGS[sharing])))["stages"]["sft"]
    assert sft["texts"] == 3
    # Adapters of rank 4 over a frozen random base have less room.
    share = 0.25 if sharing.startswith("adapters") else 0.1
    assert sft["test_nll_before"] > 4.0 and sft["test_nll_after"] < share * sft["test_nll_before"]


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_stops_the_stage(tmp_path: Path, value: float) -> None:
    """FAULTS B10: NaN is no JSON, so it must not become the stage's metric."""
    base = load_base(make_config(settings(tmp_path)))
    next(base.policy.branch.parameters()).flatten()[0] = value
    cache = TextCache(base)
    fill_cache(cache, TEXTS, "test")
    with pytest.raises(RunFailed, match=r"^sft: the sft policy's loss on held-out texts is nan; nothing was stored"):
        mean_nll(base.policy, cache, TEXTS, 2)


def weights_after(folder: Path, name: str, **sft: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    run(settings(folder, merged(SEPARATE, {"stages": ["sft"], "output": str(folder / name), "sft": sft})))
    return load_file(folder / name / "sft" / "model" / "model.safetensors")


def test_the_result_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    """FAULTS F16: one division by the tokens of the whole batch."""
    whole, small = (weights_after(tmp_path, str(size), micro_batch_size=size, max_texts=10) for size in (8, 1))
    start = load_base(make_config(settings(tmp_path, SEPARATE)))
    moved = _start(start, whole)
    assert moved > 1e-3
    for name, tensor in whole.items():
        torch.testing.assert_close(small[name], tensor, rtol=0, atol=1e-4)


def _start(base: Base, tensors: dict[str, torch.Tensor]) -> float:
    state = base.policy.state_dict()
    return max(float((tensor - state[name]).abs().max()) for name, tensor in tensors.items())


def test_a_loss_that_is_not_finite_names_stage_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fourfold.backends.local import LocalOptimizer

    backward = LocalOptimizer.backward
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalOptimizer,
            "backward",
            lambda self, loss: backward(self, loss * (math.nan if self.steps_done == 2 else 1)),
        )
        tree = settings(tmp_path, {"stages": ["sft"], "checkpoint": {"stage_every": 1}})
        with pytest.raises(RunFailed, match="sft, step 3: learn: the sft policy's loss is nan"):
            run(tree)
    checkpoints = tmp_path / "run" / "sft" / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000001", "step-00000002"]
    assert "test_nll_after" in run(tree)["stages"]["sft"], "the same command goes on from there"


TRAINED: dict[str, tuple[Tree, int]] = {
    # By hand: of a layer of 32, with 2 of 4 heads for keys and values, 2 * 32^2 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32.
    "trunk": ({}, 2 * 9_280 + 32),
    "nothing": ({"trunk": {"train": True, "branch_layers": 0}}, 32),
    # Rank 4: 4 x (inputs + outputs) of seven matrices, in four layers.
    "adapters": (merged(ADAPTERS, {"precision": {"frozen": "nf4"}}), 4 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)),
}


@pytest.mark.parametrize("sharing", TRAINED)
def test_the_stages_say_how_much_they_train(tmp_path: Path, sharing: str) -> None:
    """And warn where that is no matrix at all: a trunk of all layers stands still in sft and reward."""
    changes, count = TRAINED[sharing]
    said: list[str] = []
    tree = settings(tmp_path, merged(changes, {"stages": ["sft", "reward"]}))
    run_stages(make_config(tree), said.append)
    whole = 4 * 9_280 + 32 + 2 * 160 * 32
    added = count if sharing == "adapters" else 0
    head = 33  # the number head of a reward model, which has no use for a language head of its own
    assert f"sft: trains {count:,} of {whole + added:,} parameters" in "\n".join(said)
    assert f"reward: trains {count + head:,} of" in "\n".join(said)
    warned = [line for line in said if "no matrix of a decoder layer is among them" in line]
    assert len(warned) == (2 if sharing == "nothing" else 0)

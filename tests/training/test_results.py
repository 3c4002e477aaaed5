"""Using a finished run: export and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.algorithms.masking import position_ids
from fourfold.models.loading import load_base
from fourfold.training.folder import RunFolder, saved_config
from fourfold.training.results import export_actor, load_actor, sample_beside_reference
from training.runs import SHARINGS, merged, run, settings


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_exported_logits_are_the_actors(tmp_path: Path, family: str, sharing: str) -> None:
    run(merged(settings(tmp_path, family=family), SHARINGS[sharing]))
    folder = RunFolder(tmp_path / "run")
    config = saved_config(folder.root)
    base = load_base(config)
    actor = load_actor(config, base, folder, best=False)
    out = export_actor(str(folder.root), str(tmp_path / "out"), dtype="float32", best=False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    assert AutoTokenizer.from_pretrained(out).eos_token_id == base.tokenizer.eos_token_id

    ids = torch.tensor([[5, 9, 33, 60, 12], [7, 8, 90, 41, 3]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :2] = False
    with torch.no_grad():
        inputs = ids if base.trunk is None else base.trunk(ids, mask)
        expected = actor.head.logits(actor.branch(inputs, mask)[mask], torch.float32)
        call = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids(mask)}
        torch.testing.assert_close(model(**call).logits[mask], expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(original(**call).logits[mask], expected, atol=1e-3), "training has changed nothing"


def test_export_leaves_existing_folders_alone(tmp_path: Path) -> None:
    run(settings(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_actor(str(tmp_path / "run"), str(out), dtype="float32", best=False)
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_samples_stand_beside_the_reference(tmp_path: Path) -> None:
    run(settings(tmp_path))
    ask = {"chat": False, "count": 3, "max_new_tokens": None, "temperature": None, "best": False}
    rows = sample_beside_reference(str(tmp_path / "run"), prompts=["the cat", "a"], seed=0, **ask)
    assert [prompt for prompt, _, _ in rows] == ["the cat", "a"]
    assert rows == sample_beside_reference(str(tmp_path / "run"), prompts=["the cat", "a"], seed=0, **ask)
    assert rows != sample_beside_reference(str(tmp_path / "run"), prompts=["the cat", "a"], seed=1, **ask)
    held_out = sample_beside_reference(str(tmp_path / "run"), prompts=[], seed=0, **ask)
    assert len(held_out) == 3


def test_unfinished_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the folder of a run"):
        export_actor(str(tmp_path), str(tmp_path / "out"), dtype="float32", best=False)
    run(merged(settings(tmp_path), {"stages": ["sft"]}))
    with pytest.raises(ValueError, match="ppo has not finished"):
        export_actor(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32", best=False)

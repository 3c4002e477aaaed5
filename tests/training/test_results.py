"""Using a finished run: export and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.algorithms.masking import position_ids
from fourfold.batch import Rollout
from fourfold.config.loading import saved_config
from fourfold.models.loading import load_base
from fourfold.models.roles import Activations
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.sampler import PromptBatch
from fourfold.training.folder import RunFolder
from fourfold.training.results import export_actor, load_actor, sample_beside_reference
from tiny import EOS, PAD
from training.runs import SHARINGS, by_function, merged, run, settings


@pytest.fixture(scope="module")
def short_prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose own prompts have at most 8 tokens, longer ones being left out; its best step is not its last."""
    folder = tmp_path_factory.mktemp("short")
    changes = {
        "data": {"max_prompt_tokens": 8, "truncation": "drop", "max_text_tokens": 100},
        "evaluation": {"every": 1},
        # The KL is least after the first step, so that is the best by this metric.
        "checkpoint": {"best_metric": "eval_kl_per_sequence", "best_mode": "min", "keep_last": 1},
    }
    tree = settings(folder, changes)
    generation = folder / "llama" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"repetition_penalty": 1.25}))
    run(tree)
    return str(folder / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, to be read."""
    folder = tmp_path_factory.mktemp("finished")
    run(settings(folder, {"ppo": {"steps": 1}}))
    return folder / "run"


ASK: dict[str, Any] = {"chat": False, "count": 3, "max_new_tokens": None, "temperature": None, "seed": 0, "best": False}


def ask(run: str, prompts: list[str], **changes: Any) -> list[tuple[str, str, str]]:
    return sample_beside_reference(run, prompts=prompts, **{**ASK, **changes})


LONG = "the cat sat on the mat and looked at the moon"


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_exported_logits_are_the_actors(tmp_path: Path, family: str, sharing: str) -> None:
    one_step = {"ppo": {"steps": 1, "num_epochs": 1}, "evaluation": {"max_prompts": 2}}
    run(merged(settings(tmp_path, one_step, family=family), SHARINGS[sharing]))
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


def test_an_exported_folder_is_complete(short_prompts: str, tmp_path: Path) -> None:
    """Everything that another library needs is there: weights, settings of generation, tokenizer with its template."""
    config = saved_config(Path(short_prompts))
    out = export_actor(short_prompts, str(tmp_path / "out"), dtype="bfloat16", best=True)
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == needed | {"chat_template.jinja"}

    ours, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(config.model.path)
    assert ours.get_vocab() == original.get_vocab() and ours.model_max_length == original.model_max_length
    assert ours.special_tokens_map == original.special_tokens_map
    messages = [{"role": "user", "content": LONG}]
    assert (
        ours.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        == (original.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    )

    model: Any = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.dtype == torch.bfloat16
    ends = [EOS, *config.sampling.extra_eos_token_ids]
    assert model.generation_config.eos_token_id == ends and model.generation_config.pad_token_id == PAD
    assert model.generation_config.repetition_penalty == 1.25, "settings of the model that the run leaves alone"
    ids = torch.tensor([ours(LONG)["input_ids"]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert len(made) < 60 and int(made[-1]) in ends


def test_export_leaves_existing_folders_alone(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_actor(str(finished), str(out), dtype="float32", best=False)
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_samples_stand_beside_the_reference(finished: Path) -> None:
    run_folder = str(finished)
    rows = ask(run_folder, ["the cat", "a"], seed=0)
    assert [prompt for prompt, _, _ in rows] == ["the cat", "a"]
    assert rows == ask(run_folder, ["the cat", "a"], seed=0)
    assert rows != ask(run_folder, ["the cat", "a"], seed=1)
    held_out = ask(run_folder, [], seed=0)
    assert len(held_out) == 3


def test_typed_prompts_are_neither_dropped_nor_cut(short_prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the run's data are not for what somebody types, with the chat template or without."""
    seen: list[list[int]] = []
    generate = LocalSampler.generate

    def watched(sampler: LocalSampler, prompts: PromptBatch, *, policy_version: int) -> tuple[Rollout, Activations]:
        seen.extend(map(list, prompts.tokens))
        return generate(sampler, prompts, policy_version=policy_version)

    monkeypatch.setattr(LocalSampler, "generate", watched)
    tokenizer = AutoTokenizer.from_pretrained(saved_config(Path(short_prompts)).model.path)
    typed = [LONG, "a"]
    for chat in (False, True):
        rows = ask(short_prompts, typed, chat=chat)
        assert [prompt for prompt, _, _ in rows] == typed
        texts = [f"user:\n{text}\nassistant:\n" for text in typed] if chat else typed
        expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert len(expected[0]) > 8
        assert seen == expected * 2  # reference and actor
        seen.clear()


def test_the_best_checkpoint_writes_otherwise_than_the_last(short_prompts: str) -> None:
    last, best = (
        ask(short_prompts, [LONG, "the cat"], max_new_tokens=30, chat=True, best=best) for best in (False, True)
    )
    assert [row[:2] for row in last] == [row[:2] for row in best]  # the reference is the same
    assert [row[2] for row in last] != [row[2] for row in best]


def test_a_prompt_beyond_the_models_positions_is_refused_with_the_lengths(short_prompts: str) -> None:
    message = r"prompt 2 has \d+ tokens, which leaves no room for 6 new ones: the model has 128 positions"
    with pytest.raises(ValueError, match=message):
        ask(short_prompts, ["a", " ".join([LONG] * 8)])
    with pytest.raises(ValueError, match="prompt 1 has 1 tokens, which leaves no room for 128 new ones"):
        ask(short_prompts, ["a"], max_new_tokens=128)


def test_held_out_prompts_are_those_that_the_run_reads(short_prompts: str) -> None:
    before = json.loads((Path(short_prompts) / "ppo" / "before.json").read_text(encoding="utf-8"))
    rows = ask(short_prompts, [])
    assert [prompt for prompt, _, _ in rows] == before["prompts"][:3]


def test_chat_needs_a_template(tmp_path: Path) -> None:
    tree = settings(tmp_path, by_function("pays_for_a", steps=1))
    run(tree)
    (tmp_path / "llama" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template; leave out --chat"):
        ask(str(tmp_path / "run"), ["a"], chat=True)


def test_unfinished_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the folder of a run"):
        export_actor(str(tmp_path), str(tmp_path / "out"), dtype="float32", best=False)
    run(merged(settings(tmp_path), {"stages": ["sft"]}))
    with pytest.raises(ValueError, match="ppo has not finished"):
        export_actor(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32", best=False)

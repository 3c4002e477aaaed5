"""A run that starts from a policy of another run, or from a LoRA adapter of peft (FAULTS D2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fourfold.config.loading import ConfigError
from fourfold.models.assembly import assemble
from fourfold.models.loading import load_base
from fourfold.models.reference import OwnPolicy
from fourfold.training.folder import RunFolder, sft_model
from fourfold.training.pipeline import prepare
from fourfold.training.results import load_reference
from training.runs import ADAPTERS, Tree, by_function, make_config, merged, outcome, run, settings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

TEXTS = torch.tensor([[7, 30, 51, 9, 88, 120, 14, 33], [5, 99, 41, 12, 60, 77, 23, 148]])

LINEAR = (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["c_attn", "c_proj", "c_fc"])


def adapter(model: str, folder: Path, steps: int = 4, **given: Any) -> Any:
    """An adapter that peft has made, trained and saved; returns peft's model."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model)
    conv = base.config.model_type == "gpt2"
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR[conv], "fan_in_fan_out": conv, **given}
    peft: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **chosen))
    optimizer = torch.optim.Adam([p for p in peft.parameters() if p.requires_grad], lr=0.03)
    for _ in range(steps):
        peft(input_ids=TEXTS, labels=TEXTS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peft.save_pretrained(folder)
    return peft.eval()


def starting_from(folder: Path, family: str = "llama", **adapters: Any) -> Tree:
    """A run of ppo above adapters that starts from the adapter in `folder`/adapter."""
    tree = settings(folder, merged(by_function("pays_by_hash", steps=1), ADAPTERS), family=family)
    return merged(tree, {"sft": {"checkpoint": str(folder / "adapter"), **dict.fromkeys(STAGE)}, "adapters": adapters})


STAGE = ("learning_rate", "batch_size", "micro_batch_size")
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "dora": ({"use_dora": True}, {"dora": True}),
    "rslora": ({"use_rslora": True}, {"rslora": True}),
    "upper layers": ({"layers_to_transform": [2, 3]}, {"layers": 2}),
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_says_what_it_says_in_peft(tmp_path: Path, family: str, kind: str) -> None:
    """Actor and reference both: the log-probs are peft's, and KL at step 0 is 0."""
    theirs, ours = KINDS[kind]
    tree = starting_from(tmp_path, family, **ours)
    peft = adapter(tree["model"]["path"], tmp_path / "adapter", **theirs)
    config = prepare(make_config(tree))
    base = load_base(config)
    models = assemble(config, base, sft_model(config, RunFolder(Path(config.output))), None)
    mask = torch.ones_like(TEXTS, dtype=torch.bool)
    with torch.no_grad():
        expected = peft(input_ids=TEXTS).logits.log_softmax(-1)
        plain = AutoModelForCausalLM.from_pretrained(tree["model"]["path"]).eval()(input_ids=TEXTS)
        inputs = TEXTS if base.trunk is None else base.trunk(TEXTS, mask)
        found = {
            role: policy.head.logits(policy.branch(inputs, mask), torch.float32).log_softmax(-1)
            for role, policy in (("actor", models.actor), ("reference", models.reference))
        }
    assert not isinstance(models.reference, OwnPolicy)
    torch.testing.assert_close(found["actor"], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found["reference"], found["actor"])
    assert float((expected - plain.logits.log_softmax(-1)).abs().max()) > 0.1, "the adapter says something"


def test_a_whole_run_from_an_adapter_of_peft(tmp_path: Path) -> None:
    """Without a stage sft; a reward model starts from it too, and `fourfold sample` shows it as the reference."""
    tree = merged(settings(tmp_path, ADAPTERS), {"stages": ["reward", "ppo"], "ppo": {"steps": 1}})
    tree = merged(tree, {"sft": {"checkpoint": str(tmp_path / "adapter"), **dict.fromkeys(STAGE)}})
    adapter(tree["model"]["path"], tmp_path / "adapter")
    run(tree)
    preflight = json.loads((tmp_path / "run" / "ppo" / "preflight.json").read_text())
    assert preflight["kl_gap_max"] < 1e-5
    config = make_config(tree)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base = load_base(prepare(config))
    reference = dict(load_reference(config, base, RunFolder(tmp_path / "run")).named_parameters())
    name = "layers.1.self_attn.q_proj.lora_B"
    given = stored[f"base_model.model.model.{name}.weight"]
    assert torch.equal(reference[f"branch.body.{name}.default.weight"], given)
    scorer = load_file(tmp_path / "run" / "reward" / "model" / "model.safetensors")
    moved = (scorer[f"branch.body.{name}.default.weight"] - given).abs().max()
    assert 0 < float(moved) < 0.05 < float(given.abs().max()), "it began at the adapter, not at B = 0"


def test_the_policy_of_another_run_is_what_its_own_stage_would_have_left(tmp_path: Path) -> None:
    """sft.checkpoint = sft/model of a run, or a checkpoint of the stage: ppo goes as if the stage had been here."""
    whole = by_function("pays_by_hash", steps=1)
    tree = settings(tmp_path, whole)
    data = settings(tmp_path)["data"]
    first = merged(tree, {"stages": ["sft", "ppo"], "data": {"texts": data["texts"]}})
    run(first)
    expected = outcome(tmp_path / "run")["rows"]
    last = max((tmp_path / "run" / "sft" / "checkpoints").glob("step-*"))
    for name, folder in (("model", tmp_path / "run" / "sft" / "model"), ("checkpoint", last)):
        given = {"checkpoint": str(folder), **dict.fromkeys(STAGE)}
        run(merged(tree, {"output": str(tmp_path / name), "sft": given}))
        assert outcome(tmp_path / name)["rows"] == expected


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"r": 8}, "made with adapters = 'lora rank 8 alpha 8 on all', this run has 'lora rank 4 alpha 8 on all'"),
        ({"lora_alpha": 16}, "made with adapters = 'lora rank 4 alpha 16 on all', this run has"),
        ({"use_dora": True}, "made with adapters = 'dora rank 4"),
        ({"target_modules": ["q_proj"]}, "lacks .* tensors, first 'branch.body.layers.0.mlp.down_proj.lora_A"),
        ({"layers_to_transform": [0, 1]}, "lacks .* tensors, first 'branch.body.layers.2."),
        ({"bias": "lora_only"}, "bias = 'lora_only' in adapter_config.json does more than low-rank adapters"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2} in adapter_config.json does more"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .*'lm_head'.* does more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_that_is_not_this_runs_is_refused_by_name(tmp_path: Path, theirs: dict[str, Any], said: str) -> None:
    tree = starting_from(tmp_path)
    adapter(tree["model"]["path"], tmp_path / "adapter", steps=0, **theirs)
    with pytest.raises(ValueError, match=said):
        run(tree)
    assert not (tmp_path / "run" / "ppo" / "model").exists()


def test_other_bases_targets_and_files_are_refused(tmp_path: Path) -> None:
    tree = starting_from(tmp_path, targets=["q_proj"])
    adapter(tree["model"]["path"], tmp_path / "adapter", steps=0, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"sft.checkpoint: .*alpha 8 on q_proj,v_proj', this run has .* on q_proj'"):
        run(tree)
    config = tmp_path / "adapter" / "adapter_config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps({**given, "base_model_name_or_path": "owner/another"}))
    with pytest.raises(ValueError, match="was made with model = 'owner/another', this run has"):
        run(tree)
    config.write_text(json.dumps({**given, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="a peft adapter of the type 'IA3'; allowed: 'LORA'"):
        run(tree)
    config.write_text(json.dumps({**given, "target_modules": ["q_proj"]}))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    with pytest.raises(ValueError, match=r"unknown tensors, first 'branch.body.layers.0.self_attn.v_proj.lora_A"):
        run(tree)
    save_file({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, weights)
    with pytest.raises(ValueError, match="the stored role lacks"):
        run(tree)
    weights.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing"):
        run(tree)


def test_where_it_cannot_be_is_refused(tmp_path: Path) -> None:
    tree = starting_from(tmp_path)
    adapter(tree["model"]["path"], tmp_path / "adapter", steps=0)
    with pytest.raises(ValueError, match=r"made with sharing = 'adapters', this run has 'trunk'"):
        run(merged(tree, {"sharing": None, "adapters": None, "trunk": {"branch_layers": 2}}))
    with pytest.raises(ConfigError, match=r"sft\.checkpoint: given beside the stage 'sft'"):
        texts = settings(tmp_path)["data"]["texts"]
        make_config(merged(tree, {"stages": ["sft", "ppo"], "data": {"texts": texts}}))
    with pytest.raises(ValueError, match=r"sft\.checkpoint: no folder"):
        run(merged(tree, {"sft": {"checkpoint": str(tmp_path / "absent")}}))

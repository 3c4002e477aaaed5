"""A causal language model as a judge, against the library's own logits of each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fourfold.memory.budget import tensor_bytes
from fourfold.memory.precision import DTYPES
from fourfold.models.external import check_external
from fourfold.models.judge import Judge
from models.test_external import PROMPTS, RESPONSES, config_for, external, scores
from tiny import VOCABULARY, tiny_directory, tiny_tokenizer
from training.runs import make_config, make_trainer, merged, steps_of
from training.test_own_models import scored_by

TEMPLATE = "{prompt}{response} is this good? answer:"
ANSWERS = {"a": 1.0, "e": -1.0}
ASKED: dict[str, Any] = {"template": TEMPLATE, "label": ANSWERS}


@torch.no_grad()
def log_odds(folder: Path) -> torch.Tensor:
    """log p(a | question) - log p(e | question) of each text alone, by the whole model's softmax."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    first, second = (tokenizer.convert_tokens_to_ids(answer) for answer in ANSWERS)
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        inputs = tokenizer(TEMPLATE.format(prompt=prompt, response=response), return_tensors="pt")
        row = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits[0, -1].log_softmax(-1)
        found.append(row[first] - row[second])
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma"])
def test_a_judge_s_score_is_the_log_odds_of_its_answers(tmp_path: Path, family: str) -> None:
    """Batched and padded, with and without a BOS of its tokenizer; only the answers' rows of the head are held."""
    tiny_directory(tmp_path / "m", family, seed=4, bos=family == "llama")
    judge = external(tmp_path / "m", **ASKED)
    expected = log_odds(tmp_path / "m")
    assert float((expected[:, None] - expected).abs().max()) > 0.1, "texts are told apart"
    torch.testing.assert_close(scores(judge), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(judge.classifier, Judge)
    body = judge.classifier.model.base_model
    assert tensor_bytes(judge.parameters()) == tensor_bytes(body.parameters()) + 2 * 4 * judge.classifier.rows.shape[1]


@pytest.mark.parametrize("held", ["bfloat16", "int8"])
def test_a_judge_in_fewer_bits_says_nearly_the_same(tmp_path: Path, held: str) -> None:
    tiny_directory(tmp_path / "m", seed=4)
    found = scores(external(tmp_path / "m", held, **ASKED))
    assert held not in DTYPES or found.dtype == torch.float32
    torch.testing.assert_close(found, log_odds(tmp_path / "m"), rtol=0.1, atol=0.1)


def test_a_run_is_paid_by_a_judge(tmp_path: Path) -> None:
    """Parked, too; its own tokenizer, of another vocabulary."""
    tiny_directory(tmp_path / "judge", "gpt2", seed=4)
    given = {"model": str(tmp_path / "judge"), **ASKED}
    kept, parked = (
        steps_of(
            make_trainer(
                make_config(merged(scored_by(tmp_path, residency=how, **given), {"output": str(tmp_path / how)}))
            )
        )
        for how in ("keep", "park")
    )
    assert kept[0]["score_std"] > 0 and kept[0]["reward_forward_passes"] == 1.0
    assert [row["score_mean"] for row in kept] == [row["score_mean"] for row in parked]


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path / "m")
    for changes, message in (
        (
            {"template": ""},
            r"^reward.template: given '', but .* is a causal language model, .* ends with; allowed: a text",
        ),
        ({"template": "chat"}, r"^reward.template: given 'chat'"),
        ({"label": {}}, r"^reward.label: given 0 answers.*try reward.label = \{\" yes\" = 1.0"),
        ({"label": {"a": 1.0}}, r"^reward.label: given 1 answers"),
        ({"label": {"a": 1.0, "zqx": -1.0}}, r"^reward.label: given 'zqx', which is 3 tokens"),
        ({"engine": "onnx"}, r"^reward.engine: given 'onnx', but .* allowed beside one: 'torch'"),
    ):
        with pytest.raises(ValueError, match=message):
            external(folder, **{**ASKED, **changes})
        with pytest.raises(ValueError, match=message):
            check_external(config_for(folder, **{**ASKED, **changes}))


def test_a_family_that_changes_its_logits_afterwards_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gemma2", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        final_logit_softcapping=0.5, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    tiny_tokenizer(pad_is_eos=False).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM changes them afterwards"):
        external(tmp_path / "m", **ASKED)

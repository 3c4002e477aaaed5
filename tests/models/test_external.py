"""A reward model of another family: what it reads, what it says, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fourfold.config.schema import RunConfig
from fourfold.memory.budget import Budget
from fourfold.memory.quantization import QuantizedLinear
from fourfold.models.external import QUANTIZED_BOUNDS, External, check_external, load_external
from tiny import tiny_classifier, tiny_directory

PROMPTS = ["what is rain?", "the sea", "a"]
RESPONSES = [" water.", " is wide and blue, and never still.", " b"]
LABELS = ("BAD", "SO SO", "GOOD")


def config_for(model: Path, held: str = "auto", **reward: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "unused",
            "stages": ["ppo"],
            "model": {"path": "owner/actor"},
            "precision": {"compute": "float32"} | ({} if held == "auto" else {"reward": held}),
            "system": {"device": "cpu"},
            "data": {"prompts": {"path": "prompts.jsonl"}},
            "reward": {"source": "model", "model": str(model), **reward},
            "critic": {"init": "base"},
        }
    )


def external(model: Path, held: str = "auto", **reward: Any) -> External:
    return load_external(config_for(model, held, **reward), Budget())


def scores(model: External, prompts: list[str] = PROMPTS, responses: list[str] = RESPONSES) -> Tensor:
    return model.scores(model.reader.rows(prompts, responses)[0])


def by_hand(folder: Path, texts: list[Any], *, special: bool = True) -> Tensor:
    """Logits of each text alone, as the library's documentation has it; no batch, no padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        parts = text if isinstance(text, tuple) else (text,)
        with torch.no_grad():
            rows.append(model(**tokenizer(*parts, add_special_tokens=special, return_tensors="pt")).logits[0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of each family with one logit, and one with three."""
    root = tmp_path_factory.mktemp("classifiers")
    for family in ("bert", "llama"):
        tiny_classifier(root / family, family, seed=2)
    tiny_classifier(root / "labels", labels=LABELS, seed=3)
    return root


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_batch_is_scored_as_each_text_by_hand(folder: Path, family: str) -> None:
    """Requirement 35: re-tokenised text, padded in a batch, against the library row by row."""
    expected = by_hand(folder / family, [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])[:, 0]
    assert float((expected[:, None] - expected).abs().max()) > 0.1, "texts are told apart"
    torch.testing.assert_close(scores(external(folder / family)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_templates_decide_what_is_read(folder: Path, family: str) -> None:
    path = folder / family
    pairs = list(zip(PROMPTS, RESPONSES, strict=True))
    chat = [f"[CLS]user:\n{a}\nassistant:\n{b}\n" for a, b in pairs]
    written = {
        "pair": by_hand(path, pairs),
        "chat": by_hand(path, chat, special=False),
        "q: {prompt} a: {{{response}}}": by_hand(path, [f"q: {a} a: {{{b}}}" for a, b in pairs]),
    }
    for template, expected in written.items():
        torch.testing.assert_close(scores(external(path, template=template)), expected[:, 0], rtol=1e-5, atol=1e-6)
    seen = torch.stack([scores(external(path)), *(expected[:, 0] for expected in written.values())])
    assert len({round(float(score), 5) for score in seen[:, 0]}) == {"bert": 4, "llama": 3}[family], (
        "each reads something else, but the decoder's tokenizer writes nothing between two segments"
    )


def test_braces_in_a_text_are_no_template(folder: Path) -> None:
    found = scores(external(folder / "bert", template="{prompt} - {response}"), ["{response}"], ["{0} {prompt}"])
    expected = by_hand(folder / "bert", ["{response} - {0} {prompt}"])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_long_texts_lose_their_beginning_and_keep_special_tokens(folder: Path) -> None:
    reader = external(folder / "bert", max_tokens=6).reader
    rows, cut = reader.rows(["abcdef", "a"], ["gh", "b"])
    tokens = [reader.tokenizer.convert_ids_to_tokens(row["input_ids"]) for row in rows]
    assert tokens == [["[CLS]", *"efgh", "[SEP]"], ["[CLS]", *"ab", "[SEP]"]] and cut == 1
    chat = external(folder / "llama", max_tokens=8, template="chat").reader
    [row], cut = chat.rows(["abcdef"], ["gh"])
    assert chat.tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["[CLS]", *"nt:", "\n", "g", "h", "\n"]
    assert cut == 1 and row["attention_mask"] == [1] * 8
    assert external(folder / "bert").reader.limit == 128, "by default the model's positions"


def test_labels_are_chosen_and_combined(folder: Path) -> None:
    logits = by_hand(folder / "labels", [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)])
    one = external(folder / "labels", label={"GOOD": 1.0})
    torch.testing.assert_close(scores(one), logits[:, 2], rtol=1e-5, atol=1e-6)
    both = external(folder / "labels", label={"GOOD": 2.0, "BAD": -0.5})
    torch.testing.assert_close(scores(both), 2 * logits[:, 2] - 0.5 * logits[:, 0], rtol=1e-5, atol=1e-6)
    half = external(folder / "bert", label={"SCORE": 0.5})
    torch.testing.assert_close(scores(half), 0.5 * scores(external(folder / "bert")))


def test_padding_ids_of_roberta_count_positions(folder: Path, tmp_path: Path) -> None:
    """Its positions begin behind the padding's id, so the table holds fewer tokens than it has rows."""
    shutil.copytree(folder / "bert", tmp_path / "m")
    config = AutoConfig.for_model(
        "roberta", vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=20, pad_token_id=1, type_vocab_size=2, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "m")
    found = external(tmp_path / "m")
    assert found.reader.limit == 18 and found.reader.padding["input_ids"] == 1
    assert torch.isfinite(scores(found, ["a" * 40], ["b" * 40])).all()
    with pytest.raises(ValueError, match=r"reward.max_tokens: given 19; allowed for .*: 3 .* to 18"):
        external(tmp_path / "m", max_tokens=19)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
def test_half_precision_is_near_and_its_head_is_float32(folder: Path, dtype: torch.dtype, near: float) -> None:
    exact, narrow = (external(folder / "llama", str(each)[6:]) for each in (torch.float32, dtype))
    kinds = {p.dtype for p in narrow.parameters()}
    assert kinds == {dtype, torch.float32} and {p.dtype for p in exact.parameters()} == {torch.float32}
    head: Any = narrow.classifier
    assert head.model.score.weight.dtype == torch.float32
    gap = scores(narrow) - scores(exact)
    assert 0 < float(gap.abs().max()) < near * float(scores(exact).abs().max())
    assert not torch.equal(scores(narrow), scores(narrow).to(dtype).float()), "not rounded to its digits"


@pytest.mark.parametrize("kind", ["int8", "int8_dynamic", "nf4"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_in_fewer_bits_it_scores_with_the_numbers_that_the_codes_stand_for(
    folder: Path, family: str, kind: str
) -> None:
    """Against the library's model with these numbers put into it; the head is float32, and FLOPs count weights."""
    exact, held = external(folder / family), external(folder / family, kind)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / family).eval()
    quantized = {name: each for name, each in held.named_modules() if isinstance(each, QuantizedLinear)}
    linear = {name for name, each in exact.named_modules() if isinstance(each, torch.nn.Linear)}
    assert linear - quantized.keys() == {f"classifier.model.{'classifier' if family == 'bert' else 'score'}"}
    for name, layer in quantized.items():
        with torch.no_grad():
            model.get_submodule(name.removeprefix("classifier.model.")).weight.copy_(layer.weight)
    texts = [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(folder / family)
    with torch.no_grad():
        expected = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts])
    rtol, atol = (0.05, 0.05) if kind == "int8_dynamic" else (1e-4, 1e-5)  # it rounds the activations, too
    torch.testing.assert_close(scores(held), expected, rtol=rtol, atol=atol)
    assert not torch.allclose(scores(exact), expected, rtol=1e-4)
    work = []
    for each in (exact, held):
        each.take_work()
        scores(each)
        work.append(each.take_work())
    assert work[0] == work[1]


def test_a_model_that_does_not_bear_fewer_bits_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZED_BOUNDS, "int8", 1e-3)
    said = r"precision.reward = 'int8': on a probe, scores change by .* \(allowed 0.001\); Bert.* try 'auto'$"
    with pytest.raises(ValueError, match=said):
        external(folder / "bert", "int8")


def test_where_and_how_wide_auto_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reward.device` and `precision.reward`, beside a GPU that is only claimed."""
    from fourfold.models import external as module

    assert module.placed(config_for(folder / "bert")) == (torch.device("cpu"), torch.float32)
    monkeypatch.setattr(module, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(module, "resolve_compute", lambda wanted, device: f"{wanted} on {device.type}")
    monkeypatch.setattr(module, "DTYPES", {"float32 on cuda": 1, "auto on cpu": 2, "bfloat16 on cpu": 3})
    assert module.placed(config_for(folder / "bert")) == (torch.device("cuda"), 1)
    assert module.placed(config_for(folder / "bert", device="cpu")) == (torch.device("cpu"), 2)
    assert module.placed(config_for(folder / "bert", "bfloat16", device="cpu")) == (torch.device("cpu"), 3)
    assert module.placed(config_for(folder / "bert", "int8", device="cpu")) == (torch.device("cpu"), 2)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_flops_are_what_torch_counts(folder: Path, family: str) -> None:
    """Without padding, by torch's own counter, which takes causal attention as whole."""
    config = config_for(folder / family)
    memory = config.memory.model_copy(
        update={"attention": "eager"}
    )  # the counter does not know torch's kernel for CPUs
    model = load_external(config.model_copy(update={"memory": memory}), Budget())
    rows = model.reader.rows(["abcdefghij"] * 3, ["klmnop"] * 3)[0]
    model.take_work()
    with FlopCounterMode(display=False) as counter:
        model.scores(rows)
    work, flops = model.take_work()
    length = len(rows[0]["input_ids"])
    assert (work.rows, work.tokens) == (3, 3 * length)
    causal = 3 * length * (length + 1) // 2
    assert work.attended == (causal if family == "llama" else 3 * length**2)
    if family == "llama":
        flops += 4 * 2 * 16 * (3 * length**2 - causal)
    else:  # pooler and head see one token a row
        flops -= 2 * (16 * 16 + 16) * (3 * length - 3)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert model.take_work()[0].tokens == 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({}, r"reward.label: not given, but .*labels' has 3 labels; .*'BAD', 'SO SO', 'GOOD'; try"),
        ({"label": {"GOD": 1.0}}, r"reward.label: given 'GOD'; did you mean 'GOOD'\? labels of"),
        ({"label": {"GOOD": 1.0}, "max_tokens": 2}, r"reward.max_tokens: given 2; allowed for .*: 3 .* to 128"),
        ({"label": {"GOOD": 1.0}, "max_tokens": 129}, r"reward.max_tokens: given 129; allowed for .* to 128"),
    ],
)
def test_what_the_model_does_not_have_is_refused(folder: Path, reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        external(folder / "labels", **reward)
    with pytest.raises(ValueError, match=message):
        check_external(config_for(folder / "labels", **reward))


def edited(folder: Path, target: Path, name: str, **changes: Any) -> Path:
    """A copy with other entries in one of its JSON files; None takes an entry out."""
    shutil.copytree(folder, target)
    content = json.loads((target / name).read_text()) | changes
    (target / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return target


def test_incomplete_models_are_refused(folder: Path, tmp_path: Path) -> None:
    """FAULTS: a head that is not there would be random, and a folder of pickled weights would be unpickled."""
    for name, family in (("encoder", "bert"), ("decoder", "llama")):
        shutil.copytree(folder / family, tmp_path / name)
        AutoModel.from_pretrained(folder / family).save_pretrained(tmp_path / name)
        with pytest.raises(
            ValueError, match=r"lacks \d weights of \w+, first '(classifier|score)\.\w+': they would be rand"
        ):
            external(tmp_path / name)
    language = tiny_directory(tmp_path / "language")
    with pytest.raises(ValueError, match=r"lacks 1 weights of LlamaForSequenceClassification"):
        external(
            edited(language, tmp_path / "headless", "config.json", architectures=["LlamaForSequenceClassification"])
        )
    (shutil.copytree(folder / "bert", tmp_path / "pickled") / "model.safetensors").rename(
        tmp_path / "pickled" / "pytorch_model.bin"
    )
    with pytest.raises(ValueError, match=r"cannot be loaded .*; allowed: a folder with"):
        external(tmp_path / "pickled")
    bare = edited(folder / "bert", tmp_path / "bare", "tokenizer_config.json", chat_template=None)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"reward.template: given 'chat', but the tokenizer .* has no chat template"):
        external(bare, template="chat")
    with pytest.raises(ValueError, match=r"reward.template: given 'chat', but the tokenizer .* has no chat template"):
        check_external(config_for(bare, template="chat"))
    remote = edited(
        folder / "bert", tmp_path / "remote", "config.json", model_type="mine",
        auto_map={"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot be loaded"):
        external(remote)


def test_padding_that_changes_scores_is_refused(folder: Path, tmp_path: Path) -> None:
    """Here: a tokenizer that makes no mask, so that every token would look at the padding."""
    wrong = edited(folder / "bert", tmp_path / "wrong", "tokenizer_config.json", model_input_names=["input_ids"])
    with pytest.raises(ValueError, match=r"rows with padding are scored otherwise than alone, by .* check the weights"):
        external(wrong)
    none = edited(folder / "llama", tmp_path / "none", "config.json", pad_token_id=None)
    assert external(none).reader.padding["input_ids"] == 0, "the tokenizer's"
    shutil.copytree(folder / "bert", tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights["classifier.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"by nan of the largest score"):
        external(tmp_path / "damaged")


def test_streaming_needs_layers_that_can_be_found(folder: Path, tmp_path: Path) -> None:
    assert len(external(folder / "bert", residency="stream").layers) == 2
    config = AutoConfig.for_model(
        "albert", vocab_size=60, embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=32, pad_token_id=0, num_labels=1, initializer_range=0.3, max_position_embeddings=128,
    )  # fmt: skip
    shutil.copytree(folder / "bert", tmp_path / "albert")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "albert")
    assert external(tmp_path / "albert", residency="park").layers == []
    with pytest.raises(ValueError, match=r"reward.residency = 'stream': Albert.* does not show its layers .* 'park'"):
        external(tmp_path / "albert", residency="stream")

"""Tiny tokenizers and random models of every supported family, made on the spot: no download, the same on every run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")
PAD, EOS, UNK, BOS = 0, 1, 2, 3
VOCABULARY = 160
MAX_POSITIONS = 128
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def sentences() -> list[str]:
    """The sentences written for the tests, one a line of the fixture."""
    return (FIXTURES / "sentences.txt").read_text(encoding="utf-8").splitlines()


def tiny_tokenizer(pad_is_eos: bool, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 160 tokens trained on the fixture; `bos` makes it put BOS before every plain text.

    The chat template writes `bos_token` itself, as those of real models do. Characters outside the fixture are `<unk>`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in ("<pad>", "<eos>", "<unk>", "<bos>")],
        initial_alphabet=[*"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-", "Ġ", "Ċ"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>" if pad_is_eos else "<pad>"}
    if bos:
        special["bos_token"] = "<bos>"
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, model_max_length=MAX_POSITIONS, **special
    )


def tiny_model(
    family: str, vocab_size: int = VOCABULARY, layers: int = 4, hidden: int = 32, seed: int = 0, pad_id: int = PAD
) -> PreTrainedModel:
    """A random float32 model (4 heads, 2 key-value heads where the family has them), in eval mode.

    Weights are large enough that attention and positions matter, and norms and biases are random too: with the usual
    initial values (ones, zeros, 0.02) a test would not notice that a layer is left out. Dropout keeps the family's
    default; torch's random state is left alone.
    """
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **_settings(family, vocab_size, layers, hidden, pad_id)), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.random.set_rng_state(torch_state)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = pad_id
    return model.eval()


def _settings(family: str, vocab_size: int, layers: int, hidden: int, pad_id: int) -> dict[str, Any]:
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: allowed are {', '.join(FAMILIES)}")
    common = {
        "vocab_size": vocab_size,
        "initializer_range": 0.15,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": pad_id,
    }
    if family == "gpt2":
        return common | {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": MAX_POSITIONS}
    common |= {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    }
    if family != "gpt_neox":
        common["num_key_value_heads"] = 2
    if family in ("gemma", "qwen3"):  # their default head size does not follow from the hidden size
        common["head_dim"] = hidden // 4
    return common


def tiny_directory(
    path: Path,
    family: str = "llama",
    *,
    vocab_size: int = VOCABULARY,
    layers: int = 4,
    hidden: int = 32,
    seed: int = 0,
    pad_is_eos: bool = False,
    bos: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A Hugging Face directory with a tiny model and its tokenizer, as `model.path` takes it."""
    return _copied(path, _directory, family, vocab_size, layers, hidden, seed, pad_is_eos, bos, dtype)


def _directory(
    path: Path,
    family: str,
    vocab_size: int,
    layers: int,
    hidden: int,
    seed: int,
    pad_is_eos: bool,
    bos: bool,
    dtype: torch.dtype,
) -> None:
    model = tiny_model(family, vocab_size, layers, hidden, seed, EOS if pad_is_eos else PAD)
    model.to(dtype).save_pretrained(path)  # pyright: ignore[reportArgumentType]
    tiny_tokenizer(pad_is_eos, bos).save_pretrained(path)


def tiny_classifier(
    path: Path, family: str = "bert", *, labels: tuple[str, ...] = ("SCORE",), seed: int = 0, layers: int = 2
) -> Path:
    """A Hugging Face directory with a random text classifier, "bert" or "llama", and a tokenizer of its own.

    Letters are its words: "bert" reads them between [CLS] and [SEP], "llama" after [CLS] as its BOS.
    """
    return _copied(path, _classifier, family, labels, seed, layers)


def _classifier(path: Path, family: str, labels: tuple[str, ...], seed: int, layers: int) -> None:
    characters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-_ \n"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(characters)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = [("[CLS]", 2), ("[SEP]", 3)]
    single, pair = (
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if family == "bert" else ("[CLS] $A", "[CLS] $A $B")
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", bos_token="[CLS]", sep_token="[SEP]",
        model_max_length=MAX_POSITIONS, chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", *(["token_type_ids"] if family == "bert" else []), "attention_mask"],
    ).save_pretrained(path)  # fmt: skip
    names = dict(enumerate(labels))
    config = AutoConfig.for_model(
        family, vocab_size=len(characters), hidden_size=16, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=MAX_POSITIONS, pad_token_id=0, initializer_range=0.3,
        id2label=names, label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.random.set_rng_state(torch_state)
    model.save_pretrained(path)


_MADE: dict[tuple[object, ...], TemporaryDirectory[str]] = {}


def _copied(path: Path, make: Callable[..., None], *given: Any) -> Path:
    """What `make` writes with these arguments: written once a process, and copied, since tests damage what they get."""
    key = (make.__name__, *given)
    if key not in _MADE:
        _MADE[key] = TemporaryDirectory()
        make(Path(_MADE[key].name), *given)
    shutil.copytree(_MADE[key].name, path, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return path

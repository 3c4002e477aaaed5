"""A reward model of another family: a sequence classifier, or a judge, that reads text with a tokenizer of its own.

What it saves: any published reward model serves as it is, smaller than the actor or larger, without a copy of the
actor's layers. What it costs: decoding and tokenising every response again. What it changes: the scores, by what the
two tokenizers make of a text. What it excludes: a critic that starts from the reward model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from fourfold.config.schema import ClassifierSection, RunConfig
from fourfold.memory.attention import use_attention
from fourfold.memory.budget import Budget
from fourfold.memory.offload import Residency
from fourfold.memory.precision import DTYPES, resolve_compute
from fourfold.memory.quantization import quantize
from fourfold.models.classifier import Classifier, TorchClassifier
from fourfold.models.judge import HEAD_TOLERANCE, answer_tokens, is_judge, judge_of
from fourfold.models.loading import device_of, out_of_the_file
from fourfold.models.outside import Outside
from fourfold.models.pretrained import pretrained, without_weights
from fourfold.models.text_reader import Row, TextReader, probe, reader_of
from fourfold.planner.architectures import FAMILIES
from fourfold.planner.compute import causal_attended_tokens, classifier_flops
from fourfold.planner.quantization import QUANTIZED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference that padding may make, relative to the largest score: rounding of the compute type.
PADDING_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Largest change of a score that weights in fewer bits may make, relative to the largest: docs/memory.md has measured.
QUANTIZED_BOUNDS = {"int8": 0.1, "int8_dynamic": 0.2, "nf4": 0.6}
# What `reward.model` may be.
ALLOWED = "a folder with config.json, safetensors and a tokenizer, or a hub id that is cached or reachable"

Kind = Literal["classifier", "judge"]


@dataclass
class TextWork:
    """Rows and tokens that went through the model, in its own tokens, and keys attended to."""

    rows: int = 0
    tokens: int = 0
    attended: int = 0


class External(nn.Module):
    """score = sum over labels of factor x logit, in float32, of texts that `reader` has read.

    Several readings have factors of their own for the same logits.
    """

    residency: Residency | None = None
    outside_torch: Outside | None = None

    def __init__(self, classifier: TorchClassifier, reader: TextReader, *factors: Sequence[float]) -> None:
        super().__init__()
        self.classifier: Classifier = classifier
        self.reader = reader
        self._factors = [torch.tensor(reading, dtype=torch.float32) for reading in factors]
        self._config = classifier.model.config
        looked_up = {id(m.weight) for m in classifier.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in classifier.parameters() if p.ndim >= 2 and id(p) not in looked_up]
        self._matrix_parameters = sum(p.numel() for p in matrices)
        self._work = TextWork()

    @property
    def layers(self) -> list[nn.Module]:
        """What a stream holds two of at a time."""
        return self.classifier.layers if isinstance(self.classifier, TorchClassifier) else []

    def scores(self, rows: Sequence[Row]) -> Float32[Tensor, "batch"]:
        """One number a row: the first reading."""
        return self.readings(rows)[:, 0]

    def readings(self, rows: Sequence[Row]) -> Float32[Tensor, "batch readings"]:
        """What each reading makes of the logits of one pass."""
        lengths = [len(row["input_ids"]) for row in rows]
        self._work.rows += len(rows)
        self._work.tokens += sum(lengths)
        causal = self._config.model_type in FAMILIES
        self._work.attended += causal_attended_tokens(lengths) if causal else sum(n * n for n in lengths)
        logits = self.classifier.logits(self.reader.batch(rows))
        return torch.stack([logits @ factors.to(logits.device) for factors in self._factors], dim=1)

    def take_work(self) -> tuple[TextWork, float]:
        """What went through the model since the last `take_work`, and its FLOPs."""
        work, self._work = self._work, TextWork()
        flops = classifier_flops(
            self._matrix_parameters,
            layers=getattr(self._config, "num_hidden_layers", 0),
            hidden=getattr(self._config, "hidden_size", 0),
            tokens=work.tokens,
            attended_tokens=work.attended,
        )
        return work, flops


def load_external(config: RunConfig, budget: Budget, others: Mapping[str, ClassifierSection] | None = None) -> External:
    """`reward.model` with its tokenizer, in torch; ValueError where a weight, a label or a template is not there.

    `others` differ from `reward` in label alone, and read the same logits; they are given by the keys of their tables.
    """
    settings = config.reward
    device, dtype = placed(config)
    kind = _kind(config)
    model, tokenizer = pretrained(
        _auto_class(kind), _place(config), dtype, given=_given(config), allowed=ALLOWED,
        instead="give a model that was trained to score or to classify texts",
    )  # fmt: skip
    use_attention(model, config.memory.attention, device)
    model.requires_grad_(False).eval()
    cast(nn.Module, model).to(device)
    out_of_the_file(model)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    question = _Question.of(model, tokenizer, config, others or {}, kind)
    if kind == "judge":
        classifier = judge_of(model, tokenizer, question.answers, HEAD_TOLERANCE[dtype], _given(config))
    else:
        classifier = TorchClassifier(model)
        if dtype != torch.float32:
            _keep_head_in_float32(model)
    external = External(classifier, question.reader, *question.factors)
    if settings.residency == "stream" and not external.layers:
        raise ValueError(
            f"reward.residency = 'stream': {type(model).__name__} does not show its layers as one list of "
            f"{getattr(model.config, 'num_hidden_layers', '?')}; allowed: 'keep' or 'park'"
        )
    budget.watch(external.layers)
    verify_padding(external, tolerance=PADDING_TOLERANCE[dtype])
    if config.precision.reward in QUANTIZED:
        quantize_external(external, config.precision.reward)
    external.take_work()
    return external


def check_external(config: RunConfig, others: Mapping[str, ClassifierSection] | None = None) -> None:
    """ValueError where `load_external` would refuse labels, answers, template or length. Weights are not read."""
    kind = _kind(config)
    model, tokenizer = without_weights(_auto_class(kind), _place(config), given=_given(config), allowed=ALLOWED)
    _Question.of(model, tokenizer, config, others or {}, kind)


def weight_bytes(path: str) -> int:
    """Bytes of the weights' files in a folder; 0 where there is no such folder yet."""
    return sum(file.stat().st_size for file in Path(path).expanduser().glob("*.safetensors"))


def placed(config: RunConfig) -> tuple[torch.device, torch.dtype]:
    """Where the model is, and the type of its weights."""
    reward, others = config.reward, device_of(config)
    if reward.engine != "torch":
        return torch.device("cpu"), torch.float32  # what is exported and compared with
    device = torch.device("cpu") if reward.device == "cpu" else others
    held = "auto" if config.precision.reward in QUANTIZED else config.precision.reward
    # What the run computes in says nothing about another kind of device.
    wanted = config.precision.compute if held == "auto" and device.type == others.type else held
    return device, DTYPES[resolve_compute(wanted, device)]


def quantize_external(external: External, kind: str) -> float:
    """Hold the matrices below the head in fewer bits; ValueError beyond the bound.

    Returns the largest change of the probe's scores, relative to the largest of them.
    """
    classifier = external.classifier
    assert isinstance(classifier, TorchClassifier)
    rows = probe(external.reader)
    before = external.readings(rows)
    quantize(classifier.model.base_model, kind)
    gap, bound = relative_gap(external.readings(rows), before), QUANTIZED_BOUNDS[kind]
    if not gap <= bound:
        finer = "" if kind == "int8" else " or 'int8'"
        raise ValueError(
            f"precision.reward = {kind!r}: on a probe, scores change by {gap:.2g} of the largest score (allowed "
            f"{bound:g}); {type(classifier.model).__name__} does not bear it; try 'auto'{finer}"
        )
    return gap


def _given(config: RunConfig) -> str:
    return f"reward.model = {config.reward.model!r}"


def _place(config: RunConfig) -> str:
    path = Path(config.reward.model).expanduser()
    return str(path) if path.exists() else config.reward.model


def _kind(config: RunConfig) -> Kind:
    """A causal language model is a judge; everything else is tried as a sequence classifier."""
    return "judge" if is_judge(_place(config), given=_given(config), allowed=ALLOWED) else "classifier"


def _auto_class(kind: Kind) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if kind == "judge" else AutoModelForSequenceClassification


@dataclass(frozen=True)
class _Question:
    """What is asked of a model: how texts are read, what each of its labels counts in each reading, and, of a judge,
    which tokens the labels are."""

    reader: TextReader
    factors: list[list[float]]
    answers: list[int]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: Any,
        config: RunConfig,
        others: Mapping[str, ClassifierSection],
        kind: Kind,
    ) -> _Question:
        """By the settings; ValueError where this model, or its tokenizer, cannot be asked so. No weight is read."""
        tables: dict[str, ClassifierSection] = {"reward": config.reward, **others}
        if kind == "judge":
            labels = list(dict.fromkeys(name for each in tables.values() for name in each.label))
            answers = answer_tokens(tokenizer, config.reward, labels)
        else:
            named: Any = model.config.id2label
            labels, answers = [str(named[number]) for number in range(len(named))], []
        factors = [_factors(labels, each, f"{key}.label") for key, each in tables.items()]
        return cls(reader_of(model, tokenizer, config.reward), factors, answers)


def _factors(names: Sequence[str], settings: ClassifierSection, key: str) -> list[float]:
    """A factor for each logit, whose label is one of `names`."""
    count = len(names)
    if not settings.label and count == 1:
        return [1.0]
    shown = ", ".join(map(repr, names[:20]))
    if not settings.label:
        raise ValueError(
            f"{key}: not given, but {settings.model!r} has {count} labels; allowed: a factor for some of "
            f"{shown}; try {key} = {{{names[-1]} = 1.0}}"
        )
    for name in settings.label:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{key}: given {name!r}; {hint}labels of {settings.model!r}: {shown}")
    return [settings.label.get(name, 0.0) for name in names]


def _keep_head_in_float32(model: PreTrainedModel) -> None:
    """Rounding a score to bfloat16's 8 bits would make ties of responses that are nearly as good."""
    for child in model.children():
        if child is not model.base_model:
            child.float()
            child.register_forward_pre_hook(lambda _, args: tuple(a.float() for a in args))


def verify_padding(external: External, *, tolerance: float) -> float:
    """Largest difference that a batch makes to the scores of its rows, relative to the largest; ValueError beyond."""
    rows = probe(external.reader)
    alone = torch.cat([external.readings([row]) for row in rows])
    gap = relative_gap(external.readings(rows), alone)
    if not gap <= tolerance:
        raise ValueError(
            f"reward.model: rows with padding are scored otherwise than alone, by {gap:.2e} of the largest score "
            f"(allowed {tolerance:.0e}), or the scores are 0 or not finite; check the weights, and pad_token_id in "
            "config.json"
        )
    return gap


def relative_gap(scores: Tensor, truth: Tensor) -> float:
    """max |scores - truth| / max |truth| over rows; of several readings the largest."""
    return float(((scores - truth).abs().amax(dim=0) / truth.abs().amax(dim=0)).max())

"""A causal language model as a judge: it is asked a question, and what counts is how it would answer.

The template puts prompt and response into a question ("... Is this helpful? Answer:"). The logits of some answers as
the next token are the labels, so that {" yes" = 1.0, " no" = -1.0} is the log odds of the two: the normaliser of the
softmax cancels. What it saves: training a classifier. What it costs: a pass of the whole model but for its language
head, of which only the answers' rows are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from fourfold.config.schema import ClassifierSection
from fourfold.models.classifier import TorchClassifier
from fourfold.models.pretrained import architectures_named, import_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference of the answers' logits from the whole model's, relative to the largest: rounding.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Judge(TorchClassifier):
    """The model below its language head, and the head's rows of the answers in float32."""

    def __init__(self, model: PreTrainedModel, answers: Sequence[int]) -> None:
        super().__init__(model)
        head: Any = model.get_output_embeddings()
        self.rows = nn.Parameter(head.weight[list(answers)].float().clone(), requires_grad=False)
        bias = getattr(head, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias[list(answers)].float().clone(), requires_grad=False)

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor]) -> Float32[Tensor, "batch labels"]:
        """Of the answers as the token after the last one of each row."""
        placed = {name: ids.to(self.model.device) for name, ids in inputs.items()}
        hidden = self.model.base_model(**placed).last_hidden_state
        last = placed["attention_mask"].sum(dim=1) - 1
        read = hidden[torch.arange(len(last), device=last.device), last].float()
        return nn.functional.linear(read, self.rows, self.bias)


def is_judge(place: str, *, given: str, allowed: str) -> bool:
    """Whether a folder or hub id holds a causal language model, by what its config says that it was saved as."""
    import_models()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    named = set(architectures_named(place, given=given, allowed=allowed))
    return bool(named & set(CAUSAL.values()))


def answer_tokens(tokenizer: Any, settings: ClassifierSection, answers: Sequence[str]) -> list[int]:
    """The token of each answer; ValueError where a causal language model cannot be asked by these settings."""
    given = f"reward.model = {settings.model!r} is a causal language model"
    if settings.engine != "torch":
        raise ValueError(f"reward.engine: given {settings.engine!r}, but {given}; allowed beside one: 'torch'")
    if settings.template in ("", "pair", "chat"):
        raise ValueError(
            f"reward.template: given {settings.template!r}, but {given}, which answers what the text ends "
            "with; allowed: a text with {prompt} and {response} and a question; try "
            "'{prompt}{response}\\n\\nIs this helpful? Answer:'"
        )
    if len(answers) < 2:
        raise ValueError(
            f"reward.label: given {len(answers)} answers, but {given}, whose answers are its labels; allowed: a factor "
            'for each of two or more; try reward.label = {" yes" = 1.0, " no" = -1.0}'
        )
    text = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    if text[0][-1] != text[1][-1] or "attention_mask" not in tokenizer.model_input_names:
        raise ValueError(
            f"{given}, and its tokenizer ends every text with {tokenizer.convert_ids_to_tokens(text[0][-1])!r} "
            "or makes no attention mask, so that no answer comes after the question; give another model"
        )
    return [_token(tokenizer, answer, settings) for answer in answers]


def judge_of(model: PreTrainedModel, tokenizer: Any, answers: Sequence[int], tolerance: float, given: str) -> Judge:
    """`model` without its language head but for the rows of its answers; ValueError where those say something else."""
    judge = Judge(model, answers)
    _verify_head(
        judge, tokenizer("is it good? ")["input_ids"], answers, tolerance, f"{given} is a causal language model"
    )
    model.set_output_embeddings(nn.Identity())  # whose rows for all other tokens nothing reads
    return judge


def _token(tokenizer: Any, answer: str, settings: ClassifierSection) -> int:
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"reward.label: given {answer!r}, which is {len(ids)} tokens of {settings.model!r}, a causal language "
            "model; allowed: answers of one token; try a shorter one, with a space in front or without"
        )
    return ids[0]


@torch.no_grad()
def _verify_head(judge: Judge, probe: Sequence[int], answers: Sequence[int], tolerance: float, given: str) -> None:
    """Some families cap or scale logits after the head: their answers would be others."""
    ids = torch.tensor([probe], device=judge.model.device)
    found = judge.logits({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
    truth = judge.model(input_ids=ids).logits[0, -1, list(answers)].float()
    gap = float((found - truth).abs().max() / truth.abs().max())
    if not gap <= tolerance:
        raise ValueError(
            f"{given} whose logits are not those of its language head (by {gap:.2g} of the largest, allowed "
            f"{tolerance:g}): {type(judge.model).__name__} changes them afterwards; give another model"
        )

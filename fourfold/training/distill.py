"""`fourfold distill`: a smaller critic out of a run's reward model, by pruning it and teaching what is left its values.

The reward model says a number at every position of texts of the run's data. Layers that change least are left out
(models/pruning.py), MLPs are narrowed where that is asked for, and the rest learns the numbers of the whole by least
squares at every position (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", with values for logits).
How well it ranks is measured on texts that it has not learned from. The result is a sequence classifier with one label,
in a folder that `critic.model` takes, and so does any library.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.algorithms.statistics import spearman
from fourfold.backends.local import LocalOptimizer
from fourfold.config import check_paths, load_config
from fourfold.config.loading import saved_config
from fourfold.config.schema import OptimizerSection, RunConfig
from fourfold.diagnostics.progress import stage_progress
from fourfold.errors import RunFailed
from fourfold.files import require_empty, whole_folder
from fourfold.memory.budget import BatchSize
from fourfold.models import pruning
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base, load_base
from fourfold.models.roles import Activations, Scorer, make_trainable
from fourfold.models.split import cut_whole
from fourfold.models.storage import load_role
from fourfold.models.whole import classifier_of, whole_model
from fourfold.training.folder import CONFIG, RunFolder, reward_model
from fourfold.training.inputs import encode_inputs, read_records
from fourfold.training.reward_model import Pair, pair_accuracy
from fourfold.training.stage import learn_from
from fourfold.training.supervised import Texts
from fourfold.training.texts import UncachedTexts, draw, epoch_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Say = Callable[[str], None]
Text = tuple[int, ...]
RECORD = "distilled.json"
# Texts on which layers and neurons are measured, and the least that ranks can be compared on.
CALIBRATION, LEAST_HELD_OUT = 64, 8
# Without texts of its own for a test a run gives one in so many.
HELD_OUT_SHARE = 10


@dataclass(frozen=True)
class Wanted:
    """The arguments of `fourfold distill`; 0 is not given."""

    size: float = 1 / 3  # of the reward model's parameters, at most
    layers: int = 0
    mlp: int = 0
    epochs: int = 8
    batch_size: int = 16
    learning_rate: float = 5e-4
    max_texts: int = 0
    lowest: bool = False


@dataclass(frozen=True)
class Ranks:
    """How a smaller critic agrees with the whole one on held-out texts: Spearman's correlations, and the share of the
    variance of the whole one's values that it explains."""

    at_the_end: float
    everywhere: float
    explained: float


@dataclass(frozen=True)
class Distilled:
    """What was made of what."""

    parameters_before: int
    parameters_after: int
    layers_before: int
    kept_layers: list[int]
    block_influence: list[float]
    mlp_width: int
    texts: int
    held_out_texts: int
    optimizer_steps: int
    pruned: Ranks
    distilled: Ranks
    pair_accuracy_before: float | None
    pair_accuracy_after: float | None

    def describe(self) -> list[str]:
        """Lines for the terminal."""
        share = self.parameters_after / self.parameters_before
        lines = [
            f"size: {self.parameters_after:,} of {self.parameters_before:,} parameters ({share:.1%}): layers "
            f"{', '.join(map(str, self.kept_layers))} of {self.layers_before}, MLPs of {self.mlp_width} neurons",
            f"rank correlation with the whole reward model on {self.held_out_texts:,} held-out texts, at their ends: "
            f"{self.pruned.at_the_end:.3f} pruned, {self.distilled.at_the_end:.3f} distilled; at every position: "
            f"{self.pruned.everywhere:.3f} and {self.distilled.everywhere:.3f}",
        ]
        if self.pair_accuracy_before is not None and self.pair_accuracy_after is not None:
            lines.append(
                f"held-out pairs ranked as people do: {self.pair_accuracy_before:.1%} by the whole, "
                f"{self.pair_accuracy_after:.1%} by the smaller one"
            )
        return lines


@dataclass(frozen=True)
class Lessons:
    """Texts to learn from and held-out ones, each once, and held-out pairs, which are among these."""

    texts: list[Text]
    held_out: list[Text]
    pairs: list[Pair]


def distill(target: str, out: str, wanted: Wanted, overrides: Sequence[str], say: Say) -> Distilled:
    """Make the critic of a run, or of a configuration whose reward model is there, and write it to `out`."""
    folder = Path(out).expanduser()
    require_empty(folder)
    config, run = _config_of(target, overrides)
    stored = reward_model(config, run)
    if stored is None:
        raise ValueError(
            f"{target}: reward.source = {config.reward.source!r} has no reward model of the run's own model, which is "
            "what can be made smaller; train one (reward.source = 'train'), or give critic.model a small model"
        )
    base = load_base(config)
    layers = [layer for part in (base.trunk, base.policy.branch) if part is not None for layer in part.layers]
    pruning.require_pruned(wanted.layers, wanted.mlp, layers, base.config)
    lessons = _lessons(config, base, wanted, say)
    teacher = base.new_scorer()
    load_role(stored, teacher, record_for(config, "scorer"))
    every, read = [*lessons.texts, *lessons.held_out], UncachedTexts(base, base.trunk).activations
    truth = dict(zip(every, values_of(teacher.requires_grad_(False), read, every), strict=True))
    model, tokenizer = whole_model(config, base, teacher)
    model.requires_grad_(False)
    before = pruning.size_of(model)
    influence, kept = _prune(model, wanted, lessons.texts, base.pad_id)
    student = _student(model, teacher, base)
    pruned = _ranks(student, lessons.held_out, truth, base)
    steps = _learn(student, lessons.texts, truth, wanted, config, base)
    result = Distilled(
        parameters_before=before,
        parameters_after=pruning.size_of(model),
        layers_before=len(influence),
        kept_layers=kept,
        block_influence=influence,
        mlp_width=int(getattr(model.config, "intermediate_size", 0) or 4 * model.config.hidden_size),
        texts=len(lessons.texts),
        held_out_texts=len(lessons.held_out),
        optimizer_steps=steps,
        pruned=pruned,
        distilled=_ranks(student, lessons.held_out, truth, base),
        pair_accuracy_before=_pair_accuracy(lessons.pairs, truth),
        pair_accuracy_after=_pair_accuracy(lessons.pairs, _said(student, lessons.held_out, base)),
    )
    with whole_folder(folder) as partial:
        classifier_of(model, student, base.pad_id).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


def _config_of(target: str, overrides: Sequence[str]) -> tuple[RunConfig, RunFolder]:
    """The settings and the folder of a run, by the folder or by a configuration that has been run."""
    path = Path(target).expanduser()
    if path.is_dir():
        config = saved_config(path)
        if overrides:
            config = load_config(path / CONFIG, overrides)
        return config, RunFolder(path)
    config = load_config(path, overrides)
    check_paths(config)
    return config, RunFolder(Path(config.output).expanduser())


def _lessons(config: RunConfig, base: Base, wanted: Wanted, say: Say) -> Lessons:
    """All texts of the stages sft and reward: those of pairs, which are what the reward model has learned from, too."""
    everything = config.model_copy(
        update={
            "stages": ("sft", "reward"),
            "sft": config.sft.model_copy(update={"max_texts": 0}),
            "reward": config.reward.model_copy(update={"max_pairs": 0}),
        }
    )
    inputs = encode_inputs(everything, base, read_records(everything), say)
    held = _unique([text for pair in inputs.pairs_test for text in pair], inputs.texts_test)
    texts = _unique([text for pair in inputs.pairs for text in pair], inputs.texts)
    if not held:
        rows = draw(len(texts), len(texts) // HELD_OUT_SHARE, seed=config.seed, name="held out")
        held = [texts[row] for row in rows] if len(texts) >= HELD_OUT_SHARE else []
    apart = set(held)
    texts = [text for text in texts if text not in apart]
    texts = [texts[row] for row in draw(len(texts), wanted.max_texts, seed=config.seed, name="distill")]
    if not texts or len(held) < LEAST_HELD_OUT:
        raise ValueError(
            f"distill: {len(texts)} texts to learn from and {len(held)} held-out ones; allowed: 1 or more, and "
            f"{LEAST_HELD_OUT} or more; give data.texts or data.pairs (--set data.texts.path=...)"
        )
    return Lessons(texts, held, [pair for pair in inputs.pairs_test if min(map(len, pair)) > 1])


def _unique(*sets: Texts) -> list[Text]:
    """Texts of two tokens or more, each once, in their order."""
    return list(dict.fromkeys(tuple(text) for texts in sets for text in texts if len(text) > 1))


def _prune(model: PreTrainedModel, wanted: Wanted, texts: Sequence[Text], pad_id: int) -> tuple[list[float], list[int]]:
    """Leave out layers, and neurons of MLPs where that is asked for; block influences, and which layers are kept."""
    sample = list(pruning.batches(texts[:CALIBRATION], 8, pad_id))
    device = next(model.parameters()).device
    sample = [(ids.to(device), mask.to(device)) for ids, mask in sample]
    whole = pruning.size_of(model)
    influence = pruning.block_influence(model, sample)
    if wanted.mlp:
        pruning.narrow_mlps(model, wanted.mlp, sample)
    count = wanted.layers or pruning.layers_that_fit(model, int(wanted.size * whole))
    if count < 1:
        rest = (pruning.size_of(model) - sum(p.numel() for p in pruning.decoder_layers(model).parameters())) / whole
        raise ValueError(
            f"--size {wanted.size:.3g}: embedding and norm alone are {rest:.1%} of the reward model, and no layer has "
            "room beside them; give a larger --size, or a smaller --mlp"
        )
    kept = list(range(count)) if wanted.lowest else pruning.most_influential(influence, count)
    pruning.keep_layers(model, kept)
    return influence, kept


def _student(model: PreTrainedModel, teacher: Scorer, base: Base) -> Scorer:
    """What is left, with the reward model's head, trained in full: its tensors are the model's."""
    part = cut_whole(model, base.policy.branch.compute_dtype)
    student = Scorer(part, copy.deepcopy(teacher.head)).to(base.budget.device)
    make_trainable(student, with_language_head=False)
    return student.train()


def _learn(
    student: Scorer, texts: Sequence[Text], truth: dict[Text, Tensor], wanted: Wanted, config: RunConfig, base: Base
) -> int:
    """Least squares at every position; returns how many steps were taken."""
    batches = [
        [texts[row] for row in batch]
        for epoch in range(wanted.epochs)
        for batch in epoch_batches([len(text) for text in texts], wanted.batch_size, seed=config.seed, epoch=epoch)
    ]
    settings = OptimizerSection(
        learning_rate=wanted.learning_rate, schedule="cosine", warmup_steps=min(len(batches) // 10, 100)
    )
    optimizer = LocalOptimizer("distilled critic", student, settings, total_steps=len(batches), budget=base.budget)
    size = BatchSize("distill", "critic", wanted.batch_size, base.budget)

    def loss_sum(some: Sequence[Text]) -> Tensor:
        found = values_at(student, *_padded(some, base))
        errors = [(value - truth[text]).square().sum() for value, text in zip(found, some, strict=True)]
        loss = 0.5 * torch.stack(errors).sum()
        if not bool(torch.isfinite(loss)):
            raise RunFailed(f"distill: the loss is {float(loss)}; nothing was written; try a lower --learning-rate")
        return loss

    with stage_progress("distill", len(batches), unit="steps") as progress:
        for batch in batches:
            tokens = sum(len(text) for text in batch)
            loss = learn_from(batch, loss_sum, tokens, optimizer, size)
            progress.advance(1, note=f"squared error {2 * loss:.4f}")
    return len(batches)


def values_at(scorer: Scorer, activations: Activations, ids: Tensor) -> list[Tensor]:
    """Values at every position of each text of a batch: float32 [tokens] each."""
    values, lengths = scorer.head(scorer.through(activations)), activations.mask.sum(dim=1).tolist()
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


@torch.no_grad()
def values_of(
    scorer: Scorer, activations: Callable[[Sequence[Text]], tuple[Activations, Tensor]], texts: Sequence[Text]
) -> list[Tensor]:
    """The same of many texts, in their order."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    found: dict[int, Tensor] = {}
    with stage_progress("distill: values", len(texts), unit="texts") as progress:
        for start in range(0, len(order), 16):
            rows = order[start : start + 16]
            values = values_at(scorer, *activations([texts[row] for row in rows]))
            found |= {row: value.clone() for row, value in zip(rows, values, strict=True)}
            progress.advance(len(rows))
    return [found[row] for row in range(len(texts))]


def _padded(texts: Sequence[Text], base: Base) -> tuple[Activations, Tensor]:
    """Ids as a whole model reads them."""
    [(ids, mask)] = pruning.batches(texts, len(texts), base.pad_id)
    device = base.budget.device
    return Activations(ids.to(device), mask.to(device)), ids


def _said(student: Scorer, texts: Sequence[Text], base: Base) -> dict[Text, Tensor]:
    return dict(zip(texts, values_of(student, lambda some: _padded(some, base), texts), strict=True))


def _ranks(student: Scorer, texts: Sequence[Text], truth: dict[Text, Tensor], base: Base) -> Ranks:
    said = _said(student, texts, base)
    ends = (torch.stack([values[text][-1] for text in texts]) for values in (said, truth))
    found, true = (torch.cat([values[text] for text in texts]) for values in (said, truth))
    explained = 1.0 - float((found - true).var() / true.var())
    return Ranks(spearman(*ends), spearman(found, true), explained)


def _pair_accuracy(pairs: Sequence[Pair], values: dict[Text, Tensor]) -> float | None:
    """Of the values at the ends of the texts; None where there are no pairs."""
    if not pairs:
        return None
    return pair_accuracy([float(values[tuple(a)][-1] - values[tuple(b)][-1]) for a, b in pairs])

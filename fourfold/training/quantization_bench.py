"""`fourfold bench quantization`: what holding a run's reference and reward model in fewer bits does to what they say.

Compared are the whole models (trunk, branch and head), with the matrices of all decoder layers quantised, and the same
as a run holds them otherwise; on held-out texts and pairs of the run, batch by batch in the same process.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from fourfold.algorithms.statistics import spearman
from fourfold.config.schema import RunConfig
from fourfold.data.records import read_pairs, read_prompts, read_texts
from fourfold.diagnostics.tables import visible
from fourfold.memory.budget import tensor_bytes
from fourfold.memory.quantization import library, quantize
from fourfold.models.adapters import is_adapter
from fourfold.models.assembly import record_for
from fourfold.models.llama_roles import BOUND
from fourfold.models.loading import Base, load_base
from fourfold.models.quantized import LOG_PROB_BOUNDS, SCORE_BOUNDS
from fourfold.models.roles import Activations, Policy, Scorer, freeze
from fourfold.models.split import Part
from fourfold.models.storage import load_role
from fourfold.planner.quantization import BY_LLAMA_CPP, BY_ONNX
from fourfold.training.folder import RunFolder
from fourfold.training.inputs import Records, encode_inputs
from fourfold.training.llama_bench import run_by_llama_cpp
from fourfold.training.onnx_bench import run_by_onnx_runtime
from fourfold.training.pipeline import prepare
from fourfold.training.results import load_reference
from fourfold.training.reward_model import Pair
from fourfold.training.supervised import Texts
from fourfold.training.texts import TextCache, draw

ROWS_AT_ONCE = 16
AS_HELD = "as held"
Say = Callable[[str], None]
_Scores = dict[tuple[int, ...], float]  # by text


@dataclass(frozen=True)
class Line:
    """A kind of weights; None where nothing was there to measure, or where it cannot run, as `note` says."""

    kind: str
    reference_bytes: int | None = None  # trunk, branch and head
    reward_bytes: int | None = None
    kl_bias: float | None = (
        None  # mean of log p(as held) - log p(quantised), nats a token: what it adds to a k1 estimate
    )
    log_prob_gap: float | None = None  # mean of its size
    kl_exact: float | None = None  # KL(as held, quantised) over the vocabulary, nats a token
    score_gap: float | None = None  # mean |difference|, in standard deviations of the scores as held
    score_rank_correlation: float | None = None  # Spearman's
    pair_accuracy: float | None = None
    speed: float | None = None  # tokens a second of the reference, relative to as held
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was measured, the weights as held first."""

    model: str
    held: str
    texts: int
    tokens: int
    pairs: int
    lines: tuple[Line, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Models:
    """Reference and reward model over a trunk."""

    trunk: Part | None
    policy: Policy
    scorer: Scorer | None

    def quantized(self, kind: str) -> _Models:
        """Copies with quantised decoder layers."""
        library(kind)  # a missing one is named before anything is copied
        other = copy.deepcopy(self)
        for part in (other.trunk, other.policy.branch, None if other.scorer is None else other.scorer.branch):
            if part is not None:
                quantize(nn.ModuleList(part.layers), kind, but=is_adapter)
        return other

    def inputs(self, ids: Activations) -> Activations:
        """What the branches read."""
        return ids if self.trunk is None else Activations(self.trunk(ids.inputs, ids.mask), ids.mask)

    def bytes_of(self, role: nn.Module | None) -> int | None:
        """Of a role with its trunk."""
        parts = [part for part in (self.trunk, role) if part is not None]
        return None if role is None else tensor_bytes(p for part in parts for p in part.parameters())


class _Batches:
    """Padded ids of texts, those of similar length together."""

    def __init__(self, base: Base, texts: Texts) -> None:
        self._pad = TextCache(replace(base, trunk=None)).activations
        self.texts = sorted({tuple(text) for text in texts}, key=lambda text: (len(text), text))

    def __iter__(self) -> Iterator[Activations]:
        for start in range(0, len(self.texts), ROWS_AT_ONCE):
            yield self._pad(self.texts[start : start + ROWS_AT_ONCE])[0]


def bench_quantization(config: RunConfig, kinds: Sequence[str], rows: int, say: Say) -> Report:
    """Measure every kind on up to `rows` texts and as many pairs."""
    plain = {"frozen": "auto", "reference": "auto", "reward": "auto"}
    config = prepare(config.model_copy(update={"precision": config.precision.model_copy(update=plain)}))
    base = load_base(config)
    models = _models(config, base)
    texts, pairs = _data(config, base, rows, say)
    batches = _Batches(base, [text for text in texts if len(text) > 1])
    scored = _Batches(base, [*texts, *(text for pair in pairs for text in pair)])
    before = _scores(models, scored)
    lines = [
        Line(
            AS_HELD,
            reference_bytes=models.bytes_of(models.policy),
            reward_bytes=models.bytes_of(models.scorer),
            pair_accuracy=_accuracy(before, pairs),
            speed=1.0,
        )
    ]
    for kind in kinds:
        say(f"measuring {kind}")
        try:
            make = _llama_line if kind in BY_LLAMA_CPP else _onnx_line if kind in BY_ONNX else _line
            line, after = make(kind, config, base, models, batches, scored)
            line = _with_scores(line, before, after, pairs)
            lines.append(replace(line, note="; ".join(filter(None, (line.note, _beyond(line))))))
        except (ValueError, RuntimeError) as error:
            lines.append(Line(kind, note=f"cannot run here: {str(error).splitlines()[0]}"))
    tokens = sum(len(text) - 1 for text in batches.texts)
    held = str(models.policy.branch.compute_dtype).removeprefix("torch.")
    return Report(config.model.path, held, len(batches.texts), tokens, len(pairs), tuple(lines))


def _models(config: RunConfig, base: Base) -> _Models:
    """The reference and reward model of the run as far as its stages have made them; the base model otherwise."""
    folder = RunFolder(Path(config.output).expanduser())
    policy, scorer = load_reference(config, base, folder), None
    freeze(policy)
    if (stored := _reward_model(config, folder)) is not None:
        scorer = base.new_scorer()
        load_role(stored, scorer, record_for(config, "scorer"))
        freeze(scorer)
    return _Models(base.trunk, policy, scorer)


def _reward_model(config: RunConfig, folder: RunFolder) -> Path | None:
    """Where there is one already."""
    if config.reward.stored:
        return Path(config.reward.stored).expanduser()
    trained = config.reward.trains and folder.finished("reward") is not None
    return folder.model("reward") if trained else None


def _data(config: RunConfig, base: Base, rows: int, say: Say) -> tuple[Texts, list[Pair]]:
    """Held-out texts and pairs; training data, chosen texts and prompts where there are no held-out texts."""
    data = config.data
    texts, pairs, prompts = (
        data.texts_test or data.texts,
        data.pairs_test or data.pairs,
        data.prompts_test or data.prompts,
    )
    records = Records(
        texts=[],
        texts_test=[] if texts is None else read_texts(texts),
        pairs=[],
        pairs_test=[] if pairs is None else read_pairs(pairs),
        prompts=[],
        prompts_test=[] if texts or pairs or prompts is None else read_prompts(prompts),
    )
    found = encode_inputs(config, base, records, say)
    chosen = [pair[0] for pair in found.pairs_test]
    every = found.texts_test or chosen or found.prompts_test
    if not every:
        raise ValueError("nothing to measure on; give data.texts_test, data.pairs_test or data.prompts_test")
    taken = [every[row] for row in draw(len(every), rows, seed=config.seed, name="bench texts")]
    some = draw(len(found.pairs_test), rows, seed=config.seed, name="bench pairs")
    return taken, [found.pairs_test[row] for row in some]


def _line(
    kind: str, config: RunConfig, base: Base, models: _Models, batches: _Batches, scored: _Batches
) -> tuple[Line, _Scores]:
    """Without the scores' errors; and the scores."""
    other = models.quantized(kind)
    differences, exact, speed = _compare(models, other, batches)
    line = Line(
        kind,
        reference_bytes=other.bytes_of(other.policy),
        reward_bytes=other.bytes_of(other.scorer),
        kl_bias=-float(differences.mean()),
        log_prob_gap=float(differences.abs().mean()),
        kl_exact=float(exact.mean()),
        speed=speed,
    )
    return line, _scores(other, scored)


def _llama_line(
    kind: str, config: RunConfig, base: Base, models: _Models, batches: _Batches, scored: _Batches
) -> tuple[Line, _Scores]:
    """The same by llama.cpp, whose speed includes the head, as that of torch beside it does."""
    with run_by_llama_cpp(kind, config, base, models.policy, models.scorer) as engines:
        differences, exact, speed = engines.compare(models.policy, ((ids, models.inputs(ids)) for ids in batches))
        tuned = kind == "gguf" and RunFolder(Path(config.output).expanduser()).finished("sft") is not None
        line = Line(
            kind,
            reference_bytes=engines.policy.file.stat().st_size,
            reward_bytes=None if engines.scorer is None else engines.scorer.file.stat().st_size,
            kl_bias=-float(differences.mean()),
            log_prob_gap=float(differences.abs().mean()),
            kl_exact=float(exact.mean()),
            speed=speed,
            note="the model before sft" if tuned else "",
        )
        if models.scorer is None or engines.scorer is None:
            return line, {}
        return line, dict(zip(scored.texts, engines.scores(models.scorer, scored), strict=True))


def _onnx_line(
    kind: str, config: RunConfig, base: Base, models: _Models, batches: _Batches, scored: _Batches
) -> tuple[Line, _Scores]:
    """The reward model by ONNX Runtime; the reference runs by torch only."""
    if models.scorer is None:
        return Line(kind, note="runs reward models alone, and there is none yet"), {}
    last = {text[-1] for text in scored.texts}
    with run_by_onnx_runtime(kind, config, base, models.scorer, last) as engine:
        scores, seconds, as_held = list[float](), 0.0, 0.0
        for index, ids in enumerate(scored):
            if index == 0:  # the first pass of an engine pays for what later ones find ready
                engine.scores(ids)
            started = time.perf_counter()
            models.scorer.scores(models.inputs(ids))
            between = time.perf_counter()
            scores += engine.scores(ids)
            as_held += between - started
            seconds += time.perf_counter() - between
        line = Line(kind, reward_bytes=engine.bytes, speed=as_held / seconds)
    return line, dict(zip(scored.texts, scores, strict=True))


def _with_scores(line: Line, before: _Scores, after: _Scores, pairs: Sequence[Pair]) -> Line:
    if not after:
        return line
    old, new = (torch.tensor([scores[text] for text in before]) for scores in (before, after))
    return replace(
        line,
        score_gap=float((new - old).abs().mean() / old.std()),
        score_rank_correlation=spearman(old, new),
        pair_accuracy=_accuracy(after, pairs),
    )


def _beyond(line: Line) -> str:
    """Whether a run would be refused with these errors, were they those on its probe."""
    measured = {
        "log-probs": (line.log_prob_gap, LOG_PROB_BOUNDS.get(line.kind, BOUND)),
        # llama.cpp runs no reward model, and ONNX Runtime has been compared with torch on a probe of its own.
        "scores": (line.score_gap, SCORE_BOUNDS.get(line.kind, math.inf)),
    }
    over = [f"{what} beyond {bound:g}" for what, (gap, bound) in measured.items() if gap is not None and gap > bound]
    return ", ".join(over)


@torch.no_grad()
def _compare(models: _Models, other: _Models, batches: _Batches) -> tuple[Tensor, Tensor, float]:
    """log p(quantised) - log p(as held) of every token, the exact KL there, and the quantised one's relative speed."""
    differences, exact, seconds = [], [], [0.0, 0.0]
    for index, ids in enumerate(batches):
        mask, compute = ids.mask[:, 1:], models.policy.branch.compute_dtype
        hidden = []
        for which, each in enumerate((models, other)):
            if index == 0:
                _states(each, ids)  # the first pass of a model pays for what later ones find ready
            started = time.perf_counter()
            hidden.append(_states(each, ids)[:, :-1][mask])
            seconds[which] += time.perf_counter() - started
        labels = ids.inputs[:, 1:][mask]
        head = models.policy.head
        held, quantized = (head.log_probs(each, labels, 1.0, compute, entropy="none")[0] for each in hidden)
        differences.append(quantized - held)
        exact.append(head.full_kl(hidden[0], head, hidden[1], 1.0, (compute, compute)))
    return torch.cat(differences), torch.cat(exact), seconds[0] / seconds[1]


def _states(models: _Models, ids: Activations) -> Tensor:
    inputs = models.inputs(ids)
    hidden = models.policy.branch(inputs.inputs, inputs.mask)
    if hidden.device.type == "cuda":
        torch.cuda.synchronize(hidden.device)  # seconds are those of the work, not of queueing it
    return hidden


@torch.no_grad()
def _scores(models: _Models, batches: _Batches) -> _Scores:
    """By text; empty without a reward model."""
    if models.scorer is None:
        return {}
    scores = [score for ids in batches for score in models.scorer.scores(models.inputs(ids)).tolist()]
    return dict(zip(batches.texts, scores, strict=True))


def _accuracy(scores: _Scores, pairs: Sequence[Pair]) -> float | None:
    """Share of pairs whose chosen text has the higher score; a tie counts half."""
    if not scores or not pairs:
        return None
    margins = [scores[tuple(chosen)] - scores[tuple(rejected)] for chosen, rejected in pairs]
    return sum((margin > 0) + 0.5 * (margin == 0) for margin in margins) / len(margins)


def table(report: Report) -> Table:
    """The report for people."""
    title = f"{report.model}: {report.texts} texts of {report.tokens:,} tokens, {report.pairs} pairs"
    made = Table(title=title, box=SIMPLE_HEAD)
    made.add_column("weights", no_wrap=True)
    for column in (
        "reference MiB",
        "reward MiB",
        "KL bias",
        "|d log p|",
        "KL",
        "|d score|",
        "rank corr.",
        "pairs",
        "speed",
    ):
        made.add_column(column, justify="right")
    made.add_column("note", overflow="fold")
    for line in report.lines:
        name = f"{report.held} (as held)" if line.kind == AS_HELD else line.kind
        sizes = (None if size is None else size / 2**20 for size in (line.reference_bytes, line.reward_bytes))
        cells = [_cell(size, ",.1f") for size in sizes]
        cells += [_cell(line.kl_bias, "+.4f"), *(_cell(gap, ".4f") for gap in (line.log_prob_gap, line.kl_exact))]
        cells += [_cell(line.score_gap, ".4f"), _cell(line.score_rank_correlation, ".4f")]
        cells += [_cell(line.pair_accuracy, ".1%"), _cell(line.speed, ".2f")]
        made.add_row(name, *cells, visible(line.note))
    return made


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

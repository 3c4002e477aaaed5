"""The passes of a PPO step, one role's micro-batch at a time, and what is alive in each stage of them.

Each function runs on a tape for the depths that it is given and returns its stages; weights, states and what the rest of
the run holds are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fourfold.planner.footprint import head as heads
from fourfold.planner.footprint import ops
from fourfold.planner.footprint.attention import Cache
from fourfold.planner.footprint.depth import Stages, at_depth
from fourfold.planner.footprint.form import Batch, Form
from fourfold.planner.footprint.parts import Part
from fourfold.planner.footprint.roles import Role
from fourfold.planner.footprint.tape import Tape, Value, Weight


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of prompts and responses: rows, tokens of the longest, and whether some are shorter."""

    rows: int
    prompt: int
    response: int
    padded: bool

    @property
    def whole(self) -> Batch:
        """All tokens."""
        return Batch.full(self.rows, self.prompt + self.response, self.padded)

    @property
    def states(self) -> Batch:
        """Without the last token, whose state belongs to no action."""
        return Batch.full(self.rows, self.prompt + self.response - 1, self.padded)


def _head_weight(role: Role, part: Part) -> Weight:
    head = role.head
    assert head is not None
    return part.table if role.tied else Weight(head.numbers, head.width, trained=head.trained)


def _inputs(t: Tape, form: Form, texts: Texts, below: int) -> Value | None:
    """The rows of a micro-batch: ids, or a copy of what the trunk has given (`below` bytes a number)."""
    tokens, hidden = texts.whole.tokens, form.architecture.hidden
    return None if form.embedding else t.empty(tokens * hidden, below, "trunk cache")


def _without_last(t: Tape, inputs: Value | None, form: Form, batch: Batch) -> Value | None:
    if inputs is None:
        return None
    return Value(batch.tokens * form.architecture.hidden, inputs.width, inputs.storage)


@lru_cache(maxsize=4096)
def scored(role: Role, texts: Texts, below: int, trunk: Form | None = None) -> Stages:
    """A pass without gradients: log-probs of a policy over the states, values or scores over all tokens.

    `trunk` is one that the role passes ids through, `below` the width of cached activations.
    """

    def run(layers: int, trunk_layers: int) -> Stages:
        t, form = Tape(grad=False), replace(role.form, layers=layers)
        part, batch = Part(form), texts.whole if role.scalar else texts.states
        inputs = _inputs(t, form, texts, below) if trunk is None else None
        t.meter.stage("layers")
        x = _without_last(t, inputs, form, batch)
        if trunk is not None:
            x = Part(replace(trunk, layers=trunk_layers)).forward(t, batch)
        hidden = part.forward(t, batch, x)
        del x
        t.meter.stage("head")
        numbers = texts.rows * texts.response
        if role.head is None:
            heads.values(t, hidden, form.architecture.hidden, Weight(form.architecture.hidden, 4, trained=False))
        else:
            rows = heads.picked(t, hidden, numbers * form.architecture.hidden)
            del hidden
            heads.log_probs(t, rows, _head_weight(role, part), role.head, "none")
        return t.meter.stages

    return _both_depths(run, role.form, trunk)


def _both_depths(run, form: Form, trunk: Form | None) -> Stages:
    """Straight lines in the layers of both parts."""
    period = form.checkpoint_every if form.checkpointing != "none" else 1
    if trunk is None:
        return at_depth(lambda layers: run(layers, 0), form.layers, period)
    return at_depth(
        lambda layers: at_depth(lambda under: run(layers, under), trunk.layers, period), form.layers, period
    )


@lru_cache(maxsize=4096)
def sampled(role: Role, trunk: Form | None, texts: Texts, keeps: bool) -> Stages:
    """Decoding a batch of rows: the prompts' pass, and the last token's above full caches.

    `keeps`: the trunk's output is written into a cache that is counted elsewhere.
    """
    assert role.head is not None
    head, a = role.head, role.form.architecture

    def run(layers: int, trunk_layers: int) -> Stages:
        t = Tape(grad=False)
        branch = Part(replace(role.form, layers=layers))
        under = Part(replace(trunk, layers=trunk_layers)) if trunk is not None else None
        caches = Cache(), Cache()
        t.meter.stage("prompts")
        batch = Batch.full(texts.rows, texts.prompt, texts.padded)
        x = under.forward(t, batch, None, caches[0]) if under is not None else None
        hidden = branch.forward(t, batch, x, caches[1])
        heads.sample(t, texts.rows, head)
        del hidden, x
        for cache, part in ((caches[0], under), (caches[1], branch)):
            keys = texts.prompt + texts.response - 2
            widths = {index: (k.width, v.width) for index, (k, v) in cache.held.items()}
            cache.held.clear()
            if part is None:
                continue
            numbers = texts.rows * keys * a.kv_heads * a.head_dim
            for index, (k, v) in widths.items():
                cache.held[index] = t.empty(numbers, k, "KV cache"), t.empty(numbers, v, "KV cache")
        t.meter.stage("last token")
        batch = Batch(texts.rows, 1, texts.prompt + texts.response - 1, texts.padded)
        x = under.forward(t, batch, None, caches[0]) if under is not None else None
        hidden = branch.forward(t, batch, x, caches[1])
        heads.sample(t, texts.rows, head)
        return t.meter.stages

    return _both_depths(run, role.form, trunk)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How a role learns: `present` where an earlier micro-batch has left gradients, `keep` where they stay."""

    present: bool
    keep: bool
    entropy: str = "report"


# Tensors of [rows, response] that a loss makes and keeps (algorithms/losses.py).
LOSS_TENSORS = 14


@lru_cache(maxsize=4096)
def learned(role: Role, texts: Texts, below: int, lesson: Lesson, trunk: Form | None = None) -> Stages:
    """A micro-batch's forward and backward pass; gradients that it makes are among what is alive."""

    def run(layers: int, trunk_layers: int) -> Stages:
        t, form = Tape(grad=True, present=lesson.present), replace(role.form, layers=layers)
        if not lesson.keep:
            t.collect = lambda weight, gradient: None
        part, batch = Part(form), texts.states
        inputs = _inputs(t, form, texts, below) if trunk is None else None
        t.meter.stage("forward")
        x = _without_last(t, inputs, form, batch)
        if trunk is not None:
            t.grad = False
            x = Part(replace(trunk, layers=trunk_layers)).forward(t, batch)
            t.grad = True
        hidden = part.forward(t, batch, x)
        del x
        t.meter.stage("head")
        numbers = texts.rows * texts.response
        if role.head is None:
            scalar = Weight(form.architecture.hidden, 4, trained=True)
            read = ops.view(t, hidden, numbers * form.architecture.hidden)
            del hidden
            out = heads.values(t, read, form.architecture.hidden, scalar)
            del read
        else:
            rows = heads.picked(t, hidden, numbers * form.architecture.hidden)
            del hidden
            out = heads.log_probs(t, rows, _head_weight(role, part), role.head, lesson.entropy)
            del rows
        loss = t.storage(LOSS_TENSORS * 4 * numbers)
        root = out.node
        assert root is not None
        del out
        t.backward(root, t.storage(4 * numbers))
        del loss
        return t.meter.stages

    return _both_depths(run, role.form, trunk)

"""The passes of a PPO step, one role's micro-batch at a time, and what is alive in each stage of them.

Each function runs on a tape for a few layers and returns the stages for all; weights, states and what the rest of the
run holds are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from fourfold.planner.footprint import head as heads
from fourfold.planner.footprint import ops
from fourfold.planner.footprint.attention import Cache
from fourfold.planner.footprint.depth import BELOW, Line, Stages, at_depth
from fourfold.planner.footprint.form import Batch, Form
from fourfold.planner.footprint.parts import Part
from fourfold.planner.footprint.roles import Role
from fourfold.planner.footprint.tape import Tape, Value, Weight

# Tensors of [rows, response] that a loss makes and keeps (algorithms/losses.py).
LOSS_TENSORS = 14
remembered = lru_cache(maxsize=4096)


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

    @property
    def answers(self) -> int:
        """Response tokens."""
        return self.rows * self.response


@dataclass(frozen=True, slots=True)
class Below:
    """What a role reads: ids (of no width), the trunk's cached output, or ids through a trunk that it stands on."""

    cached: int = 0
    trunk: Form | None = None
    learns: bool = False  # whether the trunk gets a gradient

    def inputs(self, t: Tape, texts: Texts, batch: Batch, hidden: int, layers: int) -> Value | None:
        """What the branch is given: None for ids."""
        if self.trunk is not None:
            before, t.grad = t.grad, t.grad and self.learns
            out = Part(replace(self.trunk, layers=layers)).forward(t, batch)
            t.grad = before
            return out
        if not self.cached:
            return None
        rows = t.empty(texts.whole.tokens * hidden, self.cached, "trunk cache")  # a copy of those of the micro-batch
        return Value(batch.tokens * hidden, self.cached, rows.storage)


def _stages(t: Tape) -> Stages:
    """What was alive at most in each stage that has a name."""
    named = {stage: kinds for stage, kinds in t.meter.stages.items() if stage}
    found: Stages = {stage: {kind: Line(size) for kind, size in kinds.items()} for stage, kinds in named.items()}
    below = sum(max(t.below.stages.values(), key=lambda kinds: sum(kinds.values()), default={}).values())
    return {**found, BELOW: {"activations": Line(below)}} if below else found


def _for_all_layers(run: Callable[[int, int], Stages], form: Form, trunk: Form | None) -> Stages:
    """Straight lines in the layers of both parts."""
    period = form.checkpoint_every if form.checkpointing != "none" else 1
    if trunk is None:
        return at_depth(lambda layers: run(layers, 0), form.layers, period)
    return at_depth(
        lambda layers: at_depth(lambda under: run(layers, under), trunk.layers, period), form.layers, period
    )


def _head_weight(role: Role, part: Part) -> Weight:
    head = role.head
    assert head is not None
    return part.table if role.tied else Weight(head.numbers, head.width, trained=head.trained)


def _states(t: Tape, role: Role, part: Part, texts: Texts, hidden: Value) -> Value:
    """Hidden states before each response token."""
    return heads.picked(t, hidden, texts.answers * role.form.architecture.hidden)


def _without_gradients(form: Form) -> Form:
    """The same in every pass that keeps nothing for a backward one: what levers do to that one makes no difference."""
    return replace(form, checkpointing="none", checkpoint_every=1, offload=False)


def scored(role: Role, texts: Texts, below: Below) -> Stages:
    """A pass without gradients: log-probs of a policy over the states, values or scores over all tokens."""
    trunk = None if below.trunk is None else _without_gradients(below.trunk)
    alike = replace(role, name="", own_head=False, form=_without_gradients(role.form))
    return _scored(alike, texts, replace(below, trunk=trunk, learns=False))


@remembered
def _scored(role: Role, texts: Texts, below: Below) -> Stages:

    def run(layers: int, trunk_layers: int) -> Stages:
        t, form = Tape(grad=False), replace(role.form, layers=layers)
        part, batch = Part(form), texts.whole if role.scalar else texts.states
        t.meter.stage("layers")
        x = below.inputs(t, texts, batch, form.architecture.hidden, trunk_layers)
        hidden, rows = part.forward(t, batch, x), x if below.cached else None
        del x
        t.meter.stage("head")
        if role.head is None:
            heads.values(t, hidden, role.numbers, size=form.architecture.hidden, trained=False)
        else:
            states = _states(t, role, part, texts, hidden)
            del hidden
            heads.log_probs(t, states, _head_weight(role, part), role.head, "none")
        del rows
        return _stages(t)

    return _for_all_layers(run, role.form, below.trunk)


def sampled(role: Role, trunk: Form | None, texts: Texts) -> Stages:
    """Decoding a batch of rows: the prompts' pass, and the last token's, above caches with room for all tokens."""
    alike = replace(role, name="", own_head=False, form=_without_gradients(role.form))
    return _sampled(alike, None if trunk is None else _without_gradients(trunk), texts)


@remembered
def _sampled(role: Role, trunk: Form | None, texts: Texts) -> Stages:
    assert role.head is not None
    head = role.head

    def run(layers: int, trunk_layers: int) -> Stages:
        t, branch = Tape(grad=False), Part(replace(role.form, layers=layers))
        under = Part(replace(trunk, layers=trunk_layers)) if trunk is not None else None
        caches = [Cache(each, texts.rows, texts.prompt + texts.response) for each in (trunk_layers, layers)]

        def token(batch: Batch) -> None:
            x = under.forward(t, batch, None, caches[0]) if under is not None else None
            hidden = branch.forward(t, batch, x, caches[1])
            heads.sample(t, texts.rows, head)
            del hidden, x

        t.meter.stage("prompts")
        token(Batch.full(texts.rows, texts.prompt, texts.padded))
        keys = texts.prompt + texts.response - 1
        t.meter.stage("last token")
        token(Batch(texts.rows, 1, keys, texts.padded))
        return _stages(t)

    return _for_all_layers(run, role.form, trunk)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How roles learn: `present` where an earlier micro-batch has left gradients, `keep` where those made stay."""

    present: bool
    keep: bool
    entropy: str = "report"

    def tape(self) -> Tape:
        """To learn on."""
        return Tape(grad=True, present=self.present, keep=self.keep)


@remembered
def learned(role: Role, texts: Texts, below: Below, lesson: Lesson) -> Stages:
    """A micro-batch's forward and backward pass; gradients that it makes are among what is alive."""

    def run(layers: int, trunk_layers: int) -> Stages:
        t, form = lesson.tape(), replace(role.form, layers=layers)
        part, batch = Part(form), texts.states
        t.meter.stage("forward")
        x = below.inputs(t, texts, batch, form.architecture.hidden, trunk_layers)
        rows = x if below.cached else None  # the micro-batch's own, which stay until its end
        hidden = [part.forward(t, batch, x)]
        del x
        t.meter.stage("head")
        out = _opinion(t, role, part, texts, hidden.pop(), lesson.entropy)
        numbers = 4 * texts.answers * role.numbers.outputs
        loss, root = t.storage(LOSS_TENSORS * numbers), out.node
        assert root is not None
        del out
        t.backward(root, t.storage(numbers))
        del loss, rows
        return _stages(t)

    return _for_all_layers(run, role.form, below.trunk)


def _opinion(t: Tape, role: Role, part: Part, texts: Texts, hidden: Value, entropy: str) -> Value:
    """Log-probs or values of the responses."""
    size = role.form.architecture.hidden
    if role.head is None:
        before = ops.view(t, hidden, texts.answers * size)
        return heads.values(t, before, role.numbers, size=size, trained=True)
    states = _states(t, role, part, texts, hidden)
    del hidden
    return heads.log_probs(t, states, _head_weight(role, part), role.head, entropy)


@remembered
def joint(actor: Role, critic: Role, trunk: Form, texts: Texts, lesson: Lesson) -> Stages:
    """One pass over a trained trunk for both; the trunk's two gradients are made apart (training/joint.py)."""

    def run(layers: int, trunk_layers: int) -> Stages:
        t, batch = lesson.tape(), texts.states
        # A critic of fewer layers has these whatever the actor is extended from.
        fewer = critic.form.layers if critic.form.layers != actor.form.layers else layers
        parts = [Part(replace(actor.form, layers=layers)), Part(replace(critic.form, layers=fewer))]
        t.meter.stage("forward")
        shared = Part(replace(trunk, layers=trunk_layers)).forward(t, batch)
        doors = [ops.Anchor(t, shared) for _ in parts]
        features = [parts[0].forward(t, batch, doors[0].value)]
        value_features = parts[1].forward(t, batch, doors[1].value)
        t.meter.stage("heads")
        values = _opinion(t, critic, parts[1], texts, value_features, "none")
        log_probs = _opinion(t, actor, parts[0], texts, features.pop(), lesson.entropy)
        numbers = [4 * texts.answers * role.numbers.outputs for role in (critic, actor)]
        loss, roots = t.storage(LOSS_TENSORS * sum(numbers)), (values.node, log_probs.node)
        del values, log_probs
        for name, root, size in zip(("critic", "actor"), roots, numbers, strict=True):
            assert root is not None
            t.meter.stage(f"{name} backward")
            t.backward(root, t.storage(size))
        del value_features, loss
        bottom, given = shared.node, [door.taken.pop() for door in doors]
        assert bottom is not None
        for name, gradient in zip(("actor", "critic"), given, strict=True):
            t.meter.stage(f"trunk backward for the {name}")
            t.retain = name == "actor"
            t.backward(bottom, gradient)
        return _stages(t)

    return _for_all_layers(run, actor.form, trunk)


@remembered
def compared(actor: Role, reference: Role, texts: Texts, below: tuple[Below, Below]) -> Stages:
    """The exact KL of both policies over the vocabulary: half a chunk of logits of each at a time."""
    assert actor.head is not None and reference.head is not None

    def run(layers: int, trunk_layers: int) -> Stages:
        t, batch, states = Tape(grad=False), texts.states, []
        for role, under in zip((actor, reference), below, strict=True):
            t.meter.stage(f"layers of the {role.name}")
            depth = layers if role.form.layers == actor.form.layers else role.form.layers
            part = Part(replace(role.form, layers=depth))
            hidden = part.forward(t, batch, under.inputs(t, texts, batch, role.form.architecture.hidden, trunk_layers))
            states.append(_states(t, role, part, texts, hidden))
            del hidden
        t.meter.stage("head")
        assert actor.head is not None and reference.head is not None
        heads.full_kl(t, texts.answers, actor.head, reference.head)
        return _stages(t)

    return _for_all_layers(run, actor.form, below[0].trunk)

"""Who is made of what: the parts and heads of the four roles as `fourfold.models.assembly` puts them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.planner.architectures import Architecture
from fourfold.planner.footprint.form import Attention, Form, Lora
from fourfold.planner.footprint.head import HeadForm
from fourfold.planner.number_head import ONE_NUMBER, NumberHead
from fourfold.planner.quantization import QUANTIZED, matrix_bytes
from fourfold.planner.scene import WIDTHS, Scene

# Families whose linear layers transformers stores transposed: those are not narrowed where bfloat16 would hold them.
TRANSPOSED = ("gpt2",)


@dataclass(frozen=True, slots=True)
class Role:
    """A role's own layers, its head, and what they are held in; `own_head`: no other role has it too.

    The policy of step 0 that is held beside another prior is a second "reference", which `step_0` tells from the first.
    """

    name: str
    form: Form
    head: HeadForm | None = None
    own_head: bool = False
    tied: bool = False  # the head is the part's own table
    of_the_base: bool = True  # made of the run's own model
    numbers: NumberHead = ONE_NUMBER  # of a critic or reward model
    step_0: bool = False

    @property
    def scalar(self) -> bool:
        """A critic or reward model."""
        return self.head is None

    def own_bytes(self) -> int:
        """Bytes of the weights that no other role holds."""
        shared_base = self.form.lora is not None
        own = lora_numbers(self.form) * self.form.lora.width if self.form.lora else 0
        own += 0 if shared_base else part_bytes(self.form)
        if self.head is not None and self.own_head and not self.tied:
            own += self.head.numbers * self.head.width
        return own + (4 * self.numbers.numbers(self.form.architecture.hidden) if self.scalar else 0)

    def trained_numbers(self) -> int:
        """Parameters with a gradient."""
        a, form = self.form.architecture, self.form
        scalar = self.numbers.numbers(a.hidden) if self.scalar else 0
        if form.lora is not None:
            return lora_numbers(form) + scalar
        if not form.trained:
            return 0
        layers = a.parameters_of(form.start, form.start + form.layers)
        return layers + _ends(form) + self._own_head_numbers() + scalar

    def _own_head_numbers(self) -> int:
        head = self.head
        return head.numbers if head is not None and head.trained and not self.tied else 0

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """Of the trained parameters that are matrices: numbers in each, and how many there are of that size."""
        a, form, lora, scalar = self.form.architecture, self.form, self.form.lora, self._number_matrices()
        if lora is not None:
            on = [each for each in form.linears() if lora.on(each.name)]
            return [*((lora.rank * size, each.count) for each in on for size in each[1:3]), *scalar]
        if not form.trained:
            return []
        found = [(each.numbers, each.count) for each in form.linears()]
        places = a.learned_positions * a.hidden
        found += [(size, int(form.embedding)) for size in (a.embedding_parameters - places, places)]
        head = self._own_head_numbers()
        return [*found, (head, int(head > 0)), *scalar]

    def matrix_numbers(self) -> int:
        """Of the trained ones, those in matrices that autocast rounds for products; adapters stay as they are."""
        if self.form.lora is not None:
            return 0
        return sum(size * count for size, count in self.matrix_sizes()) - sum(n for n, _ in self._number_matrices())

    def _number_matrices(self) -> list[tuple[int, int]]:
        return [(size, 1) for size in self.numbers.matrices(self.form.architecture.hidden)] if self.scalar else []

    def largest(self) -> int:
        """Numbers of the largest trained parameter."""
        return max((size for size, count in self.matrix_sizes() if count), default=0)


def _ends(form: Form) -> int:
    a = form.architecture
    return (a.embedding_parameters if form.embedding else 0) + (a.final_norm_parameters if form.norm else 0)


def part_bytes(form: Form) -> int:
    """Bytes of a part's own weights, adapters left out."""
    a, stop = form.architecture, form.start + form.layers
    vectors = a.parameters_of(form.start, stop) - a.matrices_of(form.start, stop)
    table = a.embedding_parameters * form.table if form.embedding else 0
    norm = a.final_norm_parameters if form.norm else 0
    return matrix_bytes_of(form) + (vectors + norm) * form.vectors + table


def matrix_bytes_of(form: Form) -> int:
    """Of the matrices of all its layers."""
    if not form.quantized:
        return form.architecture.matrices_of(form.start, form.start + form.layers) * form.matrices
    return sum(each.count * matrix_bytes(form.quantized, each.outputs, each.inputs) for each in form.linears())


def lora_numbers(form: Form) -> int:
    """Numbers of a part's adapters: rank x (outputs + inputs) a linear layer, and DoRA's lengths."""
    lora = form.lora
    assert lora is not None
    on = [each for each in form.linears() if lora.on(each.name)]
    dora = int(lora.dora)
    return sum(each.count * (lora.rank * (each.outputs + each.inputs) + dora * each.outputs) for each in on)


@dataclass(frozen=True, slots=True)
class Cast:
    """All that is held: the trunk (frozen, and the trained copy of it) and the roles that this process holds."""

    trunk: Form | None
    trained_trunk: Form | None
    actor: Role
    critic: Role
    reference: Role | None  # None: uniform
    step_0: Role | None
    rewards: tuple[Role, ...]
    shared_head: HeadForm | None

    def roles(self) -> tuple[Role, ...]:
        """Those that there are."""
        return (self.actor, self.critic, *self.frozen())

    def frozen(self) -> tuple[Role, ...]:
        """Those of them that only score."""
        return (*(role for role in (self.reference, self.step_0) if role is not None), *self.rewards)


def cast_of(scene: Scene) -> Cast:
    """The roles of a scene."""
    config, a = scene.config, scene.base
    mode, depth = config.sharing.mode, _depth(scene)
    shared = mode != "none"
    plain, head = _plain(scene, depth), _head(scene)
    trunk = _trunk(scene, plain, depth) if depth else None
    trained_trunk = None
    if trunk is not None and mode == "trunk" and config.trunk.train:
        trained_trunk = replace(_learning(scene, trunk), matrices=4, vectors=4, trained=True)
    own, learner = plain, replace(_learning(scene, plain), trained=True, table_trained=depth == 0)
    if mode == "adapters":
        held = _width(config.precision.frozen, plain.compute)
        own = replace(plain, matrices=held, vectors=plain.compute, table=held, quantized=_quantized(scene))
        lora = Lora(config.adapters.rank, config.adapters.targets, config.adapters.dora)
        learner = replace(_learning(scene, own), lora=lora)
    tied = a.tied_embeddings and not shared
    actor = Role("actor", learner, head, own_head=not shared, tied=tied)
    critic = _critic(scene, learner, depth)
    if config.memory.optimizer_residency == "offload":
        actor, critic = (_narrowed(role) if role.form.lora is None else role for role in (actor, critic))
    return Cast(
        trunk=trunk,
        trained_trunk=trained_trunk,
        actor=actor,
        critic=critic,
        reference=_reference(scene, own, head, lora=learner.lora, tied=tied),
        step_0=_step_0(scene, own, head, tied=tied),
        rewards=tuple(_rewards(scene, own)),
        shared_head=head if shared and not a.tied_embeddings else None,
    )


def _critic(scene: Scene, learner: Form, depth: int) -> Role:
    """The layers that the actor learns with, the lowest of them, or a model of its own."""
    config = scene.config
    form = replace(learner, compute=_width(config.precision.critic, learner.compute))
    if config.critic.layers:
        layers = max(min(config.critic.layers, scene.base.layers) - depth, 0)
        form = replace(form, layers=layers, above=scene.base.layers - depth - layers)
    if (a := scene.models.get("critic")) is not None:
        form = replace(
            form, architecture=a, layers=a.layers, embedding=True, trained=True, table_trained=True, lora=None,
            matrices=4, vectors=4, table=4, quantized="",
        )  # fmt: skip
    return Role("critic", form, numbers=NumberHead.of_critic(config))


def _plain(scene: Scene, depth: int) -> Form:
    """The layers above a trunk of `depth`, in float32."""
    return Form(
        architecture=scene.base,
        layers=scene.base.layers - depth,
        embedding=depth == 0,
        norm=True,
        compute=WIDTHS[scene.compute],
        attention=_attention(scene),
        cuda=not scene.on_cpu,
    )


def _head(scene: Scene) -> HeadForm:
    """The language head of the actor."""
    a, compute, shared = scene.base, WIDTHS[scene.compute], scene.config.sharing.mode != "none"
    frozen = _width(scene.config.precision.frozen, compute)
    return HeadForm(
        vocabulary=a.vocabulary,
        hidden=a.embedding_width or a.hidden,
        compute=compute,
        width=frozen if shared else 4,
        product=_product(scene, scene.compute),
        softcap=a.family == "gemma2",
        trained=not shared,
        in_pieces=shared and frozen != compute,
        cuda=not scene.on_cpu,
    )


def _trunk(scene: Scene, plain: Form, depth: int) -> Form:
    """The frozen layers below, all of them in the type of `precision.frozen`."""
    width = _width(scene.config.precision.frozen, plain.compute)
    trunk = replace(
        plain, layers=depth, embedding=True, norm=False, compute=width, matrices=width, vectors=width, table=width,
        quantized=_quantized(scene),
    )  # fmt: skip
    if scene.config.sharing.mode != "trunk" or not scene.config.trunk.train:
        return trunk
    exact = plain.compute == 4 and _narrows(scene.base, scene.stored_in("base"))
    return replace(trunk, vectors=4, matrices=2 if exact else width)


def _learning(scene: Scene, form: Form) -> Form:
    """With what is kept, forgotten or moved of its activations."""
    memory = scene.config.memory
    return replace(
        form,
        checkpointing=memory.checkpointing,
        checkpoint_every=memory.checkpoint_every,
        offload=memory.activation_offload,
    )


def _narrows(a: Architecture, stored: str) -> bool:
    """Whether frozen float32 matrices are held in bfloat16 because that is the same numbers."""
    return stored == "bfloat16" and a.family not in TRANSPOSED


def _quantized(scene: Scene) -> str:
    held = scene.config.precision.frozen
    return held if held in QUANTIZED else ""


def _depth(scene: Scene) -> int:
    """Layers of the trunk."""
    config, layers = scene.config, scene.base.layers
    if config.sharing.mode == "trunk":
        return max(layers - config.trunk.branch_layers, 0)
    own = config.adapters.layers
    return layers - own if config.sharing.mode == "adapters" and 0 < own < layers else 0


def _width(held: str, compute: int) -> int:
    return WIDTHS.get(held, compute)


def _attention(scene: Scene) -> Attention:
    """What 'auto' comes to; Gemma 2 caps its scores, which no fused kernel does."""
    wanted = scene.config.memory.attention
    if wanted == "eager" or scene.base.family == "gemma2":
        return "eager"
    return "sdpa_wide" if wanted == "auto" and scene.on_cpu else "sdpa"


def _product(scene: Scene, kind: str) -> int:
    """Logits are multiplied in float32 where a CPU has no instructions for the half precision."""
    return WIDTHS[kind] if not scene.on_cpu or scene.cluster.device.multiplies(kind) else 4


def _narrowed(role: Role) -> Role:
    """Above masters below the device: its trained matrices have the compute type."""
    compute, head = role.form.compute, role.head
    if head is not None and head.trained:
        head = replace(head, width=compute)
    return replace(role, form=replace(role.form, matrices=compute, table=compute), head=head)


def _held(scene: Scene, held: str) -> int:
    """The width that a frozen role computes in: a float type is that too."""
    return _width(held, WIDTHS[scene.compute])


def _reference(scene: Scene, own: Form, head: HeadForm, *, lora: Lora | None, tied: bool) -> Role | None:
    """A policy of the base or a model of its own, frozen; one that moves; None: uniform. `lora` is the actor's."""
    config, held = scene.config, scene.config.precision.reference
    if config.reference.kind == "uniform":
        return None
    if config.reference.kind == "moving":  # float32 as the actor's masters, and cast for every product
        form = own if lora is None else replace(own, lora=replace(lora, trained=False))
        alone = config.sharing.mode == "none"
        return Role("reference", form, replace(head, trained=False), own_head=alone, tied=tied)
    compute = _held(scene, held)
    if "reference" in scene.models:
        a = scene.models["reference"]
        form = replace(
            own, architecture=a, layers=a.layers, embedding=True, lora=None, compute=compute,
            quantized=held if held in QUANTIZED else "",
            matrices=compute, table=compute, vectors=4,
        )  # fmt: skip
        head = replace(
            head,
            vocabulary=a.vocabulary,
            hidden=a.hidden,
            in_pieces=False,
            width=compute,
            compute=compute,
            trained=False,
        )
        return Role("reference", form, head, own_head=True, tied=a.tied_embeddings, of_the_base=False)
    return _of_the_base(scene, own, head, held, tied=tied)


def _step_0(scene: Scene, own: Form, head: HeadForm, *, tied: bool) -> Role | None:
    """The actor as it is at step 0, where it is held beside another prior."""
    if not scene.config.reference.holds_step_0:
        return None
    return _of_the_base(scene, own, head, "auto", tied=tied, step_0=True)


def _of_the_base(scene: Scene, own: Form, head: HeadForm, held: str, *, tied: bool, step_0: bool = False) -> Role:
    """A frozen policy of the run's own model."""
    config, compute = scene.config, _held(scene, held)
    exact = "sft" not in config.stages and not config.sft.checkpoint and scene.stored_in("base") == "bfloat16"
    exact = exact and (step_0 or not config.reference.checkpoint)
    form = _frozen(own, scene, held, exact=exact)
    width = (form.table if tied else compute) if head.trained else head.width
    product = _product(scene, held if held in WIDTHS else scene.compute)
    pieces = head.in_pieces and width != compute
    head = replace(head, trained=False, compute=compute, width=width, product=product, in_pieces=pieces)
    return Role("reference", form, head, own_head=config.sharing.mode == "none", tied=tied, step_0=step_0)


def _rewards(scene: Scene, own: Form) -> Iterator[Role]:
    """A reward model of the base, and classifiers whose architecture is known and that torch runs."""
    settings, held = scene.config.reward, scene.config.precision.reward
    if settings.of_the_base:
        yield Role("reward", _frozen(own, scene, held, exact=False))
    width, quantized = _held(scene, held), held if held in QUANTIZED else ""
    for key, a in scene.classifiers.items():
        given = settings.classifiers[key]
        form = Form(
            architecture=a, layers=a.layers, embedding=True, norm=True, compute=4, matrices=width, vectors=width,
            table=width, cuda=not scene.on_cpu and given.device != "cpu", quantized=quantized,
        )  # fmt: skip
        if given.engine == "torch":
            yield Role("reward", form, of_the_base=False)


def _frozen(own: Form, scene: Scene, held: str, *, exact: bool) -> Form:
    """How `freeze` and `hold_narrowly` leave a role: matrices in its type, or in bfloat16 where that is exact."""
    compute = _held(scene, held)
    if scene.config.sharing.mode == "adapters":
        given = scene.config.adapters
        width = 4 if compute == WIDTHS[scene.compute] else compute
        lora = Lora(given.rank, given.targets, given.dora, trained=False, width=width)
        return replace(own, compute=compute, lora=lora)
    narrow = 2 if exact and compute == 4 else compute
    matrices = compute if own.architecture.family in TRANSPOSED else narrow
    return replace(own, compute=compute, matrices=matrices, table=narrow, quantized=held if held in QUANTIZED else "")

"""Who is made of what: the parts and heads of the four roles as `fourfold.models.assembly` puts them together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.planner.architectures import Architecture
from fourfold.planner.footprint.form import Attention, Form, Lora
from fourfold.planner.footprint.head import HeadForm
from fourfold.planner.quantization import QUANTIZED, matrix_bytes
from fourfold.planner.scene import WIDTHS, Scene

# Families whose linear layers transformers stores transposed: those are not narrowed where bfloat16 would hold them.
TRANSPOSED = ("gpt2",)


@dataclass(frozen=True, slots=True)
class Role:
    """A role's own layers, its head, and what they are held in; `own_head`: no other role has it too."""

    name: str
    form: Form
    head: HeadForm | None = None
    own_head: bool = False
    tied: bool = False  # the head is the part's own table

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
        return own + (4 * (self.form.architecture.hidden + 1) if self.scalar else 0)

    def trained_numbers(self) -> int:
        """Parameters with a gradient."""
        a, form = self.form.architecture, self.form
        scalar = a.hidden + 1 if self.scalar else 0
        if form.lora is not None:
            return lora_numbers(form) + scalar
        if not form.trained:
            return 0
        head = self.head.numbers if self.head is not None and self.head.trained and not self.tied else 0
        return form.layers * a.layer_parameters + _ends(form) + head + scalar

    def matrix_sizes(self) -> list[tuple[int, int]]:
        """Of the trained parameters that are matrices: numbers in each, and how many there are of that size."""
        a, form = self.form.architecture, self.form
        layers = linear_layers(a)
        if form.lora is not None:
            both = [(form.lora.rank * size, form.layers) for n, o, i in layers if form.lora.on(n) for size in (o, i)]
            return [*both, (a.hidden, int(self.scalar))]
        if not form.trained:
            return []
        found = [(outputs * inputs, form.layers) for _, outputs, inputs in layers]
        found += [(a.vocabulary * a.hidden, int(form.embedding)), (a.learned_positions * a.hidden, int(form.embedding))]
        head = self.head is not None and self.head.trained and not self.tied
        return [*found, (a.vocabulary * a.hidden, int(head)), (a.hidden, int(self.scalar))]

    def matrix_numbers(self) -> int:
        """Of the trained ones, those in matrices that autocast rounds for products; adapters stay as they are."""
        if self.form.lora is not None:
            return 0
        return sum(size * count for size, count in self.matrix_sizes()) - self.form.architecture.hidden * self.scalar

    def largest(self) -> int:
        """Numbers of the largest trained parameter."""
        return max((size for size, count in self.matrix_sizes() if count), default=0)


def layer_matrices(a: Architecture) -> int:
    """Numbers in matrices of one layer."""
    return a.attention_matrix_parameters + a.mlp_matrix_parameters


def _ends(form: Form) -> int:
    a = form.architecture
    return (a.embedding_parameters if form.embedding else 0) + (a.final_norm_parameters if form.norm else 0)


def part_bytes(form: Form) -> int:
    """Bytes of a part's own weights, adapters left out."""
    a = form.architecture
    matrices = layer_matrices(a)
    vectors = (a.layer_parameters - matrices) * form.vectors
    table = a.embedding_parameters * form.table if form.embedding else 0
    norm = a.final_norm_parameters * form.vectors if form.norm else 0
    return form.layers * (layer_matrix_bytes(form) + vectors) + table + norm


def layer_matrix_bytes(form: Form) -> int:
    """Of one layer's matrices."""
    if not form.quantized:
        return layer_matrices(form.architecture) * form.matrices
    return sum(matrix_bytes(form.quantized, outs, ins) for _, outs, ins in linear_layers(form.architecture))


def linear_layers(a: Architecture) -> list[tuple[str, int, int]]:
    """Name, outputs and inputs of each linear layer of a decoder layer."""
    q, kv, h, inner = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden, a.intermediate
    if a.family == "gpt2":
        return [("c_attn", 3 * h, h), ("c_proj", h, h), ("c_fc", inner, h), ("c_proj", h, inner)]
    if a.family == "gpt_neox":
        return [("query_key_value", 3 * h, h), ("dense", h, h), ("dense_h_to_4h", inner, h), ("dense_4h_to_h", h, inner)]
    attention = [("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)]
    gate = [("gate_proj", inner, h)] if a.gated_mlp else []
    return [*attention, *gate, ("up_proj", inner, h), ("down_proj", h, inner)]


def lora_numbers(form: Form) -> int:
    """Numbers of a part's adapters: rank x (outputs + inputs) a linear layer, and DoRA's lengths."""
    lora = form.lora
    assert lora is not None
    on = [(outs, ins) for name, outs, ins in linear_layers(form.architecture) if lora.on(name)]
    return form.layers * sum(lora.rank * (outs + ins) + (outs if lora.dora else 0) for outs, ins in on)


@dataclass(frozen=True, slots=True)
class Cast:
    """All that is held: the trunk (frozen, and the trained copy of it) and the roles that this process holds."""

    trunk: Form | None
    trained_trunk: Form | None
    actor: Role
    critic: Role
    reference: Role
    reward: Role | None
    shared_head: HeadForm | None

    def roles(self) -> tuple[Role, ...]:
        """Those that there are."""
        return tuple(role for role in (self.actor, self.critic, self.reference, self.reward) if role is not None)


def cast_of(scene: Scene) -> Cast:
    """The roles of a scene."""
    config, a = scene.config, scene.base
    mode, precision = config.sharing.mode, config.precision
    compute = WIDTHS[scene.compute]
    shared = mode != "none"
    depth = _depth(scene)
    frozen = _width(precision.frozen, compute)
    trained_trunk = mode == "trunk" and config.trunk.train
    quantized = precision.frozen if precision.frozen in QUANTIZED else ""
    attention = _attention(scene)
    plain = Form(
        architecture=a,
        layers=a.layers - depth,
        embedding=depth == 0,
        norm=True,
        compute=compute,
        attention=attention,
        cuda=not scene.on_cpu,
    )
    head = HeadForm(
        vocabulary=a.vocabulary,
        hidden=a.hidden,
        compute=compute,
        width=frozen if shared else 4,
        product=_product(scene, scene.compute),
        softcap=a.family == "gemma2",
        trained=not shared,
        in_pieces=shared and frozen != compute,
        cuda=not scene.on_cpu,
    )
    trunk = None
    if depth:
        trunk = replace(
            plain, layers=depth, embedding=True, norm=False, compute=frozen,
            matrices=frozen, vectors=4 if trained_trunk else frozen, table=frozen, quantized=quantized,
        )  # fmt: skip
        if trained_trunk and compute == 4 and scene.stored_in("base") == "bfloat16" and a.family not in TRANSPOSED:
            trunk = replace(trunk, matrices=2)
    learns = {
        "checkpointing": config.memory.checkpointing,
        "checkpoint_every": config.memory.checkpoint_every,
        "offload": config.memory.activation_offload,
    }
    if mode == "adapters":
        own = replace(plain, matrices=frozen, vectors=compute, table=frozen, quantized=quantized)
        lora = Lora(config.adapters.rank, config.adapters.targets, config.adapters.dora)
        learner = replace(own, lora=lora, **learns)
    else:
        own = plain
        learner = replace(plain, trained=True, table_trained=depth == 0, **learns)
    tied = a.tied_embeddings and not shared
    actor = Role("actor", learner, head, own_head=not shared, tied=tied)
    critic = Role("critic", learner)
    if config.memory.optimizer_residency == "offload" and mode != "adapters":
        actor, critic = _narrowed(actor, compute), _narrowed(critic, compute)
    return Cast(
        trunk=trunk,
        trained_trunk=_trained_trunk(trunk, learns) if trunk is not None and trained_trunk else None,
        actor=actor,
        critic=critic,
        reference=_reference(scene, own, head, tied),
        reward=_reward(scene, own),
        shared_head=None if not shared or (a.tied_embeddings and (depth or mode == "adapters")) else head,
    )


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
    capped = scene.base.family == "gemma2"
    return "eager" if scene.config.memory.attention == "eager" or capped else "sdpa"


def _product(scene: Scene, kind: str) -> int:
    """Logits are multiplied in float32 where a CPU has no instructions for half (AVX-512 has those for bfloat16)."""
    return 4 if scene.on_cpu and kind == "float16" else WIDTHS[kind]


def _narrowed(role: Role, compute: int) -> Role:
    """Above masters below the device: its trained matrices have the compute type."""
    head = role.head
    if head is not None and head.trained:
        head = replace(head, width=compute)
    return replace(role, form=replace(role.form, matrices=compute, table=compute), head=head)


def _trained_trunk(trunk: Form, learns: dict) -> Form:
    return replace(trunk, matrices=4, vectors=4, trained=True, table_trained=False, **learns)


def _reference(scene: Scene, own: Form, head: HeadForm, tied: bool) -> Role:
    """The actor as it is at step 0, or a model of its own, frozen."""
    config = scene.config
    held = config.precision.reference
    compute = _width(held, WIDTHS[scene.compute]) if held not in QUANTIZED else WIDTHS[scene.compute]
    if "reference" in scene.models:
        a = scene.models["reference"]
        own = replace(own, architecture=a, layers=a.layers, embedding=True, lora=None, quantized="")
        head = replace(head, vocabulary=a.vocabulary, hidden=a.hidden, in_pieces=False, width=compute, trained=False)
        form = replace(own, compute=compute, matrices=compute, table=compute, vectors=4)
        return Role("reference", form, head, own_head=True, tied=a.tied_embeddings)
    exact = "sft" not in config.stages and scene.stored_in("base") == "bfloat16"
    form = frozen(own, scene, compute, held, exact=exact)
    width = head.width
    if head.trained:
        width = form.table if tied else compute
    pieces = head.in_pieces and width != compute
    head = replace(head, trained=False, compute=compute, width=width, product=_product(scene, held if held in WIDTHS else scene.compute), in_pieces=pieces)
    return Role("reference", form, head, own_head=config.sharing.mode == "none", tied=tied)


def _reward(scene: Scene, own: Form) -> Role | None:
    """A reward model of the base, or a classifier whose architecture is known."""
    config = scene.config
    held = config.precision.reward
    compute = _width(held, WIDTHS[scene.compute]) if held not in QUANTIZED else WIDTHS[scene.compute]
    if config.reward.of_the_base:
        return Role("reward", frozen(own, scene, compute, held, exact=False))
    if config.reward.source == "model" and "reward" in scene.models and config.reward.engine == "torch":
        a = scene.models["reward"]
        width = _width(config.reward.compute, WIDTHS[scene.compute])
        form = Form(
            architecture=a, layers=a.layers, embedding=True, norm=True, compute=4, matrices=width, vectors=width,
            table=width, cuda=not scene.on_cpu and config.reward.device != "cpu",
        )  # fmt: skip
        return Role("reward", form)
    return None


def frozen(own: Form, scene: Scene, compute: int, held: str, *, exact: bool) -> Form:
    """How `freeze` and `hold_narrowly` leave a role: matrices in the compute type, or in bfloat16 where that is exact."""
    if scene.config.sharing.mode == "adapters":
        lora = scene.config.adapters
        width = 4 if compute == WIDTHS[scene.compute] else compute
        return replace(own, compute=compute, lora=Lora(lora.rank, lora.targets, lora.dora, trained=False, width=width))
    narrow = 2 if exact and compute == 4 else compute
    matrices = compute if own.architecture.family in TRANSPOSED else narrow
    quantized = held if held in QUANTIZED else ""
    return replace(own, compute=compute, matrices=matrices, table=narrow, quantized=quantized)

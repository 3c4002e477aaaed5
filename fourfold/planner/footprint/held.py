"""What is held between the passes: weights, masters, optimizer states, where each of them is, and the experience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.planner.bill import MOMENTS, Item, Moment, Tier
from fourfold.planner.footprint.form import Form
from fourfold.planner.footprint.passes import Texts
from fourfold.planner.footprint.roles import Cast, Role, lora_numbers, part_bytes
from fourfold.planner.quantization import GGUF_BYTES, QUANTIZED
from fourfold.planner.scene import WIDTHS, Scene

ALWAYS = frozenset(MOMENTS)
AFTER_LOAD = ALWAYS - {Moment("load")}
# bitsandbytes: tensors of fewer numbers keep float32 moments; others one byte a moment and a float32 scale for 256.
SMALL_8BIT, BLOCK_8BIT = 4096, 256


def weights(scene: Scene, cast: Cast) -> Iterator[Item]:
    """Of the roles and of what they share."""
    if cast.trunk is not None:
        yield Item("trunk", "weights", part_bytes(cast.trunk), ALWAYS, why=_of_part(cast.trunk))
    if scene.config.sharing.mode == "adapters":
        yield Item("base", "weights", part_bytes(cast.actor.form), ALWAYS, why=_of_part(cast.actor.form))
    if cast.shared_head is not None:
        head = cast.shared_head
        why = f"language head: {head.vocabulary:,} x {head.hidden:,} x {head.width} bytes"
        yield Item("trunk" if cast.trunk is not None else "base", "weights", head.numbers * head.width, ALWAYS, why=why)
    if cast.trained_trunk is not None:
        form = cast.trained_trunk
        numbers = form.architecture.parameters_of(0, form.layers)
        yield Item("trunk", "masters", 4 * numbers, ALWAYS, why=f"trained copy: {numbers:,} parameters x 4 bytes")
    for role in (cast.actor, cast.critic):
        yield from _trained_weights(scene, role)
    for role in cast.frozen():
        yield from _frozen_weights(scene, cast, role)


def _of_part(form: Form) -> str:
    a = form.architecture
    held = form.quantized or f"{form.matrices} bytes a number"
    layers = a.parameters_of(form.start, form.start + form.layers)
    said = f"{form.layers} of {a.layers} layers with {layers:,} parameters, matrices in {held}"
    return said + (f"; embedding {a.embedding_parameters:,} x {form.table} bytes" if form.embedding else "")


def _trained_weights(scene: Scene, role: Role) -> Iterator[Item]:
    size, numbers = role.own_bytes(), role.trained_numbers()
    masters = role.form.compute != 4 and size >= 4 * numbers
    why = f"{numbers:,} trained parameters x 4 bytes"
    if size < 4 * numbers:
        why = f"{role.matrix_numbers():,} in matrices of the compute type, vectors in float32; masters lie below"
    yield Item(role.name, "masters" if masters else "weights", size, ALWAYS, why=why)


def _shared_bytes(cast: Cast) -> int:
    """Of trunk or base, and of the language head above them."""
    head = cast.shared_head.numbers * cast.shared_head.width if cast.shared_head is not None else 0
    base = part_bytes(cast.actor.form) if cast.actor.form.lora is not None else 0
    return head + base + (part_bytes(cast.trunk) if cast.trunk is not None else 0)


def _frozen_weights(scene: Scene, cast: Cast, role: Role) -> Iterator[Item]:
    """Where the residency puts them: kept, parked but in its moment, streamed there, on the host, or elsewhere."""
    residency = getattr(scene.config, role.name).residency
    engine = scene.config.reference.engine
    if role.name == "reference" and engine != "torch" and not role.step_0:
        numbers = scene.models.get("reference", scene.base).parameters()
        why = f"GGUF: {numbers:,} parameters x {GGUF_BYTES[engine]:g} bytes"
        if residency != "service":
            size = round(numbers * GGUF_BYTES[engine])
            yield Item(role.name, "weights", size, ALWAYS, "device" if scene.on_cpu else "host", why=why)
        return
    size, why = role.own_bytes(), _of_part(role.form) + (", the policy of step 0" if role.step_0 else "")
    own_moment = frozenset({Moment("score", role.name)})
    below: Tier = "disk" if scene.on_cpu else "host"
    if residency == "keep":
        yield Item(role.name, "weights", size, ALWAYS, why=why)
    elif residency == "park":
        yield Item(role.name, "weights", size, own_moment, why=f"parked but in its moment: {why}")
        yield Item(role.name, "weights", size, ALWAYS, below, why=f"parked: {why}")
    elif residency == "stream":
        layer = _layer_bytes(role.form)
        rest = max(size - role.form.layers * layer, 0)
        said = f"streamed: two layers of {layer:,} bytes and {rest:,} that are in no layer"
        yield Item(role.name, "weights", rest + 2 * layer, own_moment, why=said)
        yield Item(role.name, "weights", size, ALWAYS, below, why=f"streamed from here: {why}")
    elif residency == "cpu":
        size += _shared_bytes(cast)
        yield Item(
            role.name, "weights", size, ALWAYS, "host", why=f"computes there, with a copy of what is shared: {why}"
        )


def _layer_bytes(form: Form) -> int:
    """Of the largest layer's own weights."""
    if form.lora is not None:
        return lora_numbers(form) // max(form.layers, 1) * form.lora.width
    one = replace(form, layers=1, embedding=False, norm=False)
    return part_bytes(one)


def sampler_copy(scene: Scene, cast: Cast) -> Iterator[Item]:
    """The policy in the compute type, from whose masters no token could be sampled quickly (rollout/local.py)."""
    role, compute = cast.actor, WIDTHS[scene.compute]
    kind, trunk = scene.config.sampling.weights, cast.trunk
    quantised = kind in QUANTIZED
    if role.form.lora is not None or (not quantised and (compute == 4 or role.form.matrices != 4)):
        return
    matrices = role.matrix_numbers()
    size = matrices * compute + (role.trained_numbers() - matrices) * 4
    moments = frozenset({Moment("generate", "actor")})
    why = f"{matrices:,} numbers in matrices x {compute} bytes, vectors in float32"
    if quantised:
        narrow = replace(role.form, trained=False, matrices=compute)
        size -= part_bytes(narrow) - part_bytes(replace(narrow, quantized=kind))
        trunk = replace(trunk, quantized=kind) if trunk is not None else None
        why = f"matrices of decoder layers in {kind}, {why}"
    if cast.trained_trunk is not None:
        size += part_bytes(trunk) if trunk is not None else 0
        why += ", and the trunk with it"
    yield Item("actor", "weights", size, moments, why=f"the sampler's copy: {why}")


@dataclass(frozen=True, slots=True)
class Trained:
    """Who is trained: parameters, those of them in matrices, and sizes of matrices with how many there are of each."""

    name: str
    numbers: int
    matrices: int
    half: bool  # whether products run in half precision
    sizes: list[tuple[int, int]]

    def moments(self, optimizer: str) -> int:
        """Bytes of both of Adam's."""
        if "8bit" not in optimizer:
            return 8 * self.numbers
        large = [(size, count) for size, count in self.sizes if size >= SMALL_8BIT]
        rounded = sum(count * (2 * size + 8 * -(-size // BLOCK_8BIT)) for size, count in large)
        return rounded + 8 * (self.numbers - sum(size * count for size, count in large))


def trained(cast: Cast) -> list[Trained]:
    """Actor and critic, and the trunk where it is trained."""
    roles = (cast.actor, cast.critic)
    found = [
        Trained(r.name, r.trained_numbers(), r.matrix_numbers(), r.form.compute != 4, r.matrix_sizes()) for r in roles
    ]
    if cast.trained_trunk is not None:
        form = cast.trained_trunk
        sizes = [(each.numbers, each.count) for each in form.linears()]
        numbers = form.architecture.parameters_of(0, form.layers)
        found.append(Trained("trunk", numbers, sum(size * count for size, count in sizes), form.compute != 4, sizes))
    return found


def optimizer(scene: Scene, cast: Cast) -> Iterator[Item]:
    """Adam's moments of everything that is trained, and what lies below the device with them."""
    config = scene.config
    residency = config.memory.optimizer_residency
    below: Tier = "disk" if scene.on_cpu else "host"
    for each in trained(cast):
        section = config.critic if each.name == "critic" else config.ppo
        name, size = each.name, each.moments(section.optimizer)
        how = "2 bytes and scales" if "8bit" in section.optimizer else "8 bytes (two float32 moments)"
        why = f"{each.numbers:,} parameters x {how}"
        if section.optimizer.startswith("paged"):
            yield Item(name, "optimizer", size, AFTER_LOAD, "host", why=f"paged by the driver: {why}")
            continue
        if residency == "keep":
            yield Item(name, "optimizer", size, AFTER_LOAD, why=why)
            continue
        yield Item(name, "optimizer", size, AFTER_LOAD, below, why=why)
        if residency == "offload":
            yield from _masters_below(each, below)


def _masters_below(of: Trained, below: Tier) -> Iterator[Item]:
    """Float32 masters of what the device holds in half precision, and the sums of gradients."""
    yield Item(of.name, "gradients", 4 * of.numbers, AFTER_LOAD, below, why=f"sums: {of.numbers:,} x 4 bytes")
    if of.half:
        why = f"{of.matrices:,} numbers in matrices x 4 bytes"
        yield Item(of.name, "masters", 4 * of.matrices, AFTER_LOAD, below, why=why)


def experience(scene: Scene, cast: Cast, texts: Texts) -> Iterator[Item]:
    """The rollout and what is made of it, row by row (batch.py), and the trunk's cached activations."""
    tokens, response = texts.rows * (texts.prompt + texts.response), texts.rows * texts.response
    sampling, learning = _of_phase("generate"), _of_phase("learn")
    scoring = _of_phase("score")
    rollout = 9 * tokens + 4 * 2 * response
    yield Item("run", "experience", 2 * rollout + 8 * response, sampling, why="ids, masks, log-probs, random numbers")
    more = 4 * (cast.critic.numbers.outputs - 1) * response  # of each further value, and its reward and return
    opinions = rollout + 20 * response + more
    yield Item("run", "experience", opinions, scoring, why="the rollout and five opinions a token")
    copies = 2 * rollout + 52 * response + 4 * more
    yield Item("run", "experience", copies, learning, why="the rollout, its opinions, and both selected for learning")
    trunk = cast.trunk
    if trunk is None or cast.trained_trunk is not None:
        return
    size = trunk_cache(trunk, texts)
    why = f"{tokens:,} tokens x {trunk.architecture.hidden:,} x {trunk.compute} bytes"
    yield Item("trunk", "trunk cache", size, scoring, why=why)
    yield Item("trunk", "trunk cache", 2 * size, learning, why=f"whole, and selected for learning: {why}")


def trunk_cache(trunk: Form, texts: Texts) -> int:
    """Bytes of a trunk's output for all tokens of a rollout."""
    return texts.whole.tokens * trunk.architecture.hidden * trunk.compute


def _of_phase(phase: str) -> frozenset[Moment]:
    return frozenset(moment for moment in MOMENTS if moment.phase == phase)

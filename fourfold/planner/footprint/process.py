"""What a run takes besides its tensors, and what loading takes for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fourfold.planner.bill import MOMENTS, Item, Moment
from fourfold.planner.footprint.held import SMALL_8BIT, trained, weights
from fourfold.planner.footprint.roles import Cast, Role, part_bytes
from fourfold.planner.quantization import QUANTIZED
from fourfold.planner.scene import WIDTHS, Scene

LOAD = Moment("load")
# At most so many decoder layers are there in floats while a model is quantised (tests/models/test_stored.py).
STORED_LAYERS = 3
# Resident memory of a run on the CPU besides its tensors: Python 3.11, torch 2.13.0+cpu, transformers 5.24.0, on x86-64
# Linux (benchmarks/planner.py measures it anew).
INTERPRETER = 445 * 2**20
# On a GPU: CUDA's context and the libraries' workspaces, which torch's allocator does not see. Not measured here.
CUDA_CONTEXT = 600 * 2**20


def framework(scene: Scene) -> Iterator[Item]:
    """Interpreter and libraries, in the memory of the CPU, and on a GPU its context."""
    moments = frozenset(MOMENTS)
    why = "interpreter and libraries, as measured with torch 2.13 and transformers 5.24"
    yield Item("run", "framework", INTERPRETER, moments, "device" if scene.on_cpu else "host", why=why)
    if not scene.on_cpu:
        yield Item("run", "framework", CUDA_CONTEXT, moments, why="CUDA's context and workspaces, assumed")


def loading(scene: Scene, cast: Cast) -> Iterator[Item]:
    """What of the base as it is loaded, or of roles that are not yet as they will be, is there beside the weights."""
    held = sum(item.bytes for item in weights(scene, cast) if LOAD in item.moments and item.tier == "device")
    most, why = max(_base(scene, cast), _roles(scene, cast))
    if most > held:
        yield Item("run", "buffers", most - held, frozenset({LOAD}), why=why)


def saving(scene: Scene, cast: Cast) -> Iterator[Item]:
    """What lies below the device is read for its checksum, or to be written, one tensor at a time."""
    largest = [(_largest_tensor(scene, role), "for the checksum") for role in cast.frozen()]
    residency = scene.config.memory.optimizer_residency
    if scene.on_cpu and residency != "keep":
        for each in trained(cast):
            section = scene.config.critic if each.name == "critic" else scene.config.ppo
            narrow = "8bit" in section.optimizer and residency == "park"  # an offloaded one has float32 masters beside
            numbers = max((size for size, count in each.sizes if count), default=0)
            largest.append((numbers if narrow and numbers >= SMALL_8BIT else 4 * numbers, "to be written"))
    most, purpose = max(largest, default=(0, ""))
    yield Item("run", "buffers", most, frozenset({Moment("save")}), why=f"the largest parked tensor, read {purpose}")


def _largest_tensor(scene: Scene, role: Role) -> int:
    form, residency = role.form, getattr(scene.config, role.name).residency
    if residency not in ("park", "stream") or form.lora is not None:
        return 0
    table = form.architecture.vocabulary * form.architecture.hidden * form.table if form.embedding else 0
    return max(table, *(each.numbers * form.matrices for each in form.linears()), 0)


def _base(scene: Scene, cast: Cast) -> tuple[int, str]:
    """The whole model and, above a trunk, copies of the upper layers in float32.

    What is to be held in fewer bits is read and quantised layer by layer (models/stored.py): besides what is held
    already, three layers in floats at most.
    """
    config, a = scene.config, scene.base
    width = 4 if config.sharing.mode == "none" else WIDTHS[scene.compute]
    own = part_bytes(cast.actor.form) if cast.trunk is not None else 0
    if config.precision.frozen in QUANTIZED:
        held = sum(item.bytes for item in weights(scene, cast) if item.holder in ("trunk", "base"))
        floats = STORED_LAYERS * a.layer_parameters * width + own * width // 4
        return held + own + floats, "the base model, quantised layer by layer, and copies of the upper layers"
    whole = a.parameters() * width
    return whole + own, f"the base model: {a.parameters():,} parameters x {width} bytes, and copies of the upper layers"


def _roles(scene: Scene, cast: Cast) -> tuple[int, str]:
    """All roles, the frozen ones still in float32 where they were copied from the actor so."""
    config = scene.config
    shared = sum(
        item.bytes for item in weights(scene, cast) if item.holder in ("trunk", "base") and LOAD in item.moments
    )
    if config.sharing.mode == "adapters":
        return shared + sum(role.own_bytes() for role in cast.roles()), "the base and all adapters"
    own = 4 * cast.actor.trained_numbers()
    scorer = 4 * cast.critic.trained_numbers()
    half = WIDTHS[scene.compute] != 4
    reference = own if cast.reference is not None else 0
    if half and cast.reference is not None and config.precision.reference not in QUANTIZED:
        reference = cast.reference.own_bytes()
    if config.reference.engine != "torch":
        # What the file is made of, and compared with.
        reference = 4 * scene.models.get("reference", scene.base).parameters()
    elif config.reference.residency == "service":
        reference = 0
    if cast.step_0 is not None:
        reference += cast.step_0.own_bytes() if half else own
    reward = 0
    if config.reward.residency != "service":  # all layers, whatever the critic has
        own_rewards = [
            replace(role, form=replace(role.form, trained=True)) for role in cast.rewards if role.of_the_base
        ]
        reward = sum(4 * role.trained_numbers() for role in own_rewards)
    # Rounding a matrix: the narrow one and what is compared, 2 + 2 + 3 bytes a number, or 2 and 4 of it widened again.
    rounded = (7 if half else 6) * cast.actor.largest() if reference or reward else 0
    return shared + own + reference + scorer + reward + rounded, "actor, critic, reference and reward in float32"

"""What each role has for its own, in which type it computes, and what its products read and write of its weights."""

from __future__ import annotations

from dataclasses import replace

from fourfold.planner.bill import Phase
from fourfold.planner.number_head import ONE_NUMBER, NumberHead
from fourfold.planner.passes import Cut
from fourfold.planner.quantization import QUANTIZED, matrix_bytes
from fourfold.planner.scene import WIDTHS, Scene

Part = str  # a role, or "trunk"


def elsewhere(scene: Scene, role: Part) -> bool:
    """Whether a role computes on another processor than the device: at a service, or on the host."""
    return residency(scene, role) in ("service", "cpu")


def residency(scene: Scene, role: Part) -> str:
    """Where a role's own weights are; what is trained, and the trunk, is kept."""
    reference = scene.config.reference
    section = {"reference": reference, "reward": scene.config.reward}.get(role)
    if role == "reference" and reference.engine != "torch" and reference.residency == "keep" and not scene.on_cpu:
        return "cpu"  # llama.cpp computes on the host
    return "keep" if section is None else section.residency


def own_parameters(scene: Scene, role: Part) -> int:
    """Numbers that a role, or the trunk, has for its own: what training trains, parking moves, a service holds."""
    if role == "reference" and (other := scene.models.get(role)):
        return other.parameters()
    if role == "critic" and (other := scene.models.get(role)):
        return other.parameters() - other.head_parameters + NumberHead.of_critic(scene.config).numbers(other.hidden)
    if role == "reward" and scene.classifiers:
        own = _of_the_base(scene, role) if scene.config.reward.of_the_base else 0
        return own + sum(other.parameters() - other.head_parameters for other in scene.classifiers.values())
    return _of_the_base(scene, role)


def _of_the_base(scene: Scene, role: Part) -> int:
    """Of a role that is made of the run's own model."""
    numbers = {"critic": NumberHead.of_critic(scene.config), "reward": ONE_NUMBER}.get(role)
    base, cut, mode = scene.base, Cut.of(scene), scene.config.sharing.mode
    if role == "trunk":
        return base.parameters_of(0, cut.trunk)
    scalar_head = numbers.numbers(base.hidden) if numbers is not None else 0
    if mode == "adapters":
        return cut.adapters_of(scene, role) + scalar_head
    stop = cut.trunk + cut.critic if role == "critic" else base.layers
    branch = base.parameters_of(cut.trunk, stop) + base.final_norm_parameters + scalar_head
    if mode == "trunk":
        return branch
    return branch + base.embedding_parameters + (0 if scalar_head else base.head_parameters)


def trained_parameters(scene: Scene) -> dict[Part, int]:
    """Numbers that gradients and Adam's moments are there for, by whose they are."""
    parts = ("actor", "critic", *(["trunk"] if Cut.of(scene).trunk_trained else []))
    return {part: own_parameters(scene, part) for part in parts}


def held_in(scene: Scene, role: Part) -> str:
    """The type, or the kind of fewer bits, in which the matrices lie that a role's products read."""
    precision = scene.config.precision
    adapted = scene.config.sharing.mode == "adapters" and role not in scene.models
    if adapted or (role == "trunk" and not Cut.of(scene).trunk_trained):
        asked = precision.frozen
    else:
        asked = {"reference": precision.reference, "reward": precision.reward}.get(role, "auto")
        if role == "reference" and scene.config.reference.kind == "moving":
            return "float32"  # as the actor's masters
    return scene.compute if asked == "auto" else asked


def compute_type(scene: Scene, role: Part) -> str:
    """The type of a role's products, "int8" where its activations are rounded to 8 bits as well."""
    held = held_in(scene, role)
    if held == "int8_dynamic" and scene.cluster.device.multiplies("int8"):
        return "int8"
    moving = role == "reference" and scene.config.reference.kind == "moving"
    adapted = scene.config.sharing.mode == "adapters" and role not in scene.models
    own = role in ("reference", "reward", "trunk") and not adapted and not moving
    return held if own and held in WIDTHS else scene.compute


def own_bytes(scene: Scene, role: Part) -> float:
    """Bytes of a frozen role's own weights: its matrices as they are held, adapters in float32.

    Those of the policy of step 0 that is held beside another prior are the reference's too.
    """
    given, adapted = scene.config.reference, scene.config.sharing.mode == "adapters"
    beside = 0.0
    if role == "reference" and given.holds_step_0:
        numbers = own_parameters(replace(scene, models={"base": scene.base}), role)
        beside = numbers * (4.0 if adapted else WIDTHS[scene.compute])
    if role == "reference" and given.kind == "uniform":
        return beside
    held = bytes_a_number(scene, held_in(scene, role))
    if not adapted or role in scene.models:
        return beside + own_parameters(scene, role) * held
    own = _of_the_base(scene, role) if role != "reward" or scene.config.reward.of_the_base else 0
    return beside + 4.0 * own + (own_parameters(scene, role) - own) * held


def bytes_a_number(scene: Scene, held: str) -> float:
    """Bytes of one weight with its share of the scales."""
    hidden = scene.base.hidden
    return matrix_bytes(held, hidden, hidden) / hidden**2 if held in QUANTIZED else WIDTHS[held]


def touched(scene: Scene, role: Part, phase: Phase) -> float:
    """Bytes of device memory that one pass reads and writes for each weight of the matrices that it multiplies by.

    What is held in another type is widened first: read as it is held, written and read again as it is multiplied.
    Trained weights are float32 masters, which autocast narrows; the sampler has a narrow copy of them.
    """
    held, wide = held_in(scene, role), WIDTHS[scene.compute]
    in_full = scene.config.sharing.mode != "adapters" or role in scene.models
    trained = role in trained_parameters(scene) and in_full
    if trained and phase != "generate" and scene.config.memory.optimizer_residency != "offload":
        held = "float32"
    if held == scene.compute or (held in WIDTHS and compute_type(scene, role) == held):
        return WIDTHS[held]
    return bytes_a_number(scene, held) + 2 * wide

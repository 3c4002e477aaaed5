"""What crosses links in one PPO step, and how long that takes: one line a stream, as the busiest device sees it.

A ring all-reduce of n devices sends 2 (n - 1) / n of the bytes from each, a gather or a reduce-scatter half of that
(Rajbhandari et al. 2020, "ZeRO", section 7; NCCL's tests count the same).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from fourfold.planner.bill import Footprint, Phase
from fourfold.planner.holding import (
    bytes_a_number,
    held_in,
    own_bytes,
    own_parameters,
    residency,
    trained_parameters,
)
from fourfold.planner.links import Busy, Cover, below, buckets, road, to_a_service
from fourfold.planner.passes import Batches, Cut, Pass, passes
from fourfold.planner.scene import WIDTHS, Scene
from fourfold.planner.timing import decoding_steps
from fourfold.planner.work import Flow

FROZEN = ("reference", "reward")
IDS, MASK, NUMBER = 8, 1, 4  # bytes: int64, bool, float32


def flows(scene: Scene, footprint: Footprint, busy: Busy) -> tuple[Flow, ...]:
    """All streams of a step; `busy` is how long each role works in each phase."""
    made, cover = passes(scene), Cover(busy)
    return tuple(
        chain(
            messages(scene),
            _residency(scene, cover),
            _optimizer(scene, cover),
            _activations(scene, footprint, cover),
            _gradients(scene, cover),
            _weights(scene, cover),
            _frozen_weights(scene, made, cover),
            _within_passes(scene, made, cover),
        )
    )


def messages(scene: Scene) -> Iterator[Flow]:
    """Ids and masks out, log-probs and scores back, of roles that compute on another processor than the device."""
    rows, lengths = scene.config.ppo.rollout_batch_size / scene.layout.data, scene.lengths
    tokens = rows * (lengths.mean_prompt + lengths.mean_response)
    cut = Cut.of(scene)
    for role in FROZEN:
        where = residency(scene, role)
        if where not in ("service", "cpu"):
            continue
        over = to_a_service(scene) if where == "service" else below(scene)
        # A role on the host reads what the others read: the cached activations of a frozen trunk.
        cached = where == "cpu" and cut.trunk and not cut.trunk_trained and role not in scene.models
        size = tokens * (scene.base.hidden * WIDTHS[scene.compute] if cached else IDS)
        what = "activations and masks" if cached else "ids and masks"
        yield over.flow(what, "actor", role, "score", size + tokens * MASK, messages=1)
        back = ("log-probs", rows * lengths.mean_response) if role == "reference" else ("scores", rows)
        yield over.flow(back[0], role, "actor", "score", back[1] * NUMBER, messages=1)


def _residency(scene: Scene, cover: Cover) -> Iterator[Flow]:
    """Frozen roles that are parked come in once a session, streamed ones for every micro-batch."""
    sampling = scene.config.sampling
    sessions = decoding_steps(scene)[0] if sampling.overlap_scoring else 1
    micro_batches = scene.micro_batches(scene.config.ppo.rollout_batch_size)
    divided = scene.layout.tensor * scene.layout.pipeline
    for role in FROZEN:
        where, size = residency(scene, role), own_bytes(scene, role) / divided
        if where == "park":
            yield below(scene).flow(f"weights of the {role}, parked", "below", role, "score", sessions * size)
        elif where == "stream":
            moved = below(scene).flow(f"weights of the {role}, streamed", "below", role, "score", micro_batches * size)
            yield from cover.behind(moved, role)
        if where in ("park", "stream") and role == "reference" and scene.config.reference.kind == "moving":
            every = scene.config.reference.copy_every or 1
            size = 2 * 4 * own_parameters(scene, role) / divided / every  # read and written, in float32
            yield below(scene).flow("weights of the reference, as they move", "below", role, "learn", size)


def _optimizer(scene: Scene, cover: Cover) -> Iterator[Flow]:
    """Moments that are parked, or gradients down and new weights up where the states are offloaded."""
    config, layout = scene.config, scene.layout
    where = config.memory.optimizer_residency
    steps = optimizer_steps(scene)
    for role, count in trained_parameters(scene).items():
        numbers = count / (layout.tensor * layout.pipeline * (layout.data if layout.zero else 1))
        section = config.critic if role == "critic" else config.ppo
        moments = numbers * (2 if section.optimizer.endswith("8bit") else 8)
        if where == "park":
            size = 2 * steps[role] * moments
            yield below(scene).flow(f"moments of the {role}, parked", "below", role, "learn", size)
        elif where == "offload":
            yield from _offloaded(scene, role, numbers, moments, steps[role], cover)


def _offloaded(scene: Scene, role: str, numbers: float, moments: float, steps: int, cover: Cover) -> Iterator[Flow]:
    """Ren et al. 2021, "ZeRO-Offload", section 4: from a GPU gradients and weights only, from a CPU states too."""
    over = below(scene)
    micro_batches = micro_batches_a_step(scene)
    wide = WIDTHS[scene.compute]
    if not scene.on_cpu:
        down = over.flow(f"gradients of the {role}", role, "host", "learn", steps * micro_batches * numbers * wide)
        yield from cover.behind(down, role)
        yield over.flow(f"new weights of the {role}", "host", role, "learn", steps * numbers * wide)
        return
    # Every sum but the first is read before it is written; a step reads it, and reads and writes masters and moments.
    sums = (2 * micro_batches - 1 + 1) * 4 * numbers
    masters = 0 if scene.compute == "float32" else 8 * numbers
    yield over.flow(
        f"gradients and states of the {role}", role, "below", "learn", steps * (sums + masters + 2 * moments)
    )


def _activations(scene: Scene, footprint: Footprint, cover: Cover) -> Iterator[Flow]:
    """Activations that wait for the backward pass below the device: out, and back."""
    if not scene.config.memory.activation_offload:
        return
    over, times = below(scene), micro_batches_a_step(scene)
    for role, steps in optimizer_steps(scene).items():
        held = [
            item.bytes
            for item in footprint.items
            if item.kind == "activations" and item.tier != "device" and ("learn", role) in item.moments
        ]
        if held:
            moved = over.flow(f"activations of the {role}", role, "below", "learn", 2 * steps * times * sum(held))
            yield from cover.behind(moved, role, 0.0 if scene.on_cpu else 1.0)


def _gradients(scene: Scene, cover: Cover) -> Iterator[Flow]:
    """Gradients of data-parallel devices, summed: once a step, by ZeRO-2 and 3 for every micro-batch.

    The last micro-batch's backward pass goes on while the first buckets are under way.
    """
    layout = scene.layout
    replicas = layout.data * layout.context
    if replicas == 1:
        return
    over, steps, times = road(scene.cluster, layout, "data"), optimizer_steps(scene), micro_batches_a_step(scene)
    for role, count in trained_parameters(scene).items():
        # float32, as the run adds gradients up (master weights under autocast).
        size = 4 * count / (layout.tensor * layout.pipeline)
        often = steps[role] * (times if layout.zero >= 2 else 1)
        share = (replicas - 1) / replicas * (1 if layout.zero else 2)
        how = "reduced and scattered" if layout.zero else "all-reduced"
        moved = over.flow(
            f"gradients of the {role}, {how}",
            role,
            role,
            "learn",
            often * share * size,
            often * buckets(size),
            replicas,
        )
        yield from cover.behind(moved, role, 2 / 3 / (1 if layout.zero >= 2 else times))


def _weights(scene: Scene, cover: Cover) -> Iterator[Flow]:
    """What ZeRO gathers: new weights after a step (1, 2), or each layer for every pass (3); whole for sampling (3)."""
    layout = scene.layout
    if not layout.zero or layout.data == 1:
        return
    over, steps, wide = road(scene.cluster, layout, "data"), optimizer_steps(scene), WIDTHS[scene.compute]
    share = (layout.data - 1) / layout.data / (layout.tensor * layout.pipeline)
    for role, count in trained_parameters(scene).items():
        size = share * count * wide
        if layout.zero < 3:
            yield over.flow(
                f"new weights of the {role}, gathered",
                role,
                role,
                "learn",
                steps[role] * size,
                steps[role],
                layout.data,
            )
            continue
        passed = steps[role] * micro_batches_a_step(scene) * 2  # forward and backward
        gathers = passed * scene.base.layers
        moved = over.flow(f"weights of the {role}, gathered", role, role, "learn", passed * size, gathers, layout.data)
        yield from cover.behind(moved, role)
        if role != "critic":
            yield over.flow(
                f"weights of the {role}, gathered for sampling", role, "sampler", "generate", size, 1, layout.data
            )


def _frozen_weights(scene: Scene, made: list[Pass], cover: Cover) -> Iterator[Flow]:
    """Frozen weights that ZeRO-3 shards too are gathered for every pass, and for every token that is sampled."""
    layout = scene.layout
    if not layout.shard_frozen or layout.data == 1:
        return
    over, adapted = road(scene.cluster, layout, "data"), scene.config.sharing.mode == "adapters"
    share = (layout.data - 1) / layout.data / (layout.tensor * layout.pipeline)
    sums: dict[tuple[Phase, str], tuple[float, float]] = {}
    for one in made:
        if not adapted and one.role in trained_parameters(scene):
            continue
        numbers = one.architecture.parameters_of(one.layers.start, one.layers.stop)
        calls = _calls(scene, one) * (2 if one.direction == "backward" else 1)
        size = calls * share * numbers * bytes_a_number(scene, held_in(scene, one.role))
        before = sums.get((one.phase, one.role), (0.0, 0.0))
        sums[one.phase, one.role] = before[0] + size, before[1] + calls * len(one.layers)
    for (phase, role), (size, sent) in sums.items():
        what = f"frozen weights below the {role}, gathered" if adapted else f"weights of the {role}, gathered"
        yield from cover.behind(over.flow(what, role, role, phase, size, sent, layout.data), role)


def _calls(scene: Scene, one: Pass) -> int:
    """How often one device goes through the layers of a pass, all that are like it together."""
    if one.decodes:
        return sum(decoding_steps(scene))
    return one.times * scene.micro_batches(one.batch.rows)


def _within_passes(scene: Scene, made: list[Pass], cover: Cover) -> Iterator[Flow]:
    """Activations between devices that share a pass: tensor, pipeline, context and expert parallelism."""
    sums: dict[tuple[str, Phase, str], tuple[float, float]] = {}
    for one in made:
        for axis, size, sent in _of_a_pass(scene, one):
            before = sums.get((axis, one.phase, one.role), (0.0, 0.0))
            sums[axis, one.phase, one.role] = before[0] + size, before[1] + sent
    what = {
        "tensor": "activations of the {}, all-reduced in every layer",
        "pipeline": "activations of the {}, to the next stage and back",
        "context": "keys and values of the {}, around the ring",
        "expert": "tokens of the {}, to experts and back",
    }
    for (axis, phase, role), (size, sent) in sums.items():
        over = road(scene.cluster, scene.layout, axis)  # type: ignore[arg-type]
        hops = 1 if axis == "pipeline" else getattr(scene.layout, axis)
        moved = over.flow(what[axis].format(role), role, role, phase, size, sent, hops)
        # Keys and values travel while those that are there are attended to (Liu et al. 2023, "Ring Attention").
        yield from cover.behind(moved, role) if axis == "context" else [moved]


def _of_a_pass(scene: Scene, one: Pass) -> Iterator[tuple[str, float, float]]:
    """Axis, bytes and messages of one device's part of a pass, of all that are like it together."""
    layout, shape = scene.layout, one.architecture
    wide = WIDTHS[scene.compute]
    tokens = one.times * one.batch.tokens / (layout.data * layout.context)
    layers = len(one.layers) / layout.pipeline
    calls = _calls(scene, one)
    hidden = tokens * shape.hidden * wide
    if layout.tensor > 1:  # after attention and after the MLP (Shoeybi et al. 2019, "Megatron-LM", figure 4)
        yield "tensor", 2 * layers * 2 * (layout.tensor - 1) / layout.tensor * hidden, 2 * layers * calls
    if layout.pipeline > 1 and one.layers:
        yield "pipeline", hidden, calls
    if layout.context > 1 and not one.decodes:
        keys = tokens * shape.cached_numbers * wide
        times = 2 if one.direction == "backward" else 1  # with their gradients
        yield "context", times * layers * (layout.context - 1) * keys, layers * calls
    mixtures = shape.expert_layers(one.layers.start, one.layers.stop) / layout.pipeline
    if layout.expert > 1 and mixtures:  # to the experts and back (Lepikhin et al. 2021, "GShard", section 3.1)
        assert shape.experts is not None
        away = (layout.expert - 1) / layout.expert
        yield "expert", 2 * mixtures * shape.experts.per_token * away * hidden, 2 * mixtures * calls


def optimizer_steps(scene: Scene) -> dict[str, int]:
    """Of each trained part in one PPO step."""
    steps = Batches.of(scene.config).steps()
    return {part: steps[part] for part in trained_parameters(scene)}


def micro_batches_a_step(scene: Scene) -> int:
    """Passes whose gradients one device adds up before a step."""
    return scene.micro_batches(scene.config.ppo.mini_batch_size)

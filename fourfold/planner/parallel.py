"""The bill of the fullest device when a job is spread over several, from the bill of one device that does it all.

What divides what (d data, t tensor, p pipeline, c context, e expert):

* data: rows, as far as a pass has more than one device's share of them; with ZeRO the states of what is trained (1
  masters and moments, 2 gradients, 3 weights; Rajbhandari et al. 2020, section 5). Where masters are sharded, weights
  in the compute type take the place of what one device makes of them for its passes and for sampling: whole in stages
  1 and 2, two layers at a time in stage 3, and whole while it samples;
* tensor: matrices of decoder layers and an untied head, keys and values up to the number of KV heads, and of
  activations what lies inside attention and MLP (Korthikanti et al. 2022, equation 2). Embedding and norms stay whole;
  casts of weights and other temporary tensors of a role are taken to be divided as its weights are;
* pipeline: layers. The first stage has the embedding and as many micro-batches in flight as there are stages
  (Narayanan et al. 2021, section 2.2), the last the head and its logits: the fuller of the two is the answer;
* context: tokens of a row: activations, keys and values, cached activations;
* expert: experts' weights and what training holds of them, nothing else.

What loading takes for a moment is divided as the weights are: each device reads its own part of the safetensors. Of
layers that are quantised one by one, a stage of a pipeline has as many in floats as one device has.

A host holds what all devices of its node have below them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from fourfold.planner.bill import Footprint, Item, Kind, Moment, Phase
from fourfold.planner.hierarchy import check_layout
from fourfold.planner.holding import held_in, own_parameters, trained_parameters
from fourfold.planner.passes import Cut
from fourfold.planner.quantization import QUANTIZED, matrix_bytes
from fourfold.planner.scene import WIDTHS, Scene

Stage = Literal["first", "last", "only"]
STATES: tuple[Kind, ...] = ("weights", "gradients", "masters", "optimizer")
# From which stage of ZeRO on a kind is sharded.
SHARDED_FROM: dict[Kind, int] = {"masters": 1, "optimizer": 1, "gradients": 2, "weights": 3}
FROZEN = ("reference", "reward", "trunk", "base")
LOADING = frozenset({Moment("load")})
# Layers that ZeRO-3 has gathered at a time: one computes, the next is on its way (FSDP's prefetch).
GATHERED = 2
# Of the 34 bytes a token and hidden number that a layer keeps, what tensor parallelism does not divide: inputs of
# attention, MLP and norms (Korthikanti et al. 2022, equation 2). Of a checkpointed layer its input is kept, 2 bytes.
KEPT, WHOLE, INPUT = 34, 10, 2


def sharded(footprint: Footprint, scene: Scene) -> Footprint:
    """The bill of the device that holds most; `footprint` is that of one device doing all the work of `scene`.

    ValueError for a layout that makes no sense.
    """
    check_layout(scene)
    if scene.layout.devices == 1:
        return footprint
    stages: tuple[Stage, ...] = ("only",) if scene.layout.pipeline == 1 else ("first", "last")
    return max((_of_stage(footprint, scene, stage) for stage in stages), key=lambda bill: bill.peak()[1])


def _of_stage(footprint: Footprint, scene: Scene, stage: Stage) -> Footprint:
    items = [*(_without_narrow_copies(footprint.items, scene)), *_narrow_weights(footprint, scene)]
    divided = [part for item in items for part in _divided(item, scene, stage)]
    return Footprint((*divided, *_gathered(scene, footprint.moments)))


def _narrows_masters(scene: Scene) -> bool:
    """Whether trained roles have float32 masters on the device, of which products and sampling need narrow copies."""
    config = scene.config
    kept = config.memory.optimizer_residency != "offload" and config.sharing.mode != "adapters"
    return kept and scene.compute != "float32"


def _without_narrow_copies(items: Iterable[Item], scene: Scene) -> Iterator[Item]:
    """Under ZeRO neither the sampler's copy nor what autocast keeps of a pass is there beside the narrow weights."""
    trained = trained_parameters(scene)
    for item in items:
        if scene.layout.zero and _narrows_masters(scene) and item.holder in trained and item.tier == "device":
            if item.kind == "weights" and item.holder == "actor":
                continue
            if item.kind == "buffers":
                narrowed = trained[item.holder] * WIDTHS[scene.compute]
                item = replace(item, bytes=max(item.bytes - narrowed, 0))
        yield item


def _narrow_weights(footprint: Footprint, scene: Scene) -> Iterator[Item]:
    """The weights that ZeRO-1 and 2 gather after each step."""
    if scene.layout.zero in (1, 2) and _narrows_masters(scene):
        wide = WIDTHS[scene.compute]
        for role, numbers in trained_parameters(scene).items():
            why = f"{numbers:,} numbers x {wide} bytes, gathered after each step"
            yield Item(role, "weights", numbers * wide, frozenset(footprint.moments), why=why)


def _divided(item: Item, scene: Scene, stage: Stage) -> Iterator[Item]:
    """A device's part of an item; in several where it is divided otherwise in other moments."""
    host = 1 if item.tier == "device" else min(scene.layout.devices, scene.cluster.node.devices)
    groups: dict[float, set[Moment]] = {}
    for moment in item.moments:
        groups.setdefault(_share(item, moment, scene, stage), set()).add(moment)
    for share, moments in groups.items():
        if share and item.bytes:
            yield replace(item, bytes=math.ceil(share * item.bytes) * host, moments=frozenset(moments))


def _share(item: Item, moment: Moment, scene: Scene, stage: Stage) -> float:
    """The part of an item's bytes that one device holds."""
    layout = scene.layout
    if item.holder == "run" and item.kind == "buffers" and item.moments == LOADING:
        return _share_of_loading(item, scene, stage)
    if item.kind in STATES or (item.kind == "buffers" and item.holder != "run"):
        return _share_of_states(item, scene, stage)
    rows = rows_share(scene, moment.phase)
    if item.kind == "KV cache":
        heads = min(layout.tensor, scene.base.kv_heads)
        return rows / (layout.context * heads) * _layers_share(scene.base.layers, layout.pipeline)
    if item.kind == "activations":
        return rows / layout.context * tensor_share(scene) * _in_flight(scene, moment, stage)
    if item.kind == "logits":
        if stage == "first":
            return 0.0
        return 1.0 if scene.base.tied_embeddings else 1 / layout.tensor
    if item.kind == "trunk cache":
        return 1 / (layout.data * layout.context)
    if item.kind == "experience":
        return 1 / layout.data
    return 1.0  # framework: every process has its own


def _share_of_loading(item: Item, scene: Scene, stage: Stage) -> float:
    """As of the weights that are read: the actor's, who takes the model over, or of what all roles share."""
    config, layout = scene.config, scene.layout
    read = replace(item, holder="actor" if config.sharing.mode == "none" else "base", kind="weights")
    if config.precision.frozen in QUANTIZED:
        return _share_of_states(read, replace(scene, layout=replace(layout, pipeline=1)), "only")
    return _share_of_states(read, scene, stage)


def rows_share(scene: Scene, phase: Phase) -> float:
    """Rows that one device passes at once, of those that one device alone would pass at once."""
    ppo, sampling, data = scene.config.ppo, scene.config.sampling, scene.layout.data
    total = {"learn": ppo.mini_batch_size, "score": ppo.rollout_batch_size, "generate": ppo.rollout_batch_size}
    if phase not in total:
        return 1.0
    at_once = scene.micro_rows if phase != "generate" else sampling.batch_size or ppo.rollout_batch_size
    return min(at_once, math.ceil(total[phase] / data)) / min(at_once, total[phase])


def tensor_share(scene: Scene) -> float:
    """Of activations: what lies inside attention and MLP is divided, what lies between them is on every device."""
    degree, layers = scene.layout.tensor, Cut.of(scene).branch
    again = scene.config.memory.checkpointing == "layers"
    whole = WHOLE + (INPUT * layers if again else 0)
    total = KEPT + (INPUT * layers if again else 0)
    return (whole + (total - whole) / degree) / total


def _in_flight(scene: Scene, moment: Moment, stage: Stage) -> float:
    """Of activations: the layers of a stage, for each micro-batch whose backward pass is still to come."""
    stages = scene.layout.pipeline
    layers = _layers_share(scene.base.layers, stages)
    if moment.phase != "learn" or stage != "first":
        return layers
    return layers * min(stages, scene.micro_batches(scene.config.ppo.mini_batch_size))


def _layers_share(layers: int, stages: int) -> float:
    """The largest stage's part of the layers."""
    return math.ceil(layers / stages) / layers


class _Numbers(NamedTuple):
    """What a holder has, in proportion: matrices and vectors of layers, experts in them, embedding, untied head."""

    matrices: float = 0.0
    experts: float = 0.0
    vectors: float = 0.0
    rest: float = 0.0
    head: float = 0.0


def _share_of_states(item: Item, scene: Scene, stage: Stage) -> float:
    """Of weights, and of what training holds of them: layers and the rest are divided each in their way."""
    layout, has = scene.layout, _numbers(item, scene)
    total = sum(has)
    if not total:
        return 1.0
    replicas = _replicas(item, scene)
    # ZeRO shards an expert among the devices that have it, one in `expert` of all.
    experts = has.experts / layout.expert / max(replicas / layout.expert, 1)
    layers = (has.matrices / replicas + experts) / layout.tensor + has.vectors / replicas
    share = layers * _layers_share(scene.base.layers, layout.pipeline)
    if stage != "last" or scene.base.tied_embeddings:
        share += has.rest / replicas
    if stage != "first":
        share += has.head / layout.tensor / replicas
    return share / total


def _replicas(item: Item, scene: Scene) -> int:
    """Data-parallel devices among which ZeRO shards an item; 1 where it does not."""
    layout = scene.layout
    if layout.zero < SHARDED_FROM.get(item.kind, 4):
        return 1
    if item.kind == "weights" and item.holder in FROZEN:
        return layout.data if layout.shard_frozen else 1
    return layout.data


def _numbers(item: Item, scene: Scene) -> _Numbers:
    """Adapters and number heads count as the rest: beside matrices of both directions half of them is whole anyway."""
    base, cut, mode, holder = scene.base, Cut.of(scene), scene.config.sharing.mode, item.holder
    model = scene.models.get(holder, base)
    if mode == "adapters" and holder not in ("base", "trunk", *scene.models):
        return _Numbers(rest=1.0)
    whole = mode == "none" or holder in scene.models or holder == "base"
    start, stop = (0, model.layers) if whole else (0, cut.trunk) if holder == "trunk" else (cut.trunk, model.layers)
    if holder == "critic" and holder not in scene.models:
        stop = cut.trunk + cut.critic
    experts = 0 if model.experts is None else model.experts.count * model.expert_parameters
    experts *= model.expert_layers(start, stop)
    matrices = float(model.matrices_of(start, stop) - experts)
    vectors = model.parameters_of(start, stop) - model.matrices_of(start, stop)
    has_table = whole or holder == "trunk"
    has_head = has_table and holder not in ("critic", "reward")
    held = held_in(scene, "trunk" if holder == "base" else holder)
    if item.kind == "weights" and held in QUANTIZED:
        matrices *= matrix_bytes(held, model.hidden, model.hidden) / model.hidden**2 / WIDTHS[scene.compute]
    rest = model.final_norm_parameters + (model.embedding_parameters if has_table else 0)
    return _Numbers(matrices, float(experts), float(vectors), float(rest), float(model.head_parameters * has_head))


def _gathered(scene: Scene, moments: Iterable[Moment]) -> Iterator[Item]:
    """What ZeRO-3 brings together: two layers in passes, and all that the actor trains for sampling."""
    layout, wide = scene.layout, WIDTHS[scene.compute]
    if layout.zero < 3 or layout.data == 1:
        return
    there, divided = set(moments), layout.tensor * layout.pipeline
    adapted = scene.config.sharing.mode == "adapters"
    layer = GATHERED * scene.base.layer_parameters * wide // divided
    for role in ("actor", "critic", "trunk", "reference", "reward"):
        frozen = adapted or role in FROZEN
        if frozen and not layout.shard_frozen:
            continue
        passing = frozenset(m for m in there if m.role == role and (frozen or m.phase != "generate"))
        if passing:
            yield Item(role, "buffers", layer, passing, why=f"{GATHERED} layers of {wide} bytes a number, gathered")
    sampling = frozenset(m for m in there if m.phase == "generate")
    if sampling and not adapted:
        size = own_parameters(scene, "actor") * wide // divided
        yield Item("actor", "buffers", size, sampling, why="weights gathered for sampling")

"""Scenes for tests of search and output, and an arithmetic of costs simple enough to be searched exhaustively."""

from __future__ import annotations

from typing import Any

from fourfold.config.loading import parse_config
from fourfold.planner.architectures import Architecture
from fourfold.planner.bill import Footprint, Item, Kind, Moment
from fourfold.planner.choices import value_of
from fourfold.planner.hardware.machine import GB, GIB, Cluster, Device, Node
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.work import Costs, Flow, Work

MODEL = Architecture(
    family="llama",
    layers=24,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    intermediate=5504,
    vocabulary=32_000,
    tied_embeddings=False,
    gated_mlp=True,
)
GPU = Device("a GPU", "cuda", 80 * GIB, 2e12, {"float32": 2e13, "bfloat16": 3e14, "float16": 3e14}, pcie=32e9)
CLUSTER = Cluster(Node(GPU, host_memory=256 * GIB, disk_bandwidth=2e9))
LEARN, SCORE, SAMPLE = Moment("learn", "actor"), Moment("score", "reference"), Moment("generate", "actor")


def tree(**sections: Any) -> dict[str, Any]:
    """The tables of a run that is paid by a function, with these in their places."""
    given: dict[str, Any] = {
        "output": "runs/x",
        "model": {"path": "a-model"},
        "stages": ["ppo"],
        "data": {"prompts": {"path": "p.jsonl"}, "max_prompt_tokens": 128},
        "reward": {"source": "checkpoint", "checkpoint": "runs/y/reward/model"},
        "sampling": {"max_new_tokens": 128},
    }
    for name, section in sections.items():
        given[name] = {**given[name], **section} if isinstance(given.get(name), dict) else section
    return given


def scene(cluster: Cluster = CLUSTER, **sections: Any) -> Scene:
    """A scene of one 1.3B model with these settings."""
    config = parse_config(tree(**sections), "test")
    lengths = Lengths.longest(config.data.max_prompt_tokens, config.sampling.max_new_tokens)
    return Scene(config, {"base": MODEL}, cluster, lengths)


def simple(given: Scene) -> tuple[Footprint, Costs]:
    """Each lever saves its bytes in its moments and costs its seconds, whatever is on besides."""
    config = given.config

    def on(key: str, value: Any) -> bool:
        return value_of(config, key) == value

    def item(holder: str, kind: Kind, gib: float, *moments: Moment, tier: Any = "device") -> Item:
        return Item(holder, kind, round(gib * GIB), frozenset(moments), tier, "by hand")

    always = (SAMPLE, SCORE, LEARN)
    mode = config.sharing.mode
    own = {"none": 10.0, "trunk": 2.0, "adapters": 0.5}[mode]
    items = [item("base", "weights", {"int8": 2.2, "nf4": 1.2}.get(config.precision.frozen, 4.0), *always)]
    seconds = {"generate": 10.0, "score": 4.0, "learn": {"none": 40.0, "trunk": 10.0, "adapters": 16.0}[mode]}
    for role, residency in (("reference", config.reference.residency), ("reward", config.reward.residency)):
        held = own / (2 if on(f"precision.{role}", "int8") else 1)
        where = {"keep": always, "park": (SCORE,), "stream": (), "service": (), "cpu": ()}[residency]
        items.append(item(role, "weights", held, *where))
        items.append(item(role, "weights", held * (residency != "keep"), *always, tier="host"))
        seconds["score"] += {"keep": 0.0, "park": 0.3, "stream": 1.1}[residency]
    moments = 2 * own / (4 if config.ppo.optimizer == "adamw_8bit" else 1)
    residency = config.memory.optimizer_residency
    items.append(item("actor", "weights", own, *always))
    items.append(item("actor", "optimizer", moments if residency == "keep" else 0.0, *always))
    items.append(item("actor", "optimizer", moments if residency != "keep" else 0.0, *always, tier="host"))
    items.append(item("actor", "gradients", own if residency != "offload" else 0.1, LEARN))
    seconds["learn"] += {"keep": 0.0, "park": 2.0, "offload": 5.0}[residency]
    rows = config.ppo.micro_batch_size
    saved = {"none": 0.0, "attention": 0.15, "layers": 0.4}[config.memory.checkpointing]
    kept = 0.5 - saved / config.memory.checkpoint_every
    kept *= 0.2 if config.memory.activation_offload else 1.0
    items.append(item("actor", "activations", kept * rows, LEARN))
    again = {"none": 0.0, "attention": 0.1, "layers": 0.3}[config.memory.checkpointing]
    seconds["learn"] *= 1 + again / config.memory.checkpoint_every
    seconds["learn"] += (3.0 if config.memory.activation_offload else 0.0) + 8.0 / rows
    sampled = config.sampling.batch_size or config.ppo.rollout_batch_size
    items.append(item("actor", "KV cache", 0.25 * sampled, SAMPLE))
    seconds["generate"] += 16.0 / sampled
    if config.sampling.overlap_scoring:
        seconds["score"] /= 2
        items.append(item("reference", "activations", 0.5, SAMPLE))
    return Footprint(tuple(items)), _costs(seconds)


def _costs(seconds: dict[Any, float]) -> Costs:
    work = tuple(
        Work(moment, 1.0, 1.0 * (moment == LEARN), 8192, 1e14, 4e9, seconds[moment.phase], "compute")
        for moment in (SAMPLE, SCORE, LEARN)
    )
    flow = Flow("weights of the reference", "host", "device", "score", 2 * GB, "pcie", 0.1)
    return Costs(work, (flow,), seconds, bubble=seconds["score"], hidden=0.0, utilisation=0.3)

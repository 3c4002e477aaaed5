"""How long passes and optimizer steps take: a roofline (Williams et al. 2009) of products, memory and calls.

seconds = max(FLOPs / FLOP/s, bytes / bytes/s), each rate times the share of it that real work reaches. What a layer's
call takes before any arithmetic is beside that on a GPU, whose work is queued, and on top of it on a CPU. Scoring and
learning wait for products; decoding reads every weight for each token and waits for memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.planner.compute import forward_flops
from fourfold.planner.hardware.devices import CPUS
from fourfold.planner.hardware.machine import Device
from fourfold.planner.holding import compute_type, elsewhere, residency, touched, trained_parameters
from fourfold.planner.passes import Pass
from fourfold.planner.scene import WIDTHS, Scene
from fourfold.planner.work import Bound


@dataclass(frozen=True, slots=True)
class Shares:
    """What real work reaches of the rates of large products and copies, and what calling a layer costs before that.

    `published` is what these reach of the rates that makers give, products first.
    """

    products: Mapping[str, float]  # of FLOP/s, in whole passes, by the type of the inputs; "": of all others
    decoding: Mapping[str, float]  # the same with the few rows of a decoding step
    bandwidth: float
    published: tuple[float, float]
    layer_seconds: float
    queues: bool  # calls return before their work is done


# gpt-fast's README and the start of PyTorch's post were read again for these; SemiAnalysis' figures in a translation of
# the article. Narayanan's table was not.
SHARES: Mapping[str, Shares] = {
    # Large products: 720 of an H100's 989 TFLOP/s (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1", December
    # 2024); copies: 1,700 of an A100-80G's 2,039 GB/s (gpt-fast's README). Of these passes reach 0.68, half of an
    # A100's published rate: 44 to 52 % in training GPT of 1.7 to 1,008 billion parameters (Narayanan et al. 2021,
    # "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", table 1). Decoding has 0.82:
    # gpt-fast moves 1,397 GB/s with Llama-2-7B. Calls: eager PyTorch decodes that at 25.5 tokens/s (PyTorch blog of
    # 2023-11-30, "Accelerating Generative AI with PyTorch II"): 39 ms for 32 layers.
    "cuda": Shares({"": 0.68}, {"": 0.68}, 0.82, published=(0.73, 0.83), layer_seconds=1.2e-3, queues=True),
    # Large products: 620 of an MI300X's 1,307 TFLOP/s (SemiAnalysis, as above); gpt-fast moves 1,029 of the 1,638 GB/s
    # of an MI250X's die, 0.76 of what its copies are taken to reach. The rest as on CUDA.
    "rocm": Shares({"": 0.68}, {"": 0.68}, 0.76, published=(0.47, 0.83), layer_seconds=1.2e-3, queues=True),
    # Measured on AMD EPYC cores with AVX512-BF16, decoding from the seconds of whole steps (docs/log.md, 2026-11-30,
    # "What a CPU reaches of its rates"). What large products and copies reach of published rates is taken to be 0.8.
    "cpu": Shares(
        {"float32": 0.8, "": 0.5},
        {"float32": 0.35, "": 0.15},
        0.5,
        published=(0.8, 0.8),
        layer_seconds=0.25e-3,
        queues=False,
    ),
}
# A type without instructions. A CPU multiplies its numbers in float32 (algorithms/products.py), which with widening and
# rounding takes 1.2 to 1.3 times as long (docs/log.md, 2026-11-30, "Half precision without instructions").
# GPUs: as slow as such a CPU's own products were (6 GFLOP/s beside 39); none of such a GPU was measured.
WIDENED = 0.8
EMULATED = 0.15
# What a layer writes and later reads for each token, in numbers of the hidden size: 34 bytes of 2-byte numbers are kept
# for the backward pass (Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 2).
LAYER_NUMBERS = 17
# bitsandbytes' 8-bit AdamW on a CPU: 30.3 against 21.5 s an update of 1.08e9 steps of one parameter
# (the lever benchmark of 2026-11-30, at commit c89bb1c).
CPU_8BIT_SECONDS = 8.2e-9
# A server's processor below a GPU, for roles on "cpu" and Adam on the host.
HOST = CPUS["epyc-7763"]


class Seconds(NamedTuple):
    """What a stretch would take if only one thing took time; of several stretches the sums."""

    compute: float
    memory: float
    calls: float
    total: float

    def __add__(self, other: tuple[float, ...]) -> Seconds:  # type: ignore[override]
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Seconds:
        """All of it so often."""
        return Seconds(*(factor * each for each in self))

    @property
    def bound(self) -> Bound:
        """What it waits for most."""
        causes: dict[Bound, float] = {"compute": self.compute, "memory": self.memory, "overhead": self.calls}
        return max(causes, key=lambda cause: causes[cause])


NOTHING = Seconds(0.0, 0.0, 0.0, 0.0)


def roofline(
    device: Device, dtype: str, flops: float, moved: float, layers: float, *, few_rows: bool = False
) -> Seconds:
    """A stretch of `flops` in products of `dtype`, `moved` bytes of device memory and `layers` calls of a layer."""
    shares = SHARES[device.kind]
    compute = flops / reached_flops(device, dtype, few_rows=few_rows)
    memory = moved / (device.bandwidth * shares.bandwidth * (1.0 if device.measured else shares.published[1]))
    return _with_calls(device, Seconds(compute, memory, 0.0, max(compute, memory)), layers)


def _with_calls(device: Device, found: Seconds, layers: float, layer_seconds: float | None = None) -> Seconds:
    """The same with the calls of so many layers, of the device's kind or as measured."""
    shares = SHARES[device.kind]
    calls = layers * (layer_seconds or shares.layer_seconds)
    return found._replace(calls=calls, total=max(found.total, calls) if shares.queues else found.total + calls)


def reached_flops(device: Device, dtype: str, *, few_rows: bool = False) -> float:
    """FLOP/s of real work in products of a type."""
    shares = SHARES[device.kind]
    if device.kind == "cpu" and not device.flops.get(dtype):
        return WIDENED * reached_flops(device, "float32", few_rows=few_rows)
    by_type = shares.decoding if few_rows else shares.products
    share = by_type.get(dtype, by_type[""]) * (1.0 if device.measured else shares.published[0])
    return share * peak_flops(device, dtype)


def peak_flops(device: Device, dtype: str) -> float:
    """FLOP/s of products of a type as they are given; without instructions for it a part of float32's."""
    slowed = 1.0 if device.kind == "cpu" else EMULATED
    return device.flops.get(dtype) or slowed * device.flops["float32"]


def processor(scene: Scene, role: str) -> Device:
    """What a role computes on; a service is taken to have a device like the run's."""
    return HOST if residency(scene, role) == "cpu" else scene.cluster.device


def pass_seconds(scene: Scene, one: Pass) -> tuple[Seconds, float]:
    """The time of one pass on one device, and the bytes of its memory that are moved."""
    if one.decodes:
        return _decode(scene, one)
    layout = scene.layout
    device, dtype = processor(scene, one.role), _type_on(processor(scene, one.role), compute_type(scene, one.role))
    share = 1 if elsewhere(scene, one.role) else layout.devices
    calls = scene.micro_batches(one.batch.rows)
    weights = calls * weight_bytes(scene, one)
    passing = (
        2 * LAYER_NUMBERS * WIDTHS.get(dtype, 2) * one.architecture.hidden * one.batch.tokens * len(one.layers) / share
    )
    times = 2 if one.direction == "backward" else 1
    moved, layers = times * (weights + passing), times * calls * len(one.layers) / layout.pipeline
    found = roofline(device, dtype, one.flops / share, moved, layers)
    # The bubble of a pipeline (Narayanan et al. 2021, section 2.2.1).
    return found.times(1 + (layout.pipeline - 1) / calls), moved


def decoding(device: Device, dtype: str, flops: float, rows: float, weights: float, other: float) -> Seconds:
    """Products of a few `rows` that read `weights` bytes in their own type and `other` bytes, without calls.

    Where products of few rows were measured, reading their weights is in that; elsewhere it is beside them.
    """
    rate = device.flops_of_rows(dtype, rows)
    if rate is None:
        return roofline(device, dtype, flops, weights + other, 0.0, few_rows=True)
    compute = flops / reached_flops(device, dtype)
    memory = max(flops / rate - compute, 0.0) + roofline(device, dtype, 0.0, other, 0.0).memory
    return Seconds(compute, memory, 0.0, compute + memory)


def _type_on(device: Device, dtype: str) -> str:
    """A host that does not multiply the type computes in float32 instead."""
    return dtype if device is not HOST or device.multiplies(dtype) else "float32"


def weight_bytes(scene: Scene, one: Pass, *, tokens: float = math.inf) -> float:
    """Bytes of device memory that one call of a pass moves for its weights; of experts, those that `tokens` reach."""
    shape, layout = one.architecture, scene.layout
    head = shape.vocabulary * shape.hidden if one.head == "lm" else 0
    numbers = float(shape.parameters_of(one.layers.start, one.layers.stop) + head)
    if shape.experts is not None:
        held = shape.experts.count * shape.expert_parameters * shape.expert_layers(one.layers.start, one.layers.stop)
        reached = min(tokens * shape.experts.per_token / shape.experts.count, 1.0)
        numbers -= held * (1 - reached / layout.expert)
    return numbers * touched(scene, one.role, one.phase) / (layout.tensor * layout.pipeline)


def decoding_steps(scene: Scene) -> tuple[int, int]:
    """Sampling batches of one device in a rollout, and decoding steps of all of them: the longest response of each."""
    rows = math.ceil(scene.config.ppo.rollout_batch_size / scene.layout.data)
    batches = math.ceil(rows / (scene.config.sampling.batch_size or rows))
    return batches, batches * scene.lengths.response


def cache_bytes_a_token(scene: Scene, layers: int) -> float:
    """Keys and values of one token in these layers."""
    return scene.base.cached_numbers * layers * WIDTHS[scene.compute]


def _decode(scene: Scene, one: Pass) -> tuple[Seconds, float]:
    """The prompts in one pass for each sampling batch, then a token at a time with every weight read for it."""
    layout, lengths, batch = scene.layout, scene.lengths, one.batch
    batches, steps = decoding_steps(scene)
    prompt = lengths.mean_prompt
    attended = batch.rows * prompt * (prompt + 1) / 2
    layers = len(one.layers)
    first = forward_flops(
        one.architecture,
        layers=layers,
        start=one.layers.start,
        tokens=batch.rows * prompt,
        attended_tokens=attended,
        head="none",
        head_tokens=0,
    )
    device, dtype = scene.cluster.device, compute_type(scene, one.role)
    # All stages of a pipeline work on one token one after the other, each reading its own weights.
    whole = layout.pipeline * weight_bytes(scene, one)
    prefill = roofline(device, dtype, first / layout.devices, batches * whole, batches * layers)
    cache = (batch.attended - attended) * cache_bytes_a_token(scene, layers) / layout.devices
    at_once = batch.rows / layout.data / batches * layout.expert
    weights = steps * layout.pipeline * weight_bytes(scene, one, tokens=at_once)
    own = weights * min(WIDTHS.get(dtype, 1) / touched(scene, one.role, "generate"), 1.0)
    decode = decoding(device, dtype, (one.flops - first) / layout.devices, at_once, own, weights - own + cache)
    calls = device.seconds_of_layer_step(at_once, one.architecture.hidden)
    decode = _with_calls(device, decode, steps * layers, calls)
    return prefill + decode, batches * whole + weights + cache


def step_bytes(scene: Scene, role: str) -> float:
    """Bytes that AdamW reads and writes for each parameter in one step.

    The gradient is read (and, where it is clipped, read for the norm and scaled before), weight and two moments are
    read and written: float32, or moments of one byte.
    """
    config = scene.config
    section = config.critic if role == "critic" else config.ppo
    moments = 1 if section.optimizer.endswith("8bit") else 4
    clip = 12 if section.max_grad_norm else 0
    return 4 + clip + 8 + 4 * moments


def step_seconds(scene: Scene, role: str) -> tuple[Seconds, float]:
    """The optimizer's step of a trained part on one device (the host's, where states are offloaded), and its bytes."""
    layout, memory = scene.layout, scene.config.memory
    numbers = trained_parameters(scene)[role] / (layout.tensor * layout.pipeline * (layout.data if layout.zero else 1))
    device = scene.cluster.device
    moved = numbers * step_bytes(scene, role)
    if memory.optimizer_residency == "offload" and not scene.on_cpu:
        device = HOST
        # The node's devices step at the same time, on one processor.
        moved *= min(layout.devices, scene.cluster.node.devices)
    found = roofline(device, "float32", 0.0, moved, 0)
    section = scene.config.critic if role == "critic" else scene.config.ppo
    if scene.on_cpu and section.optimizer.endswith("8bit"):
        found = Seconds(numbers * CPU_8BIT_SECONDS, found.memory, 0.0, numbers * CPU_8BIT_SECONDS)
    return found, moved

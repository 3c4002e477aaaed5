"""The time that an infinitely well-engineered program would need for a PPO step on a machine of measured rates.

For each pass of `passes.py`, with what checkpointing computes again left out:

    seconds = max(FLOPs / R, bytes / B)

R is the mean rate of the pass's own products, each measured at its shape (rows, inputs, outputs) in the type that it is
multiplied in, and weighted by its FLOPs; B is the memory's bandwidth. Bytes are those that nothing can save: weights
once a pass in the type that they are held in, keys and values as often as a token attends to them, gradients written
once, and 28 bytes a parameter in each step of AdamW (weight and two moments read and written, the gradient read). A
decoding step multiplies as many rows as are sampled at once and reads every weight. Calls, copies, norms, softmax, the
losses and everything on the host take no time; activations stay in caches. Roles that compute elsewhere are left out.

The limit can be beaten where the weights stay in a cache between two passes, as those of very small models do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fourfold.planner.bill import Phase
from fourfold.planner.compute import forward_flops
from fourfold.planner.costs import WORKING
from fourfold.planner.holding import bytes_a_number, compute_type, elsewhere, held_in, trained_parameters
from fourfold.planner.linears import linears_between
from fourfold.planner.passes import Pass, passes
from fourfold.planner.scene import Scene
from fourfold.planner.timing import cache_bytes_a_token
from fourfold.planner.traffic import optimizer_steps

# From here on more rows make a product no faster, and measuring them takes longer than the run.
MOST_ROWS = 2048
ADAMW_BYTES = 28


class Product(NamedTuple):
    """A matrix product [rows, inputs] x [inputs, outputs] of numbers of a type."""

    dtype: str
    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Rates:
    """FLOP/s of every product that a scene makes, and bytes/s of memory, as they were measured."""

    products: Mapping[Product, float]
    bandwidth: float

    def best(self, dtype: str) -> float:
        """The greatest rate of a type at any of the shapes."""
        return max(rate for product, rate in self.products.items() if product.dtype == dtype)


class Stretch(NamedTuple):
    """Work of one kind: its products with the FLOPs of each, and the bytes that it moves."""

    products: Mapping[Product, float]
    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> tuple[float, float]:
        """What products take, and what memory takes: the longer one counts."""
        weighed = sum(self.products.values())
        mean = sum(flops / rates.products[product] for product, flops in self.products.items())
        return self.flops * mean / weighed if weighed else 0.0, self.bytes / rates.bandwidth


class Limit(NamedTuple):
    """A phase at its fastest."""

    flops: float
    bytes: float
    product_seconds: float  # of all stretches, as if memory took no time
    memory_seconds: float  # the same, as if products took none
    seconds: float

    def __add__(self, other: tuple[float, ...]) -> Limit:  # type: ignore[override]
        return Limit(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Limit(0.0, 0.0, 0.0, 0.0, 0.0)


def products_of(scene: Scene) -> set[Product]:
    """All products whose rates `limits` asks for."""
    return {product for stretches in _stretches(scene).values() for each in stretches for product in each.products}


def limits(scene: Scene, rates: Rates) -> dict[Phase, Limit]:
    """By phase, of one PPO step of a scene on one device."""
    found: dict[Phase, Limit] = {}
    for phase, stretches in _stretches(scene).items():
        found[phase] = NOTHING
        for each in stretches:
            products, memory = each.seconds(rates)
            found[phase] += (each.flops, each.bytes, products, memory, max(products, memory))
    return found


def _stretches(scene: Scene) -> dict[Phase, list[Stretch]]:
    assert scene.layout.devices == 1, "the limit is that of one device"
    memory = scene.config.memory.model_copy(update={"checkpointing": "none"})
    scene = replace(scene, config=scene.config.model_copy(update={"memory": memory}))
    found: dict[Phase, list[Stretch]] = {phase: [] for phase in WORKING}
    for one in passes(scene):
        if not elsewhere(scene, one.role):
            found[one.phase] += _decoding(scene, one) if one.decodes else [_pass(scene, one)]
    trained = trained_parameters(scene)
    steps = sum(count * trained[part] for part, count in optimizer_steps(scene).items())
    found["learn"].append(Stretch({}, 0.0, ADAMW_BYTES * steps))
    return found


def _pass(scene: Scene, one: Pass) -> Stretch:
    """A pass, as often as it is made, over all its rows: how a run cuts it into micro-batches is its own affair."""
    moved = _weights(scene, one)
    trained = trained_parameters(scene)
    if one.direction == "backward" and one.role in trained:
        moved += 4 * trained[one.role]
    products = _products(scene, one, one.batch.tokens, one.batch.responses)
    return Stretch(products, one.times * one.flops, one.times * moved)


def _decoding(scene: Scene, one: Pass) -> Iterator[Stretch]:
    """The prompts in one pass, then tokens of as many rows at once as the settings say; finished rows are replaced."""
    rows, prompt = one.batch.rows, scene.lengths.mean_prompt
    attended, layers = rows * prompt * (prompt + 1) / 2, len(one.layers)
    first = forward_flops(
        one.architecture,
        layers=layers,
        start=one.layers.start,
        tokens=rows * prompt,
        attended_tokens=attended,
        head="none",
        head_tokens=0,
    )
    weights, at_once = _weights(scene, one), min(scene.config.sampling.batch_size or rows, rows)
    prefill = {product: flops for product, flops in _products(scene, one, rows * prompt, 0).items() if flops}
    yield Stretch(prefill, first, weights)
    steps = math.ceil(one.batch.responses / at_once)
    keys_and_values = (one.batch.attended - attended) * cache_bytes_a_token(scene, layers)
    answers = one.batch.responses if one.head == "lm" else 0.0
    decoded = _products(scene, one, one.batch.tokens - rows * prompt, answers, at_once)
    yield Stretch(decoded, one.flops - first, steps * weights + keys_and_values)


def _products(scene: Scene, one: Pass, tokens: float, answers: float, at_once: int = 0) -> dict[Product, float]:
    """The products of a forward pass with their FLOPs; a backward pass makes as many of each, once or twice more."""
    dtype, shape, found = compute_type(scene, one.role), one.architecture, dict[Product, float]()

    def add(rows: float, inputs: int, outputs: int, times: float) -> None:
        product = Product(dtype, max(1, min(at_once or round(rows), MOST_ROWS)), inputs, outputs)
        found[product] = found.get(product, 0.0) + 2 * rows * inputs * outputs * times

    for linear in linears_between(shape, one.layers.start, one.layers.stop):
        add(tokens, linear.inputs, linear.outputs, linear.count)
    if one.head == "lm" and answers:
        add(answers, shape.embedding_width or shape.hidden, shape.vocabulary, 1)
    return found


def _weights(scene: Scene, one: Pass) -> float:
    """Bytes of the weights that a pass reads once."""
    shape = one.architecture
    head = shape.vocabulary * shape.hidden if one.head == "lm" else 0
    numbers = shape.parameters_of(one.layers.start, one.layers.stop)
    wide = bytes_a_number(scene, scene.compute)
    return numbers * min(bytes_a_number(scene, held_in(scene, one.role)), wide) + head * wide

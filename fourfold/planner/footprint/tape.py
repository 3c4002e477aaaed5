"""What is alive while operations run: stand-ins that live as long as tensors do, and autograd's backward pass.

A pass is written down as the operations that it makes (layers.py), on values that have a size and no numbers. A storage
counts from the operation that makes it until nobody holds it any longer, as a tensor's does, so that the most that is
alive at any moment comes out without a formula for every moment. Needs CPython, whose objects end with their last user.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence

from fourfold.planner.bill import Kind

Gradients = Sequence["Storage | None"]
Backward = Callable[["Storage"], Gradients]


class Meter:
    """Bytes alive by kind, and what they were at the fullest moment of each stage."""

    def __init__(self) -> None:
        self.alive: dict[Kind, int] = {}
        self.total = 0
        self.stages: dict[str, dict[Kind, int]] = {}
        self._stage, self._peak = "", -1

    def change(self, kind: Kind, size: int) -> None:
        """`size` more bytes of a kind are alive, or fewer."""
        self.alive[kind] = self.alive.get(kind, 0) + size
        self.total += size
        if self.total > self._peak:
            self._peak = self.total
            self.stages[self._stage] = dict(self.alive)

    def stage(self, name: str) -> None:
        """From here on peaks are those of another stage; of two stages of one name the last counts."""
        self._stage, self._peak = name, -1
        self.change("activations", 0)


class Storage:
    """The memory of a tensor, counted while this object lives."""

    __slots__ = ("_meter", "kind", "moved", "size")

    def __init__(self, meter: Meter, size: int, kind: Kind) -> None:
        self._meter, self.size = meter, size
        self.kind: Kind = kind
        self.moved: Storage | None = None  # the copy below the device, where saved activations are moved there
        meter.change(kind, size)

    def become(self, kind: Kind) -> None:
        """Count as another kind from here on."""
        self._meter.change(self.kind, -self.size)
        self.kind = kind
        self._meter.change(kind, self.size)

    def is_in(self, meter: Meter) -> bool:
        """Whether this is counted there."""
        return self._meter is meter

    def __del__(self) -> None:
        self._meter.change(self.kind, -self.size)


class Weight:
    """A parameter, whose own memory is counted elsewhere."""

    __slots__ = ("numbers", "trained", "width")

    def __init__(self, numbers: int, width: int, *, trained: bool) -> None:
        self.numbers, self.width, self.trained = numbers, width, trained


class Node:
    """An operation of the backward pass: what it keeps for it, and how gradients of its inputs are made."""

    __slots__ = ("backward", "inputs", "order", "saved")

    def __init__(
        self,
        order: int,
        inputs: tuple[Node | Weight | None, ...],
        saved: list[Storage],
        backward: Backward,
    ) -> None:
        self.order, self.inputs, self.saved, self.backward = order, inputs, saved, backward


class Value:
    """A tensor of `numbers` numbers of `width` bytes: its memory, and the operation that it came from if it has one."""

    __slots__ = ("node", "numbers", "storage", "width")

    def __init__(self, numbers: int, width: int, storage: Storage, node: Node | None = None) -> None:
        self.numbers, self.width, self.storage, self.node = numbers, width, storage, node


class Tape:
    """Operations on values; with `grad` they keep what their backward pass needs.

    `autocast` is the width of the type that products run in (0: none is cast), `offload` moves what is saved from now
    on below the device, `retain` lets a backward pass leave what was saved for another one. Gradients of weights stay
    in `gradients` with `keep`, unless those of an earlier micro-batch are `present`, to which they are added.
    """

    def __init__(self, *, grad: bool, present: bool = False, keep: bool = True) -> None:
        self.meter, self.below = Meter(), Meter()
        self.grad, self.present, self.keep = grad, present, keep
        self.autocast, self.offload, self.retain = 0, False, False
        self.gradients: list[Storage] = []
        self._cast: dict[Weight, Value] = {}  # autocast's cache
        self._count = 0

    # --- memory

    def storage(self, size: int, kind: Kind = "activations") -> Storage:
        """New memory."""
        return Storage(self.meter, size, kind)

    def empty(self, numbers: int, width: int, kind: Kind = "activations") -> Value:
        """A tensor that no gradient flows through."""
        return Value(numbers, width, self.storage(numbers * width, kind))

    def kept(self, storages: Sequence[Storage]) -> list[Storage]:
        """What an operation holds on to: the storages, or their copies below the device."""
        if not self.offload:
            return list(storages)
        for storage in storages:
            if storage.moved is None:
                storage.moved = Storage(self.below, storage.size, "activations")
        return [storage.moved for storage in storages if storage.moved is not None]

    def made(
        self,
        numbers: int,
        width: int,
        inputs: Sequence[Value | Weight | None],
        saved: Sequence[Value],
        backward: Backward,
        kind: Kind = "activations",
    ) -> Value:
        """The output of an operation."""
        out = self.empty(numbers, width, kind)
        out.node = self.node(inputs, [value.storage for value in saved], backward)
        return out

    def node(
        self, inputs: Sequence[Value | Weight | None], saved: Sequence[Storage], backward: Backward
    ) -> Node | None:
        """The operation for the backward pass; None where no gradient is wanted."""
        edges = tuple(each.node if isinstance(each, Value) else _trained(each) for each in inputs)
        return self.always(edges, saved, backward) if self.grad and any(edges) else None

    def always(self, edges: tuple[Node | Weight | None, ...], saved: Sequence[Storage], backward: Backward) -> Node:
        """An operation for the backward pass, whether or not a gradient flows on from it."""
        self._count += 1
        return Node(self._count, edges, self.kept(saved), backward)

    # --- autocast

    @contextlib.contextmanager
    def casting(self, width: int) -> Iterator[None]:
        """Within, products run in a type of this width; copies of trained weights live as long."""
        before, self.autocast = self.autocast, width
        try:
            yield
        finally:
            self.autocast = before
            self._cast.clear()

    def for_product(self, weight: Weight) -> Value | None:
        """The copy of a weight that a product takes under autocast; None where it takes the weight itself."""
        if not self.autocast or weight.width == self.autocast:
            return None
        if weight not in self._cast:
            made = self.cast_weight(weight, self.autocast)
            if not (weight.trained and weight.width == 4):
                return made
            self._cast[weight] = made
        return self._cast[weight]

    def cast_weight(self, weight: Weight, width: int) -> Value:
        """weight.to(type): its gradient comes back in the weight's own type."""
        size = weight.numbers * weight.width
        return self.made(weight.numbers, width, [weight], [], lambda g: [self.storage(size)], "buffers")

    # --- the backward pass

    def backward(self, root: Node, gradient: Storage) -> None:
        """Gradients from the last operation to the first; what each has kept is freed once it is done."""
        waiting, uses = [(-root.order, root)], _uses(root)
        held: dict[Node | Weight, Storage] = {root: gradient}
        del gradient
        while waiting:
            _, node = heapq.heappop(waiting)
            given = held.pop(node)
            back = [self.storage(storage.size) for storage in node.saved if storage.is_in(self.below)]
            made = list(node.backward(given))
            if not self.retain:
                node.saved = []
            del back, given
            for index, target in enumerate(node.inputs):
                arrived, made[index] = made[index], None
                if target is None:
                    continue
                assert arrived is not None, "every operation makes the gradients that are wanted of it"
                uses[target] -= 1
                self._add(held, target, arrived)
                del arrived
                if uses[target]:
                    continue
                if isinstance(target, Weight):
                    self._collect(held.pop(target))
                else:
                    heapq.heappush(waiting, (-target.order, target))

    def _add(self, held: dict[Node | Weight, Storage], target: Node | Weight, arrived: Storage) -> None:
        """A second gradient is added to the first in place, unless somebody else holds that too."""
        before = held.get(target)
        if before is None:
            held[target] = arrived
        elif sum(before is other for other in held.values()) > 1:
            held[target] = self.storage(before.size)

    def _collect(self, gradient: Storage) -> None:
        """The gradient of a weight stays, or is added to the one that is there, or goes at once."""
        if self.keep and not self.present:
            gradient.become("gradients")
            self.gradients.append(gradient)


def _trained(weight: Weight | None) -> Weight | None:
    return weight if weight is not None and weight.trained else None


def _uses(root: Node) -> dict[Node | Weight, int]:
    """How many gradients each operation and weight will get."""
    uses: dict[Node | Weight, int] = {}
    todo, seen = [root], {root}
    while todo:
        for target in todo.pop().inputs:
            if target is None:
                continue
            uses[target] = uses.get(target, 0) + 1
            if isinstance(target, Node) and target not in seen:
                seen.add(target)
                todo.append(target)
    return uses

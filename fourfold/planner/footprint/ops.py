"""The operations that decoder layers are made of: the size of what each makes, and what it keeps for its backward pass.

What stands in a backward function lives as long as the graph, so that none of them may name a value: they name sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fourfold.planner.footprint.tape import Backward, Gradients, Storage, Tape, Value, Weight


def size_of(x: Value) -> int | None:
    """Bytes of the gradient of a value; None where none is wanted."""
    return x.numbers * x.width if x.node is not None else None


def made_of(t: Tape, *sizes: int | None) -> Gradients:
    """Gradients of these sizes."""
    return [None if size is None else t.storage(size) for size in sizes]


def fresh(t: Tape, *sizes: int | None) -> Backward:
    """A backward function that makes a gradient for each input."""
    return lambda g: made_of(t, *sizes)


def view(t: Tape, x: Value, numbers: int = 0) -> Value:
    """The same memory in another shape, whose gradient passes as it is; or `numbers` of it, filled up with zeros."""
    if not numbers:
        return Value(x.numbers, x.width, x.storage, t.node([x], [], lambda g: [g]))
    return Value(numbers, x.width, x.storage, t.node([x], [], fresh(t, size_of(x))))


def cast(t: Tape, x: Value, width: int) -> Value:
    """x.to(type): nothing where it has it."""
    return x if x.width == width else t.made(x.numbers, width, [x], [], fresh(t, size_of(x)))


def elementwise(t: Tape, x: Value, saved: Sequence[Value] = ()) -> Value:
    """An operation of one tensor that keeps what `saved` says."""
    return t.made(x.numbers, x.width, [x], saved, fresh(t, size_of(x)))


def power(t: Tape, x: Value) -> Value:
    """x ** n keeps x; its gradient g n x^(n - 1) is made in three steps that are all there at its end."""
    size = size_of(x)

    def back(g: Storage) -> Gradients:
        steps = [t.storage(size or 0) for _ in range(3)]
        return [steps.pop()]

    return t.made(x.numbers, x.width, [x], [x], back)


def reduced(t: Tape, x: Value, numbers: int) -> Value:
    """A mean or sum of `numbers` numbers."""
    return t.made(numbers, x.width, [x], [], fresh(t, size_of(x)))


def add(t: Tape, a: Value, b: Value) -> Value:
    """a + b keeps nothing and gives both the same gradient, but for one of another type."""
    width = max(a.width, b.width)
    sizes = [0 if each.width == width else size_of(each) for each in (a, b)]

    def back(g: Storage) -> Gradients:
        return [g if size == 0 else None if size is None else t.storage(size) for size in sizes]

    return t.made(max(a.numbers, b.numbers), width, [a, b], [], back)


def multiply(t: Tape, a: Value, b: Value) -> Value:
    """a * b keeps of each what the other's gradient needs."""
    numbers, width = max(a.numbers, b.numbers), max(a.width, b.width)
    saved = [*([a] if b.node else []), *([b] if a.node else [])]
    sizes = [size_of(a), size_of(b)]

    def back(g: Storage) -> Gradients:
        return [None if size is None else _of_product(t, size, numbers * width) for size in sizes]

    return t.made(numbers, width, [a, b], saved, back)


def _of_product(t: Tape, size: int, whole: int) -> Storage:
    """The gradient of a factor is as large as the product before it is summed to the factor's shape, or cast."""
    product = t.storage(whole)
    return product if size == whole else t.storage(size)


def scale(t: Tape, weight: Weight, x: Value) -> Value:
    """weight * x with a vector."""
    width = max(weight.width, x.width)
    whole, vector, size = x.numbers * width, weight.numbers * weight.width, size_of(x)
    trained = weight.trained

    def back(g: Storage) -> Gradients:
        of_x = None if size is None else _of_product(t, size, whole)
        return [_of_product(t, vector, whole) if trained else None, of_x]

    return t.made(x.numbers, width, [weight, x], [x] if trained else [], back)


def linear(t: Tape, x: Value, weight: Weight, outputs: int, few_rows: bool = False) -> Value:
    """x W^T keeps x where W is trained, and the copy of W that was made for it where x has a gradient."""
    numbers = x.numbers * outputs // (weight.numbers // outputs)
    x = cast(t, x, t.autocast or x.width)
    held = t.for_product(weight)
    if held is None and weight.width != x.width:
        held = t.cast_weight(weight, x.width)  # a weight that is held narrowly is widened for each product
    if few_rows and not t.grad:
        transposed = t.empty(numbers, x.width)
        out = t.empty(numbers, x.width)
        del transposed
        return out
    saved = [*([x] if weight.trained else []), *([held] if held is not None and x.node else [])]
    back = fresh(t, size_of(x), weight.numbers * x.width if weight.trained else None)
    return t.made(numbers, x.width, [x, weight if held is None else held], saved, back)


def custom(t: Tape, numbers: int, width: int, inputs: Sequence[Value], saved: Sequence[Value]) -> Value:
    """An operation whose backward pass makes a gradient for each input."""
    return t.made(numbers, width, inputs, saved, fresh(t, *map(size_of, inputs)))


def keeping_output(t: Tape, numbers: int, width: int, inputs: Sequence[Value], saved: Sequence[Value]) -> Value:
    """As `custom`, for an operation whose backward pass also needs what it gave."""
    out = custom(t, numbers, width, inputs, [])
    if out.node is not None:
        out.node.saved = t.kept([*(each.storage for each in saved), out.storage])
    return out


def checkpointed(t: Tape, x: Value, run: Callable[[Value], Value]) -> Value:
    """Keeps x alone; the backward pass makes the rest again."""
    if not t.grad:
        return run(x)
    t.grad = False
    forgotten = run(Value(x.numbers, x.width, x.storage))
    t.grad = True
    numbers, width, wanted = x.numbers, x.width, x.node is not None

    def back(g: Storage) -> Gradients:
        anchor = Anchor(t, Value(numbers, width, t.storage(0)), wanted)  # the engine holds what was saved until the end
        again = run(anchor.value)
        node = again.node
        assert node is not None
        del again
        t.backward(node, g)
        return [anchor.taken.pop() if wanted else None]

    forgotten.node = t.always((x.node,), [x.storage], back)
    return forgotten


class Anchor:
    """A value of the same memory at which gradients end; it takes the one that arrives.

    Nothing here refers to itself: storages are to end with their last user, not when Python collects cycles.
    """

    def __init__(self, t: Tape, x: Value, wanted: bool = True) -> None:
        self.taken: list[Storage] = []
        self.value = Value(x.numbers, x.width, x.storage, t.always((), [], _into(self.taken)) if wanted else None)


def _into(taken: list[Storage]) -> Backward:
    def back(g: Storage) -> Gradients:
        taken.append(g)
        return []

    return back

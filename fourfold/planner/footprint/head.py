"""What stands on a branch: log-probs a chunk at a time, one sampled token, numbers of a token (models/heads.py)."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.planner.footprint import ops
from fourfold.planner.footprint.tape import Gradients, Storage, Tape, Value, Weight
from fourfold.planner.number_head import NumberHead

# As in fourfold/algorithms/log_probs.py: rows of logits at a time, numbers of a block of them, rows widened at once.
CHUNK_TOKENS, WIDENED_ROWS = 1024, 8192
CPU_BLOCK, GPU_BLOCK = 2**18, 2**24
# A draw sums the vocabulary in blocks of so many tokens, in float64 (rollout/draw.py).
DRAW_BLOCK = 256


@dataclass(frozen=True, slots=True)
class HeadForm:
    """A language head over `vocabulary` tokens; `product` is the width in which logits are multiplied."""

    vocabulary: int
    hidden: int
    compute: int
    width: int
    product: int
    softcap: bool = False
    trained: bool = False
    in_pieces: bool = False  # held narrower than it multiplies, and widened some rows at a time
    cuda: bool = False

    @property
    def numbers(self) -> int:
        """Of its weight."""
        return self.vocabulary * self.hidden

    @property
    def piece(self) -> int:
        """Bytes of the rows of the weight that are widened at once."""
        return min(WIDENED_ROWS, self.vocabulary) * self.hidden * self.product

    def block_rows(self, chunk: int) -> int:
        """Rows that are finished at once."""
        return min(max((GPU_BLOCK if self.cuda else CPU_BLOCK) // self.vocabulary, 1), chunk)


def log_probs(t: Tape, hidden: Value, weight: Weight, form: HeadForm, entropy: str) -> Value:
    """Log-probs of the labels: one chunk's logits, one block of them in float32 and as much scratch."""
    hidden = ops.cast(t, hidden, form.compute)
    held = None
    if weight.width != form.compute and not form.in_pieces:
        held = t.cast_weight(weight, form.compute)
    tokens = hidden.numbers // form.hidden
    chunk = min(CHUNK_TOKENS, tokens)
    ahead = hidden.node is not None and not weight.trained and entropy != "learn"
    found = [t.empty(tokens, 4), t.empty(tokens, 4)]
    slopes = t.empty(tokens * form.hidden, 4) if ahead else None
    logits = t.storage(chunk * form.vocabulary * form.product, "logits")
    _product(t, form, chunk, hidden.width)
    block = form.block_rows(chunk) * form.vocabulary * 4
    # A chunk's first block is made while the last one of the chunk before is still there.
    blocks = [t.storage(block, "logits") for _ in range(2 + (tokens > chunk) + (form.softcap and ahead))]
    if ahead:
        del blocks[2:]
        _into_hidden(t, form, chunk)
    del blocks
    kept = [hidden.storage, *(value.storage for value in found)]
    kept += [slopes.storage] if slopes is not None else [logits, *([held.storage] if held is not None else [])]
    out, width = t.empty(tokens, 4), hidden.width

    def back(g: Storage) -> Gradients:
        if ahead:
            of_hidden = t.storage(tokens * form.hidden * 4)
            return [of_hidden if width == 4 else t.storage(tokens * form.hidden * width), None]
        return _of_log_probs(t, form, tokens, chunk, width, entropy)

    out.node = t.node([hidden, held or weight], kept, back)
    return out


def _product(t: Tape, form: HeadForm, chunk: int, width: int) -> None:
    """The product into the logits: rows in its type, and where the weight has another, pieces of that."""
    rows = t.storage(chunk * form.hidden * form.product) if width != form.product else None
    if form.in_pieces or form.compute != form.product:
        piece = t.storage(form.piece, "buffers")
        del piece
    del rows


def _into_hidden(t: Tape, form: HeadForm, chunk: int) -> None:
    """A chunk's gradient times the weight."""
    into = [t.storage(chunk * form.hidden * form.product)]
    if form.in_pieces or form.compute != form.product:
        into.append(t.storage(form.piece, "buffers"))
    del into


def _of_log_probs(t: Tape, form: HeadForm, tokens: int, chunk: int, width: int, entropy: str) -> Gradients:
    """Gradients of hidden and weight; the chunk's logits are overwritten by theirs."""
    of_hidden = t.storage(tokens * form.hidden * width)
    size = form.block_rows(chunk) * form.vocabulary * 4
    blocks = [t.storage(size, "logits") for _ in range(1 + (tokens > chunk) + form.softcap + (entropy == "learn"))]
    del blocks[1 + (entropy == "learn") :]
    _into_hidden(t, form, chunk)
    if not form.trained:
        return [of_hidden, None]
    of_weight = t.storage(form.numbers * form.product, "buffers")
    del blocks
    if tokens > chunk and form.product != 4:
        of_weight = t.storage(form.numbers * 4, "buffers")  # the sum, once there are two products
        added = t.storage(form.numbers * form.product, "buffers")
        del added
    held = 4 if tokens > chunk else form.product
    return [of_hidden, of_weight if form.compute == held else t.storage(form.numbers * form.compute, "buffers")]


def sample(t: Tape, rows: int, form: HeadForm) -> None:
    """Logits of one token a row, tempered, and their powers."""
    numbers = rows * form.vocabulary
    few = rows <= 64 and form.compute == 4 and not form.cuda
    widened = (
        t.storage(min(WIDENED_ROWS, form.vocabulary) * form.hidden * form.compute, "buffers")
        if form.in_pieces
        else None
    )
    product = [t.storage(numbers * form.compute, "logits") for _ in range(1 + (few or form.in_pieces))]
    del widened
    logits = t.storage(numbers * 4, "logits") if form.compute != 4 else product.pop()
    product.clear()
    if form.softcap:
        capped = [t.storage(numbers * 4, "logits") for _ in range(2)]
        del capped
    tempered = t.storage(numbers * 4, "logits")
    del logits
    powers = t.storage(numbers * 4, "logits")
    edges = t.storage(3 * 8 * rows * -(-form.vocabulary // DRAW_BLOCK), "logits")
    del tempered, powers, edges


def values(t: Tape, hidden: Value, head: NumberHead, *, size: int, trained: bool) -> Value:
    """Float32 numbers of every token, from hidden states of `size`."""
    hidden = ops.cast(t, hidden, 4)
    sizes = head.matrices(size)
    out = ops.linear(t, hidden, Weight(sizes[0], 4, trained=trained), head.outputs)
    if not head.width:
        return out
    inner, outer = (Weight(numbers, 4, trained=trained) for numbers in sizes[1:])
    units = ops.linear(t, hidden, inner, head.outputs * head.width)
    weighed = ops.scale(t, outer, ops.elementwise(t, units, [units]))
    return ops.add(t, out, ops.reduced(t, weighed, out.numbers))


def full_kl(t: Tape, tokens: int, first: HeadForm, second: HeadForm) -> None:
    """KL over the vocabulary: half a chunk of logits of each of two models, and three blocks of them in float32."""
    chunk = min(CHUNK_TOKENS // 2, tokens)
    logits = [t.storage(chunk * form.vocabulary * form.product, "logits") for form in (first, second)]
    widened = [
        t.storage(form.numbers * form.compute, "buffers")
        for form in (first, second)
        if form.width != form.compute and not form.in_pieces
    ]
    block = first.block_rows(chunk) * first.vocabulary * 4
    blocks = [t.storage(block, "logits") for _ in range(3 + 2 * (tokens > chunk))]
    del logits, widened, blocks


def picked(t: Tape, hidden: Value, numbers: int) -> Value:
    """`numbers` of the hidden states, those before each response token: a slice, and of that the tokens that count."""
    return ops.custom(t, numbers, hidden.width, [ops.view(t, hidden, numbers)], [])

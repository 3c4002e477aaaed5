"""Decoding with slots: a row that has ended makes room for one that waits, and what two prompts share is computed once.

Active rows are in the first slots. A step draws a token for each of them and takes it through the trunk at once, the
last one of a row too, whose state only the reward model looks at. Rows that wait are taken up when the slots without a
row have cost as much as a step does: their prompts are a pass of their own, which reads all weights as a step does. A
row that differs from the one before it in the last token of its prompt at most does not wait: that token goes through
the trunk with the next step of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from fourfold.errors import RunFailed
from fourfold.models.loading import Base
from fourfold.models.roles import Policy
from fourfold.models.slot_cache import Places, SlotCache, SlotPass
from fourfold.models.slot_pass import slot_pass_of
from fourfold.models.split import Part
from fourfold.rollout.draw import draw_tokens, row_uniforms
from fourfold.rollout.sampler import PromptBatch

# A prefix of fewer tokens than this, over all prompts that have it, is not worth reading the weights for it alone.
SHARED_TOKENS = 64
# Columns that a step looks at are a multiple of this, because kernels are made for shapes.
COLUMNS = 32


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    stop_strings: tuple[str, ...] = ()
    weights: str = "as_trained"  # or the kind in which decoding holds what is trained (memory/quantization.py)

    def limited(self, prompts: PromptBatch) -> SamplingSettings:
        """With the limit of these prompts, where they have one."""
        limit = prompts.max_new_tokens
        return self if limit is None else replace(self, max_new_tokens=limit)


class Drawn:
    """All rows of a rollout: prompts left-padded to `width` columns, then what has been drawn so far."""

    def __init__(self, base: Base, policy: Policy, settings: SamplingSettings, prompts: PromptBatch) -> None:
        device, count, limit = next(policy.parameters()).device, len(prompts.tokens), settings.max_new_tokens
        self.width = max(len(tokens) for tokens in prompts.tokens)
        sequences = torch.full((count, self.width + limit), base.pad_id)
        prompt_mask = torch.zeros((count, self.width), dtype=torch.bool)
        for row, tokens in enumerate(prompts.tokens):
            sequences[row, self.width - len(tokens) : self.width] = torch.tensor(tokens)
            prompt_mask[row, self.width - len(tokens) :] = True
        self.sequences, self.prompt_mask = sequences.to(device), prompt_mask.to(device)
        self.log_probs = torch.zeros((count, limit), device=device)
        self.lengths = torch.full((count,), limit, device=device)
        self.truncated = torch.ones(count, dtype=torch.bool, device=device)
        self.activations: Tensor | None = None
        if base.trunk is not None and policy.trunk is None:
            shape = (count, self.width + limit, base.trunk.hidden_size)
            self.activations = torch.zeros(shape, dtype=base.trunk.compute_dtype, device=device)


class Decoder:
    """Draws a response for every row; `finished` is told which rows have ended, between steps."""

    def __init__(
        self,
        base: Base,
        policy: Policy,
        settings: SamplingSettings,
        prompts: PromptBatch,
        slots: int,
        slot_pass: Callable[[Part], SlotPass | None] = slot_pass_of,
        finished: Callable[[Drawn, Sequence[int]], None] = lambda drawn, rows: None,
    ) -> None:
        self._base, self._policy, self._settings = base, policy, settings
        self._prompts = [tuple(tokens) for tokens in prompts.tokens]
        self._finished = finished
        self._slots = slots
        self.drawn = Drawn(base, policy, settings, prompts)
        device, limit = self.drawn.sequences.device, settings.max_new_tokens
        self._uniforms = row_uniforms(prompts.seeds, limit).to(device)
        self._eos = torch.tensor(sorted(base.eos_ids), device=device)
        self._trunk = policy.trunk or base.trunk
        capacity = self.drawn.width + limit
        self._caches = {
            part: SlotCache(
                part.num_layers, slots, capacity, keys_by_column=device.type == "cpu", slot_pass=slot_pass(part)
            )
            for part in (self._trunk, policy.branch)
            if part is not None
        }
        self._waiting = 0  # the next row to take up
        self._newest = 0  # the slot in which the prompt of the last row taken up is, whether or not the row has ended
        self._idle = 0  # slots without a row, summed over steps since rows were last taken up
        # Of the active rows, slot by slot: which they are, how many tokens they have drawn, and the branch's input.
        self._rows: list[int] = []
        self._drawn: list[int] = []
        self._joining: list[int] = []  # rows in the slots after those, whose last prompt token the next step takes
        self._inputs = torch.empty(0, device=device)

    def run(self) -> Drawn:
        """Decode until every row has ended or reached the limit."""
        self._take_up(self._slots)
        while self._rows:
            ended = self._draw(self._through(self._policy.branch, self._inputs, self._step_places()))
            self._drawn = [*(count + 1 for count in self._drawn), *[0] * len(self._joining)]
            self._rows, self._joining = [*self._rows, *self._joining], []
            self._inputs = self._trunk_step()
            if any(ended):
                self._retire([slot for slot, has in enumerate(ended) if has])
            free = self._slots - len(self._rows)
            self._idle += free
            if self._waiting < len(self._prompts):
                ready = free if self._idle >= self._slots or not self._rows else self._one_token_each(free)
                if ready:
                    self._take_up(ready)
        self._caches.clear()  # the log-probs need their room
        return self.drawn

    # --- steps --------------------------------------------------------------------------------------------------------

    def _draw(self, hidden: Tensor) -> list[bool]:
        """Draw a token for every active row from the branch's output; whether it is the row's last one."""
        drawn, rows, t = self.drawn, self._tensor(self._rows), self._tensor(self._drawn)
        logits = self._policy.head.logits(hidden[:, 0], self._policy.branch.compute_dtype)
        if self._settings.temperature != 1.0:
            logits = logits / self._settings.temperature
        found = draw_tokens(logits, self._uniforms[rows, t])
        if found is None:
            kept = drawn.activations
            below = kept is not None and not bool(torch.isfinite(kept[rows]).all())
            trunk = ", nor are the trunk's activations below them" if below else ""
            raise RunFailed(
                f"generate: the actor's logits for response token {min(self._drawn)} are not finite{trunk}; weights "
                "are damaged or the learning rate is too high; the last good checkpoint is kept"
            )
        token, drawn.log_probs[rows, t] = found
        drawn.sequences[rows, drawn.width + t] = token
        chosen = torch.isin(token, self._eos)
        if self._settings.stop_strings:
            chosen |= self._tensor(self._complete_stop_strings()).bool()
        drawn.lengths[rows] = t + 1
        drawn.truncated[rows] = ~chosen
        return (chosen | (t + 1 == self._settings.max_new_tokens)).tolist()

    def _complete_stop_strings(self) -> list[int]:
        """1 for rows whose text holds a stop string now that a token more has been drawn."""
        width = self.drawn.width
        ids = [self.drawn.sequences[row, width : width + t + 1].tolist() for row, t in self._progress()]
        texts = self._base.tokenizer.batch_decode(ids, skip_special_tokens=False)
        return [any(stop in text for stop in self._settings.stop_strings) for text in texts]

    def _progress(self) -> list[tuple[int, int]]:
        """(row, tokens drawn) of every active slot."""
        return list(zip(self._rows, self._drawn, strict=True))

    def _step_places(self) -> Places:
        """Of the last token of every active row."""
        positions = [len(self._prompts[row]) + count - 1 for row, count in self._progress()]
        length = min(-(-(max(positions) + 1) // COLUMNS) * COLUMNS, self.drawn.width + self._settings.max_new_tokens)
        return Places(slice(0, len(positions)), self._tensor(positions)[:, None], length)

    def _trunk_step(self) -> Tensor:
        """Take the tokens that were drawn last through the trunk; returns the branch's input [rows, 1, ...]."""
        rows, columns = self._tensor(self._rows), self._tensor(self._drawn) + self.drawn.width - 1
        ids = self.drawn.sequences[rows, columns][:, None]
        if self._trunk is None:
            return ids
        out = self._through(self._trunk, ids, self._step_places())
        if self.drawn.activations is not None:
            self.drawn.activations[rows, columns] = out[:, 0]
        return out

    def _through(self, part: Part, inputs: Tensor, places: Places) -> Tensor:
        return part(inputs, None, cache=self._caches[part].at(places))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.drawn.sequences.device)

    # --- rows come and go ---------------------------------------------------------------------------------------------

    def _retire(self, slots: Sequence[int]) -> None:
        """Take rows out that have ended; the last active ones change places with them."""
        done = [self._rows[slot] for slot in slots]
        going = [slot for slot in range(len(self._rows)) if slot not in set(slots)]
        order = list(range(len(going)))
        movers = [slot for slot in going if slot >= len(going)]
        for hole, mover in zip([slot for slot in slots if slot < len(going)], movers, strict=True):
            order[hole] = mover
            for cache in self._caches.values():
                cache.swap(hole, mover, max(len(self._prompts[self._rows[i]]) + self._drawn[i] for i in (hole, mover)))
            self._newest = {hole: mover, mover: hole}.get(self._newest, self._newest)
        self._rows, self._drawn = [self._rows[i] for i in order], [self._drawn[i] for i in order]
        self._inputs = self._inputs[order]
        self._finished(self.drawn, done)

    def _one_token_each(self, most: int) -> int:
        """How many of the next rows differ from the one before them in the last token of the prompt at most."""
        before, waiting = self._prompts[self._waiting - 1][:-1], self._prompts[self._waiting : self._waiting + most]
        return sum(1 for _ in takewhile(lambda prompt: prompt[:-1] == before, waiting))

    def _take_up(self, most: int) -> None:
        """Put waiting rows into slots without a row; what they share with the row before them is not computed."""
        first, newest = len(self._rows), self._waiting - 1
        new = list(range(self._waiting, min(self._waiting + most, len(self._prompts))))
        joins = first > 0 and self._trunk is not None and self._one_token_each(len(new)) == len(new)
        slots = {row: first + place for place, row in enumerate(new)} | ({newest: self._newest} if newest >= 0 else {})
        # Responses to one prompt are neighbours.
        sources = {self._prompts[newest]: newest} if newest >= 0 else {}
        for row in new:
            sources.setdefault(self._prompts[row], row)
        fresh = [row for row in new if sources[self._prompts[row]] == row]
        same = [row for row in new if row not in set(fresh)]
        found = []
        self._share_prompts([row for row in same if sources[self._prompts[row]] == newest], sources, slots)
        if fresh:  # one of which may take the slot of the row before them
            start = self._share_prefix(fresh, newest, slots)
            if not joins:
                found.append(self._prefill(fresh, [start] * len(fresh), self._ends(fresh), slots))
        self._share_prompts([row for row in same if sources[self._prompts[row]] != newest], sources, slots)
        self._waiting, self._newest = self._waiting + len(new), slots[new[-1]]
        if joins:
            self._joining = new
            return
        self._idle = 0
        if same:
            found.append(self._prefill(same, [end - 1 for end in self._ends(same)], self._ends(same), slots))
        place = {row: i for i, row in enumerate([*fresh, *same])}
        inputs = torch.cat(found)[[place[row] for row in new]]
        self._inputs = torch.cat([self._inputs, inputs]) if first else inputs
        self._rows, self._drawn = [*self._rows, *new], [*self._drawn, *[0] * len(new)]

    def _ends(self, rows: Sequence[int]) -> list[int]:
        return [len(self._prompts[row]) for row in rows]

    def _share_prefix(self, fresh: Sequence[int], newest: int, slots: Mapping[int, int]) -> int:
        """Give all these rows the prefix that they have in common, where that saves work; returns its length."""
        source = newest if newest >= 0 else fresh[0]
        prompts = [self._prompts[row] for row in (source, *fresh)]
        same = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
        # The last token of a prompt is not shared: what the trunk makes of it is the branch's next input.
        length = min(sum(1 for _ in same), min(self._ends(fresh)) - 1)
        if newest < 0:
            if length * (len(fresh) - 1) < SHARED_TOKENS:
                return 0
            self._prefill(fresh[:1], [0], [length], slots, whole=True)
        self._share(source, [row for row in fresh if row != source], length, slots)
        return length

    def _share_prompts(
        self, rows: Sequence[int], sources: Mapping[tuple[int, ...], int], slots: Mapping[int, int]
    ) -> None:
        """Give these rows all but the last token of their prompts, each from the row that has the same one."""
        for row in rows:
            self._share(sources[self._prompts[row]], [row], len(self._prompts[row]) - 1, slots)

    def _share(self, source: int, rows: Sequence[int], columns: int, slots: Mapping[int, int]) -> None:
        """Copy the first tokens of a row's prompt to other rows that begin likewise."""
        targets = self._tensor([slots[row] for row in rows])
        for cache in self._caches.values():
            cache.share(slots[source], targets, columns)
        if (kept := self.drawn.activations) is not None:
            begins = {row: self.drawn.width - len(self._prompts[row]) for row in (source, *rows)}
            for row in rows:
                kept[row, begins[row] : begins[row] + columns] = kept[source, begins[source] : begins[source] + columns]

    def _prefill(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        slots: Mapping[int, int],
        *,
        whole: bool = False,
    ) -> Tensor:
        """Take prompt tokens [start, stop) of each row through the parts; returns the branch's input at the last one.

        That one is left to the first step of the branch, but in a `whole` pass.
        """
        drawn, time = self.drawn, max(stop - start for start, stop in zip(starts, stops, strict=True))
        positions = self._tensor(starts)[:, None] + torch.arange(time, device=drawn.sequences.device)
        real = positions < self._tensor(stops)[:, None]
        at, begins = self._tensor(rows)[:, None].expand_as(positions), drawn.width - self._tensor(self._ends(rows))
        columns = (positions + begins[:, None]).clamp(max=drawn.width - 1)
        x = drawn.sequences[at, columns]
        places = Places(self._tensor([slots[row] for row in rows]), positions, max(stops))
        if self._trunk is not None:
            x = self._through(self._trunk, x, places)
            if drawn.activations is not None:
                drawn.activations[at[real], columns[real]] = x[real]
        if (length := time if whole else time - 1) > 0:
            before = Places(places.slots, positions[:, :length], max(stops) - time + length)
            self._through(self._policy.branch, x[:, :length], before)
        return x[torch.arange(len(rows)), real.sum(dim=1) - 1][:, None]

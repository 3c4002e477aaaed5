"""Branch and bound below one start of a search: which options of the levers left free are best together.

Every option is looked at alone, and as the last where all others save most. Taken for granted is that nowhere between
it saves more, adds more, or costs less than in one of the two, but for a margin. Then no choice of what is left is
faster than the fastest option of each lever plus what it takes at least to get rid of the bytes that this is over the
budget (the linear relaxation of the knapsack: cheapest bytes first), and none is smaller than the smallest option of
each, without what these add in some moments: branches that cannot win or cannot fit are cut off. At the end, no change
of a single lever makes the best one better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fourfold.planner.bill import Moment
from fourfold.planner.candidates import Candidate, Candidates
from fourfold.planner.choices import Dimension, Option, dimensions
from fourfold.planner.layout import Layout
from fourfold.planner.lever import Lever

# What saves most by its declaration may not be what saves most here: so much more than the budget is looked at closer.
CLOSE = 1.1
# Margins by which levers help or hinder each other: 8-bit moments, for one, make parking them cheaper (docs/log.md).
SLOWER, LARGER = 1.1, 1.01


@dataclass
class Free:
    """Options of which one is to be chosen, the fastest first; None is none of them."""

    options: tuple[Option | None, ...]
    smallest: Option | None
    saves: dict[Option | None, dict[Moment, int]] = field(default_factory=dict)  # bytes, against the fastest
    adds: dict[Moment, int] = field(default_factory=dict)  # bytes of the smallest, against the fastest
    host_saves: int = 0  # bytes of the host, the most that an option has fewer than the fastest
    costs: dict[Option | None, float] = field(default_factory=dict)  # of the rank, against the fastest

    @property
    def fastest(self) -> Option | None:
        """The option that is best where there is room."""
        return self.options[0]

    def learn(self, option: Option | None, fast: Candidate, small: Candidate) -> None:
        """Note what an option does where one candidate differs from the other by it alone."""
        saves, costs = self.saves.setdefault(option, {}), small.rank[1] - fast.rank[1]
        for moment, held in fast.held.items():
            saved = held - small.held.get(moment, 0)
            saves[moment] = max(saves.get(moment, 0), saved)
            if option == self.smallest:
                self.adds[moment] = max(self.adds.get(moment, 0), -saved)
        self.costs[option] = max(min(self.costs.get(option, costs), costs), 0.0)
        self.host_saves = max(self.host_saves, fast.host_peak - small.host_peak)

    def rate(self, moment: Moment) -> tuple[float, int]:
        """The least that a byte of this moment costs here, and how many there are to be had."""
        offers = [(self.costs[option] / saved, saved) for option in self.saves if (saved := self.saves[option][moment])]
        return min((rate for rate, _ in offers), default=0.0), max((saved for _, saved in offers), default=0)


@dataclass
class Branching:
    """The search below one start; `best` is the best that is known, from other starts at first.

    `fastest` are the fastest options, from an earlier layout at first: what is so in one is taken to be so in others.
    """

    candidates: Candidates
    root: Candidate
    layout: Layout
    best: Candidate | None
    fastest: list[Option | None] | None = None

    def run(self, fixed: AbstractSet[str], levers: Sequence[Lever]) -> Candidate | None:
        """The best of all that have the start's options and others of these levers besides."""
        choices = dimensions(self.root.scene, fixed, levers)
        if self._is_beaten() or not self._can_fit([dimension[-1] for dimension in choices]):
            return self.best
        free = [each for each in map(self._weighed, choices) if each is not None]
        self.fastest = [each.fastest for each in free]
        fast = self._completed(self.root.options, self.fastest)
        # Before the last effects are known: what options take off the host there, others have put on it.
        if fast is not None and _host_too_full(fast, free):
            return self.best
        self._weigh_last(free)
        # What costs most is decided first.
        self._descend(self.root.options, sorted(free, key=lambda each: -each.costs.get(each.smallest, 0.0)))
        while self._improved(choices):
            pass
        return self.best

    def _improved(self, choices: Sequence[Dimension]) -> bool:
        """Whether one option more, one less, or another of its dimension made the best one better."""
        before = self.best
        if before is None or before.scene.layout != self.layout or not self.root.options <= before.options:
            return False
        for dimension in choices:
            rest = before.options - set(dimension)
            for option in (None, *dimension):
                near = self._completed(rest, [option])
                if near is not None and not near.missing and not self._too_slow(near.rank[1]):
                    self.best = near
        return self.best is not before

    def _is_beaten(self) -> bool:
        """Whether the fastest options of an earlier layout are too slow in this one."""
        fast = None if self.fastest is None else self._completed(self.root.options, self.fastest)
        return fast is not None and self._too_slow(fast.rank[1])

    def _can_fit(self, smallest: Sequence[Option]) -> bool:
        """Whether it is worth looking closer: not where all that saves most, by its declaration, is far from fitting.

        With and without levers that round, because roles that are loaded in fewer bits are there in full for a moment.
        """
        kinds = (smallest, [option for option in smallest if not option.lever.rounds])
        if any(_contradict(self.root.options, kind) for kind in kinds):
            return True
        tried = [small for kind in kinds if (small := self._completed(self.root.options, kind)) is not None]
        least = [min(small.held.get(moment, 0) for small in tried) for moment in self.root.held if tried]
        return max(least, default=0) <= CLOSE * self.root.budget

    def _weighed(self, dimension: Dimension) -> Free | None:
        """A dimension without options that others of it surpass; None where that leaves none."""
        alone: dict[Option | None, Candidate] = {None: self.root}
        for option in dimension:
            candidate = self.candidates.get(self.root.options | {option}, self.layout)
            if candidate is not None:
                alone[option] = candidate
        kept: list[Option | None] = []
        for option in sorted(alone, key=lambda option: alone[option].rank):
            if option is None or all(_smaller_somewhere(alone[option], alone[other]) for other in kept):
                kept.append(option)  # without any is kept in any case: beside others it may be the smallest
        if kept == [None]:
            return None
        free = Free(tuple(kept), min(kept, key=lambda option: sum(alone[option].held.values())))
        for option in kept[1:]:
            free.learn(option, alone[kept[0]], alone[option])
        return free

    def _weigh_last(self, free: Sequence[Free]) -> None:
        """What each option does where all others are on that make it small."""
        smallest = [each.smallest for each in free]
        for place, each in enumerate(free):
            others = smallest[:place] + smallest[place + 1 :]
            fast = self._completed(self.root.options, [each.fastest, *others])
            for option in each.options[1:]:
                small = self._completed(self.root.options, [option, *others])
                if fast is not None and small is not None:
                    each.learn(option, fast, small)

    def _descend(self, taken: frozenset[Option], left: Sequence[Free]) -> None:
        """Look for better ones than `best` among all that have `taken`."""
        fast = self._completed(taken, [each.fastest for each in left])
        if fast is not None:
            if _host_too_full(fast, left) or self._too_slow((fast.rank[1] + self._least_costs(fast, left)) / SLOWER):
                return
            if not fast.missing:
                self.best = fast if not self._too_slow(fast.rank[1]) else self.best
                return
        if not left:
            return
        smallest = [each.smallest for each in left]
        small = self._completed(taken, smallest)
        if small is not None:
            if _too_large(small, left) and not _contradict(taken, smallest):
                return
            if not small.missing and not self._too_slow(small.rank[1]):
                self.best = small
        for option in left[0].options:
            if option is None:
                self._descend(taken, left[1:])
            elif all(option.beside(other) for other in taken):
                self._descend(taken | {option}, left[1:])

    def _too_slow(self, rank: float) -> bool:
        return self.best is not None and (self.root.rank[0], rank) >= self.best.rank

    def _least_costs(self, fast: Candidate, left: Sequence[Free]) -> float:
        """What getting rid of the bytes over the budget takes at least."""
        return max((self._least_of(moment, held - fast.budget, left) for moment, held in fast.held.items()), default=0)

    def _least_of(self, moment: Moment, over: int, left: Sequence[Free]) -> float:
        costs = 0.0
        for rate, bytes_there in sorted(each.rate(moment) for each in left):
            if over <= 0:
                break
            costs += rate * min(over, bytes_there)
            over -= bytes_there
        return costs

    def _completed(self, taken: frozenset[Option], options: Iterable[Option | None]) -> Candidate | None:
        chosen = set(taken)
        for option in options:
            if option is not None and all(option.beside(other) for other in chosen):
                chosen.add(option)
        return self.candidates.get(chosen, self.layout)


def _too_large(small: Candidate, left: Sequence[Free]) -> bool:
    """Whether it is over the budget in a moment, also without all that its options may add there."""
    added = {moment: sum(each.adds.get(moment, 0) for each in left) for moment in small.held}
    return any(held - added[moment] > LARGER * small.budget for moment, held in small.held.items())


def _host_too_full(fast: Candidate, left: Sequence[Free]) -> bool:
    """Whether host memory is over its budget, also without all that other options may take off it."""
    saved = sum(each.host_saves for each in left)
    return bool(fast.host_budget) and fast.host_peak - saved > LARGER * fast.host_budget


def _contradict(taken: Iterable[Option], options: Iterable[Option | None]) -> bool:
    """Whether not all of these can be on: then none of them is the smallest for certain."""
    wanted = [option for option in options if option is not None]
    return any(not option.beside(other) for option in wanted for other in (*taken, *wanted) if other is not option)


def _smaller_somewhere(one: Candidate, other: Candidate) -> bool:
    """Whether it holds less in some moment, or on the host."""
    return one.host_peak < other.host_peak or _smaller(one.held, other.held)


def _smaller(one: Mapping[Moment, int], other: Mapping[Moment, int]) -> bool:
    return any(held < other.get(moment, 0) for moment, held in one.items())

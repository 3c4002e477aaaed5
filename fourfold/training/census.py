"""What is resident while a stage runs, and what would save most of it: asked when memory has run out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from fourfold.backends.base import RoleOptimizer
from fourfold.config.schema import RunConfig
from fourfold.memory.budget import Budget, Shortage, give_back, stops_when_short, tensor_bytes
from fourfold.memory.meter import PhaseMeter
from fourfold.models.loading import Base
from fourfold.models.room import Room
from fourfold.planner.advice import Held, advice

# Settings named when the run goes on, and when it has to stop.
WHILE_IT_GOES_ON, WHEN_IT_STOPS = 1, 3


@dataclass
class Census:
    """Counts what a stage holds; made when weights and optimizer states are there and nothing is being computed."""

    config: RunConfig
    base: Base
    trained: Mapping[str, nn.Module]
    optimizers: Iterable[RoleOptimizer]
    weights: Callable[[], Mapping[str, int]]
    cached: Callable[[], int] | None = None  # activations of the trunk; else `cached_bytes` says
    set_aside: Callable[[], int] = lambda: 0  # gradients that are not at their parameters

    def __post_init__(self) -> None:
        if self.budget.bytes:
            give_back()
        self.cached_bytes = 0
        self._process = 0
        if self.budget.device.type != "cuda":
            self._process = max(self.budget.resident() - self._known(), 0)

    @property
    def budget(self) -> Budget:
        """The memory that the run may take."""
        return self.base.budget

    def _cached(self) -> int:
        return self.cached_bytes if self.cached is None else self.cached()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for module in self.trained.values() for p in module.parameters() if p.requires_grad]

    def _known(self) -> int:
        states = sum(optimizer.state_bytes() for optimizer in self.optimizers)
        return sum(self.weights().values()) + states + self._gradients() + self._cached()

    def _gradients(self) -> int:
        return tensor_bytes(p.grad for p in self._parameters()) + self.set_aside()

    def _matrix_shares(self) -> tuple[float, float]:
        """Of what roles share, and of a role's own: the share of decoder layers' float matrices."""
        shared, own = self.base.matrix_bytes()
        base = [self.base.policy, *([] if self.base.trunk is None else [self.base.trunk])]
        whole = tensor_bytes(p for module in base for p in module.parameters())
        return shared / max(whole - own, 1), own / max(tensor_bytes(self.base.policy.branch.parameters()), 1)

    def held(self, resident: int) -> Held:
        """What is resident now, when all of it together is `resident` bytes."""
        own = [getattr(module, "branch", None) for module in self.trained.values()]
        config = self.base.config
        return Held(
            weights=self.weights(),
            trained=tensor_bytes(self._parameters()),
            gradients=self._gradients(),
            states=sum(optimizer.state_bytes() for optimizer in self.optimizers),
            cache=self._cached(),
            passing=max(resident - self._known() - self._process, 0),
            process=self._process,
            matrix_shares=self._matrix_shares(),
            layers=int(getattr(config, "num_hidden_layers", 1)),
            own_layers=max(int(getattr(part, "num_layers", 1)) for part in own),
            trunk_layers=int(getattr(self.trained.get("trunk"), "num_layers", 0)),
            hidden=int(getattr(config, "hidden_size", 1)),
        )

    @contextlib.contextmanager
    def phase(self, meter: PhaseMeter, name: str) -> Iterator[None]:
        """Within, the meter measures this phase, and a shortage that no smaller pass can help ends the run."""
        with stops_when_short(name, "", self.budget, self.describe), meter.phase(name):
            yield

    def describe(self, shortage: Shortage) -> str:
        """What ran out, what is resident, and which settings would help most."""
        held = self.held(shortage.resident_bytes)
        proposed = advice(shortage.phase, held, self.config)
        proposed = proposed[: WHEN_IT_STOPS if shortage.final else WHILE_IT_GOES_ON]
        helps = "; ".join(map(str, proposed)) or "no setting that is not on; take more memory or a smaller model"
        return f"{shortage}. Resident: {held.describe()}. Would help most: {helps}"


def made_beside(base: Base, name: str, config: RunConfig) -> AbstractContextManager[None]:
    """Within, a supervised stage makes its role; RunFailed names it where memory runs out."""
    shared = tensor_bytes(p for part in (base.policy, base.trunk) if part is not None for p in part.parameters())
    loaded = {"base" if base.trunk is None else "trunk": shared}
    planned = Held(weights={**loaded, name: tensor_bytes(base.policy.parameters())})
    return Room(config, base.budget, planned, loaded=loaded).role(name)


def stage_census(
    config: RunConfig, base: Base, name: str, role: nn.Module, optimizer: RoleOptimizer, cached: Callable[[], int]
) -> Census:
    """Of a supervised stage, which trains one role beside the base."""

    def weights() -> dict[str, int]:
        own = tensor_bytes(role.parameters())
        shared = [base.policy, *([] if base.trunk is None else [base.trunk])]
        both = tensor_bytes(p for module in (role, *shared) for p in module.parameters())
        return {name: own, "base" if base.trunk is None else "trunk": both - own}

    return Census(config, base, {name: role}, (optimizer,), weights, cached)

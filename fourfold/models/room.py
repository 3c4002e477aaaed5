"""Roles are loaded one after the other within the memory budget; the one that does not fit is named (FAULTS J5)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fourfold.config.schema import RunConfig
from fourfold.memory.budget import Budget, Shortage, stops_when_short
from fourfold.planner.advice import Held, advice, mib


@dataclass
class Room:
    """What the whole run is to hold, and what is loaded of it; batch sizes are no matter here and are never named."""

    config: RunConfig
    budget: Budget
    planned: Held
    loaded: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, budget: Budget, whole: int, own: int, layers: tuple[int, int], hidden: int) -> Room:
        """For a model of `whole` bytes of which a role copies `own`; `layers` are the model's and a role's own."""
        roles = ["actor", "critic", "reference", *(["reward"] if config.reward.source != "function" else [])]
        weights = {"trunk" if config.sharing.mode == "trunk" else "base": whole - own} | dict.fromkeys(roles, own)
        planned = Held(
            weights={name: size for name, size in weights.items() if size},
            trained=2 * own,
            gradients=2 * own if config.precision.compute == "float16" else own,  # docs/decisions/0009
            states=4 * own,
            layers=layers[0],
            own_layers=layers[1],
            hidden=hidden,
        )
        return cls(config, budget, planned)

    @contextlib.contextmanager
    def role(self, name: str, wanted: int = 0) -> Iterator[None]:
        """Within, this role is loaded: `wanted` bytes more than are there; RunFailed where they do not fit."""
        with stops_when_short("load", name, self.budget, self._describe):
            self.budget.check(wanted)
            yield
            self.budget.check()
        self.loaded[name] = wanted

    def _describe(self, shortage: Shortage) -> str:
        loaded = replace(self.planned, weights=self.loaded, gradients=0, states=0).describe()
        proposed = "; ".join(map(str, advice("load", self.planned, self.config)[:3]))
        needed = sum(self.planned.weights.values()) + self.planned.gradients + self.planned.states
        need = f"; weights, gradients and optimizer states of the run need about {mib(needed)}" if needed else ""
        helps = proposed or "more memory, or a smaller model in model.path"
        return f"{shortage}. Loaded so far: {loaded}{need}. Would help most: {helps}"
